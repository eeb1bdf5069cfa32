"""Every config composes, builds its cheap half, and bad input is one line with exit code 2 before weights load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from jaggrl.build import Config, check, resolve
from jaggrl.errors import UserError
from jaggrl.infra.precheck import precheck

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"


def composed(*overrides: str, name: str = "train") -> Config:
    """The resolved config of a command line."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose(name, overrides=list(overrides)))


def choices(group: str) -> list[str]:
    """The files of a config group."""
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("algorithm", choices("algorithm"))
def test_every_algorithm_builds(algorithm: str) -> None:
    config = composed(f"algorithm={algorithm}")
    if config["algorithm"].get("steps") == "permute":
        config = composed(f"algorithm={algorithm}", "backward=exact")
    check(config)


@pytest.mark.parametrize("backward", [b for b in choices("backward") if b != "base"])
def test_every_backward_builds(backward: str) -> None:
    check(composed(f"backward={backward}"))


@pytest.mark.parametrize("reward", [r for r in choices("reward") if r != "base"])
def test_every_reward_builds(reward: str) -> None:
    check(composed(f"reward={reward}"))


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    prompts = (
        [] if experiment.startswith("shapes") else ["prompts.train=train.txt", "prompts.heldout=test.txt"]
    )
    config = composed(f"experiment={experiment}", *prompts)
    if experiment.startswith("shapes"):
        check(config)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["group_size=1"], "group_size=1"),
        (["updates_per_rollout=20"], "updates_per_rollout=20"),
        (["algorithm.clip_range=0"], "clip_range=0"),
        (["algorithm.timestep_fraction=1.5"], "timestep_fraction=1.5"),
        (["algorithm.steps=permute"], "steps=permute"),
        (["algorithm.kernel.eta=0"], "eta=0"),
        (["backward.jagg_frac=1.1"], "jagg_frac=1.1"),
        (["backward.jagg_frac=-0.1"], "jagg_frac=-0.1"),
        (["backward.window=-1"], "window=-1"),
        (["backward.graph=parallel"], "graph=parallel"),
        (["backward.served=sometimes"], "served=sometimes"),
        (["algorithm.rollout.schedule.steps=1"], "steps=1"),
        (["algorithm.rollout.init_noise=all"], "init_noise=all"),
        (["precision=fp8"], "precision=fp8"),
        (["rollouts=0"], "rollouts=0"),
        (["micro_batch=-1"], "micro_batch=-1"),
        (["max_grad_norm=0"], "max_grad_norm=0"),
        (["ema_decay=1.5"], "ema_decay=1.5"),
        (["check=perhaps"], "check=perhaps"),
        (["model.path=/nowhere/at/all"], "/nowhere/at/all"),
        (["prompts.train=/nowhere.txt"], "/nowhere.txt"),
        (["'reward.weights={hpsv2: 0}'"], "reward.weights"),
        (["lora.rank=4"], "lora"),
        (["lora={rank: 0}"], "lora.rank=0"),
        (["lora={rnk: 4}"], "rnk"),
        (["lora={targets: to_q}"], "lora.targets=to_q"),
        (["optim.lr=-1"], "optim: Invalid learning rate"),
        (["logger.wandb=onlin"], "'online'"),
        (["max_skipped=0"], "max_skipped=0"),
        (["evaluation.prompts=0"], "evaluation.prompts=0"),
        (["evaluation.steps=1"], "evaluation.steps=1"),
        (["evaluation.micro_batch=0"], "evaluation.micro_batch=0"),
        (["evaluation.every=-1"], "evaluation.every=-1"),
        (["evaluation.grid=-1"], "evaluation.grid=-1"),
        (["checkpoint.every=0"], "checkpoint.every=0"),
        (["checkpoint.keep=0"], "checkpoint.keep=0"),
        (["reward.batch_size=0"], "reward.batch_size=0"),
        (["distributed.replicas=0"], "distributed.replicas=0"),
        (["seed=1.5"], "seed=1.5"),
        (["ema_decay=often"], "ema_decay=often"),
        (["+algorithm.nonsense=1"], "nonsense"),
    ],
)
def test_bad_values_are_refused_by_name(overrides: list[str], expected: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (Hydra refuses some itself)
        check(composed(*[o.strip("'") for o in overrides]))
    if isinstance(caught.value, UserError):
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert expected.split("=")[0] in str(caught.value)


def test_layout_that_does_not_divide_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="use prompts_per_rollout=3"):
        check(composed("group_size=4", "prompts_per_rollout=4", "updates_per_rollout=1"))


@pytest.mark.parametrize(
    ("typo", "expected"),
    [
        (
            "evaluation.before=false",
            "unknown config key 'evaluation.before': choose one of: baseline, every,",
        ),
        ("evaluation.evry=1", "unknown config key 'evaluation.evry': did you mean 'evaluation.every'?"),
        ("algorithm.clip_rang=0.1", "'algorithm.clip_rang': did you mean 'algorithm.clip_range'?"),
        ("algorithm.kernel.etta=1", "'algorithm.kernel.etta': did you mean 'algorithm.kernel.eta'?"),
        ("algorithm.eta=1", "unknown config key 'algorithm.eta': did you mean 'algorithm.kernel.eta'?"),
        ("algoritm.clip_range=1", "'algoritm.clip_range': did you mean 'algorithm.clip_range'?"),
        ("algorithm.nft_beta=1", "unknown config key 'algorithm.nft_beta': choose one of: advantage,"),
        ("rollout=2", "unknown config key 'rollout': did you mean 'rollouts' or 'algorithm.rollout'?"),
        ("~rolouts", "unknown config key 'rolouts': did you mean 'rollouts'?"),
        ("~nothing.here", "unknown config key 'nothing.here': --cfg job shows all keys"),
        ("lora.rank=4", "unknown config key 'lora.rank'"),
        ("rollouts=many", "rollouts=many: must be a number (the default is 2)"),
        ("optim.lr=fast", "optim.lr=fast: must be a number"),
        ("evaluation=5", "evaluation=5: has keys; choose one of: baseline, every,"),
        ("algorithm.rollout.exploration=Nowhere", "exploration=Nowhere: must be an object, as in {_target_"),
        ("reward.eval=hpsv2", "reward.eval=hpsv2: must be a list, as in reward.eval=[hpsv2]"),
        ("optim=adam", "unknown optim 'adam': did you mean 'adamw'?"),
        ("algorithm=dancegrpo", "unknown algorithm 'dancegrpo': did you mean 'dance_grpo'?"),
        ("scorers=published", "group 'scorers' is not used by train.yaml: here it is scorers@model.scorers="),
        ("+seeds=3", "+seeds: nothing reads it; did you mean 'seed'?"),
        ("++evaluation.sample=3", "+evaluation.sample: nothing reads it; did you mean 'evaluation.samples'?"),
        ("~seed", "~seed: the run needs it; give it another value instead of deleting it"),
        ("~evaluation", "~evaluation: the run needs it"),
        ("~optim", "~optim: the run needs it"),
        ("+rollouts=3", "Could not append to config. An item is already at 'rollouts'"),
    ],
)
def test_typo_beside_an_experiment_is_told_by_its_own_name(typo: str, expected: str) -> None:
    GlobalHydra.instance().clear()
    with pytest.raises(UserError) as caught:
        precheck(["experiment=shapes_dance", "debug=smoke", typo], "train", CONF)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("typo", ["experiment=shapes_danse", "debug=smok"])
def test_unknown_experiment_is_told(typo: str) -> None:
    GlobalHydra.instance().clear()
    with pytest.raises(UserError, match="did you mean '(shapes_dance|smoke)'"):
        precheck([typo, "seed=1"], "train", CONF)


def test_what_hydra_takes_and_something_reads_passes() -> None:
    GlobalHydra.instance().clear()
    more = [
        "++reward.weights.pickscore=1",
        "+reward.catalogue.mine={_target_: mine.Reward}",
        "++seed=3",
        "~optim.weight_decay",
        "+hydra.job.env_set.A=1",
        "ema_decay=0.5",
        "lora={rank: 4}",
        "backward.window=[4,2]",
        "reward.eval=[]",
    ]
    precheck(["experiment=shapes_dance", "scorers@model.scorers=published", *more], "train", CONF)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rolouts=3"], "rollouts"),
        (["algorithm=dancegrpo"], "dance_grpo"),
        (["backward.windw=4"], "window"),
        (["model.path=/nowhere"], "/nowhere"),
        (["prompts.train=README.md"], "README.md"),
        (["rollouts=many"], "rollouts"),
    ],
)
def test_bad_command_line_is_one_line_and_exit_code_2(arguments: list[str], expected: str) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jaggrl.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert expected in lines[0]
