"""Every algorithm with every backward strategy, on toys: each cell trains, and exact is plain autograd.

Run it as a script (``python -m tests.test_matrix``) to print the matrix.
"""

import pytest
import torch

from jaggrl.algorithms.base import Algorithm
from jaggrl.backward.interpolants import Debiased, Ends, Exact, Interpolant, Lagrange, Linear, Subset
from jaggrl.backward.strategy import Backward
from jaggrl.trainer import Trainer
from tests.algorithms.presets import PRESETS
from tests.toys import gradients, toy_trainer

STRATEGIES: dict[str, tuple[Interpolant, dict]] = {
    "exact": (Exact(), {}),
    "jagg": (Linear(), {"graph": "joint"}),
    "jagg_sequential": (Linear(), {"graph": "sequential"}),
    "jagg_batched": (Linear(), {"graph": "batched"}),
    "ablate": (Ends(), {}),
    "quadratic": (Lagrange(3), {}),
    "subset": (Subset(2), {}),
    "debiased": (Debiased(1.0), {}),
}


def trainer_of(name: str, strategy: str = "exact", **loop) -> Trainer:
    algorithm, sampler = PRESETS[name]()
    interpolant, options = STRATEGIES[strategy]
    return toy_trainer(
        algorithm, sampler, interpolant, {"window": 4, **options}, updates_per_rollout=2, lr=0.05, **loop
    )


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


DEFAULT = ("exact", "jagg", "jagg_sequential", "ablate")


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


if __name__ == "__main__":
    print(f"{'':28}" + "".join(f"{s:>17}" for s in STRATEGIES))
    for row in PRESETS:
        print(f"{row:28}" + "".join(f"{train_cell(row, s) or 'ok':>17}" for s in STRATEGIES), flush=True)
