"""Every algorithm preset and experiment composes, and its leaves build."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from jaggrl.backward.interpolants import Exact
from jaggrl.build import make, resolve
from jaggrl.diffusion.exploration import Nowhere
from jaggrl.diffusion.grouping import eligible

CONF = Path(__file__).parents[2] / "conf"
ALGORITHMS = sorted(p.stem for p in (CONF / "algorithm").glob("*.yaml"))
EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))


@cache
def build(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        prompts = ["prompts.train=a.txt", "prompts.heldout=b.txt"]
        config = resolve(compose("train", overrides=[*overrides, *prompts]))
    node = dict(config["algorithm"])
    sampler = make(node.pop("rollout"), "algorithm")
    algorithm = make(node, "algorithm")
    backward = make(config["backward"], "backward")
    algorithm.check(
        not isinstance(backward.interpolant, Exact),
        sampler.init_noise,
        not isinstance(sampler.exploration, Nowhere),
        config["updates_per_rollout"],
        config["group_size"],
    )
    return config, algorithm, sampler


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_builds(name):
    _, algorithm, sampler = build(f"algorithm={name}")
    assert sampler.kernel is getattr(algorithm, "kernel", None) or sampler.kernel == algorithm.kernel


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_builds(name):
    build(f"experiment={name}")


def test_the_papers_step_counts():
    """Trained transitions and schedule lengths: DanceGRPO's scripts, JAGG's App. D, MixGRPO's window."""

    def trained(experiment):
        _, algorithm, sampler = build(f"experiment={experiment}")
        schedule, walk = sampler.plan(lambda n: None, 0, 0)
        steps = algorithm.trained_steps(SimpleNamespace(noisy_S=tuple(w is None for w in walk)))
        return eligible(len(steps), algorithm.timestep_fraction), len(walk)

    assert trained("dance_flux") == (9, 16)
    assert trained("dance_flux_lora") == (6, 12)
    assert trained("jagg_flux") == (20, 21)
    assert trained("jagg_fast_flux") == (12, 21)
    assert trained("mixgrpo_flux") == (4, 25)
    assert trained("mixgrpo_flash_flux") == (4, 11)
