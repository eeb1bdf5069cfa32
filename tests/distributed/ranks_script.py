"""Run under torchrun (or imported by one process): train small policies and save every update's gradients.

usage: ranks_script.py OUT CELL...        with CELL = model:algorithm:strategy

Between the two rollouts of a cell the ranks stop: what the checkpoint holds goes on in a new policy.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jaggrl.infra.checkpoint import Checkpoints
from jaggrl.infra.distributed import Ranks, shard, start, stop
from jaggrl.models.export import load_training_state, training_state
from jaggrl.models.policy import Policy, make_trainable
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import WeightedReward
from jaggrl.trainer import Trainer
from tests.distributed.setups import Cell, algorithm_and_sampler, backward_settings, small_model
from tests.toys import Brightness, toy_trainer


class Levels(Brightness):
    """Brightness on a grid: much coarser than rounding, so that sums in another order score alike, and much finer
    than the spread of a group's rewards, by which an advantage divides."""

    def __call__(self, media_B: torch.Tensor, prompts: Sequence[Prompt]) -> torch.Tensor:
        """(B,)."""
        return (super().__call__(media_B, prompts) * 1e4).round() / 1e4


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, whatever its sharding."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def trainer_of(
    cell: Cell, ranks: Ranks, scale: float = 1.0, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> Trainer:
    """A new policy, sharded over the ranks, and its trainer (SGD: AdamW would hide a wrong scale of gradients).

    ``scale``: of the initial trainable weights, for a policy that must be seen to load others.
    """
    model = small_model(cell.model)
    torch.manual_seed(0)
    make_trainable(model, cell.lora, checkpointing=False)
    for p in model.network.parameters():
        p.data *= scale if p.requires_grad else 1.0
    if ranks.world > 1:
        shard(model.network, model.blocks(), ranks, "fp32")
    policy = Policy(model, cell.lora, "fp32", ranks.device)
    algorithm, sampler = algorithm_and_sampler(cell.algorithm)
    interpolant, settings = backward_settings(cell.strategy)
    # rates that lift the changes above the rounding of the weights
    return toy_trainer(
        algorithm, sampler, interpolant, settings, policy=policy, ranks=ranks, micro_batch=3, updates_per_rollout=2,
        lr=0.3 if cell.model.startswith("flux") else 0.1, ema_decay=0.5, optimizer=optimizer,
        reward=WeightedReward({"levels": Levels()}, {"levels": 1.0}),
        prompt_texts=["a red circle on a white background", "two blue squares on a gray background", "a"],
    )  # fmt: skip


def state_of(trainer: Trainer) -> dict[str, Any]:
    """What a run's checkpoint holds."""
    return {**training_state(trainer.policy, trainer.optimizer), "trainer": trainer.state_dict()}


def resumed(trainer: Trainer, cell: Cell, ranks: Ranks, folder: Path) -> Trainer:
    """Another trainer, begun anew, that goes on where the checkpoint of ``trainer`` was taken."""
    checkpoints = Checkpoints(folder)
    path = checkpoints.save(trainer.steps_done, state_of(trainer))
    other = trainer_of(cell, ranks, scale=0.5)
    state = state_of(other)
    checkpoints.load(path, state)
    load_training_state(other.policy, other.optimizer, state)
    other.load_state_dict(state["trainer"])
    return other


def results(cell: Cell, ranks: Ranks, folder: Path | None) -> dict[str, Any]:
    """Two rollouts of two updates: gradients and norms of every update, weight changes, metrics.

    With ``folder`` the run is checkpointed between the rollouts and goes on in a new trainer.
    """
    trainer = trainer_of(cell, ranks)
    begin = [full(p) for p in trainer.policy.parameters]
    gradients: list[list[torch.Tensor]] = []
    norms: list[float] = []

    def step() -> dict[str, float]:
        """One rollout, watched."""
        optimize = type(trainer).optimize

        def spy(judged: bool) -> float:
            gradients.append([full(p.grad) for p in trainer.policy.parameters if p.grad is not None])
            norms.append(optimize(trainer, judged))
            return norms[-1]

        trainer.optimize = spy  # type: ignore[method-assign]
        return trainer.step()

    metrics = [step()]
    if folder is not None:
        trainer = resumed(trainer, cell, ranks, folder)
    metrics.append(step())
    changes = [full(p) - b for p, b in zip(trainer.policy.parameters, begin, strict=True)]
    return {"gradients": gradients, "norms": norms, "changes": changes, "metrics": metrics}


def main(out: Path, *names: str) -> None:
    """All cells in a row."""
    ranks = start("cpu")
    cells = [Cell(*name.split(":")) for name in names]
    done = {
        cell: results(cell, ranks, out.parent / f"checkpoints_{number}") for number, cell in enumerate(cells)
    }
    if ranks.main:
        torch.save(dict(zip(names, done.values(), strict=True)), out)
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
