"""Every algorithm with every backward strategy of ``conf/``, on toys: each cell trains, exact is plain autograd.

Run it as a script (``python -m tests.test_matrix``) to print the matrix, and the combinations that are refused.
"""

from functools import cache
from typing import Any

import pytest
import torch

from jaggrl.algorithms.base import Algorithm
from jaggrl.backward.interpolants import Ends, Exact, Linear
from jaggrl.backward.strategy import Backward
from jaggrl.build import make
from jaggrl.trainer import Trainer
from tests.algorithms.presets import PRESETS
from tests.test_config import choices, composed
from tests.test_refusals import print_refusals
from tests.toys import gradients, toy_trainer

DEFAULT = ("exact", "jagg", "jagg_sequential", "ablate")
STRATEGIES = [*DEFAULT, *sorted({*choices("backward")} - {*DEFAULT, "base"})]
"""The files of ``conf/backward``."""


@cache
def settings_of(strategy: str) -> dict[str, Any]:
    """The config of ``backward=strategy``."""
    return composed(f"backward={strategy}")["backward"]


def trainer_of(name: str, strategy: str = "exact", **loop) -> Trainer:
    algorithm, sampler = PRESETS[name]()
    backward = make(settings_of(strategy), "backward")
    return toy_trainer(algorithm, sampler, backward, updates_per_rollout=2, lr=0.05, **loop)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters])


def train_cell(name: str, strategy: str) -> str:
    """Two rollouts of two updates; an empty string, or what went wrong."""
    trainer = trainer_of(name, strategy)
    start = weights(trainer)
    for _ in range(2):
        metrics = trainer.step()
        if not all(torch.tensor(v).isfinite() for k, v in metrics.items() if k.startswith("train/")):
            return f"not finite: {metrics}"
    moved = (weights(trainer) - start).abs().max()
    if not (moved.isfinite() and moved > 0) or trainer.policy.version != 4:
        return f"did not train: moved {float(moved)} in {trainer.policy.version} updates"
    return ""


@pytest.mark.parametrize(
    "strategy", [s if s in DEFAULT else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES]
)
@pytest.mark.parametrize("name", PRESETS)
def test_cell_trains(name, strategy):
    assert train_cell(name, strategy) == ""


def updates_of(trainer: Trainer, backwards: dict[str, Backward]) -> list[dict[str, torch.Tensor]]:
    """Gradients of one rollout's updates by each way; ``autograd`` is plain autograd of the summed losses.

    Between updates the exact gradient is applied, so that the second one stands where parameters have moved.
    """
    algorithm: Algorithm = trainer.algorithm
    network = trainer.policy.model.network
    batch = algorithm.credit(trainer.score(trainer.sample()))
    groups = algorithm.groups(batch.trajectory, 0, 4, 0)
    results = []
    for part in batch.split(2):
        found = {}
        for name, backward in backwards.items():
            for micro in part.micro_batches(3):
                for window in algorithm.windows(micro, trainer.policy, groups):
                    backward(window)
            found[name] = gradients(network)
        for micro in part.micro_batches(3):
            for window in algorithm.windows(micro, trainer.policy, groups):
                sum(window.loss(j, window.velocities([j])[0]).value for j in range(window.size)).backward()
        found["autograd"] = gradients(network)
        results.append(found)
        start = 0
        for p in trainer.policy.parameters:
            p.data -= 0.05 * found["autograd"][start : start + p.numel()].view_as(p)
            start += p.numel()
        trainer.policy.version += 1
    return results


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("name", PRESETS)
def test_every_loss_family(name):
    """exact == autograd; jagg: joint == sequential == batched == served; ablate is not exact."""
    backwards = {
        "exact": Backward(Exact(), 4),
        "joint": Backward(Linear(), 4, "joint", served="off"),
        "sequential": Backward(Linear(), 4, "sequential", served="off"),
        "batched": Backward(Linear(), 4, "batched", served="off"),
        "served": Backward(Linear(), 4, "joint", served="fresh"),
        "ablate": Backward(Ends(), 4),
    }
    for found in updates_of(trainer_of(name), backwards):
        assert float(found["autograd"].abs().max()) > 0
        assert close(found["exact"], found["autograd"])
        for other in ("sequential", "batched", "served"):
            assert close(found[other], found["joint"]), other
        assert not close(found["ablate"], found["exact"])


@pytest.mark.parametrize("name", ["dance_grpo", "flow_grpo_kl", "diffusion_nft", "diffusion_art"])
def test_micro_batch_size_never_changes_the_gradient(name):
    results = []
    for size in (1, 4):
        trainer = trainer_of(name, "jagg", micro_batch=size)
        trainer.step()
        results.append(weights(trainer))
    assert torch.allclose(results[0], results[1], atol=1e-6)


def print_matrix() -> bool:
    """Run and print every cell; whether all of them trained."""
    problems = {}
    print("Algorithm x backward strategy, two rollouts of two updates each on toys:")
    print(f"{'':26}" + "".join(f"  {s}" for s in STRATEGIES))
    for name in PRESETS:
        print(f"{name:26}", end="")
        for strategy in STRATEGIES:
            try:
                problem = train_cell(name, strategy)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                problems[name, strategy] = problem
            print(f"  {'FAILED' if problem else 'ok':>{len(strategy)}}", end="", flush=True)
        print()
    for (name, strategy), problem in problems.items():
        print(f"FAILED: {name} with {strategy}: {problem}")
    print(
        f"{len(PRESETS) * len(STRATEGIES) - len(problems)} of {len(PRESETS) * len(STRATEGIES)} cells trained"
    )
    return not problems


if __name__ == "__main__":
    trained = print_matrix()
    refused = print_refusals()
    raise SystemExit(0 if trained and refused else 1)
