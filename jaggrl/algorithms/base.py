"""What an algorithm is: record, credit, windows, and what happens after a rollout's updates."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jaggrl.credit import sample_weights
from jaggrl.diffusion.grouping import Group, cut
from jaggrl.errors import UserError
from jaggrl.infra.distributed import gather, largest
from jaggrl.models.policy import Policy
from jaggrl.trajectory import Batch, Condition, Scored, Trajectory
from jaggrl.window import Window

log = logging.getLogger(__name__)


class Algorithm(ABC):
    """Turns scored trajectories into windows. One instance per run, without state that outlives a rollout.

    What must outlive it lives in the policy: shadows (saved with every checkpoint) and the count of
    optimizer steps.
    """

    record: frozenset[str] = frozenset()
    """What the rollout writes down (``rollout.RECORDS``)."""
    behaviour: str = "current"
    """The policy that samples: ``current`` or a shadow."""
    needs: tuple[str, ...] = ()
    """Policies other than the current one that windows ask for."""
    regresses: bool = False
    """Its targets are the rollout's velocities, so that they must be the network's."""
    min_group: int = 2
    clip_range: float = math.inf
    """Of the ratio; infinite without one."""

    @property
    def references(self) -> int:
        """How many forwards of other policies every trained step takes."""
        return len({self.behaviour, *self.needs} - {"current"})

    def trained_share(self, group: int) -> float:
        """Share of a group's samples that the updates train on."""
        return 1.0

    @abstractmethod
    def credit(self, scored: Scored) -> Batch:
        """Rewards -> advantage, r or direction, for this rank's samples."""

    @abstractmethod
    def trained_steps(self, trajectory: Trajectory) -> list[int]:
        """Steps that an update trains on, in falling t."""

    @abstractmethod
    def windows(self, micro: Batch, policy: Policy, groups: Sequence[Group]) -> Iterator[Window]:
        """The windows of one micro-batch, in the order of ``groups``."""

    def groups(
        self, trajectory: Trajectory, rollout: int, window: int | Sequence[int], seed: int
    ) -> list[Group]:
        """The rollout's trained steps cut into windows, the same on all ranks; once before its updates."""
        return cut(self.trained_steps(trajectory), window)

    def after_rollout(self, policy: Policy, updates: int) -> dict[str, float]:
        """When a rollout's updates are done; ``updates`` counts optimizer steps. Returns log values."""
        return {}

    def check(self, interpolates: bool, init_noise: str, explores: bool, updates: int, group: int) -> None:
        """Refuse combinations that make no sense, before weights are loaded.

        Args:
            interpolates: the backward strategy interpolates Jacobians (it is not exact).
            init_noise: the sampler's rule.
            explores: some steps of the rollout are stochastic.
            updates: optimizer steps per rollout.
            group: samples per prompt.
        """
        if group < self.min_group:
            raise UserError(
                f"group_size={group} gives no {type(self).__name__} credit (samples of a prompt compete); "
                f"use at least {self.min_group}"
            )

    def _check_ode(self, init_noise: str, explores: bool) -> None:
        """What ODE algorithms refuse."""
        name = type(self).__name__
        if explores:
            raise UserError(
                f"{name} trains on deterministic rollouts; set algorithm.rollout.exploration to "
                "{_target_: jaggrl.diffusion.exploration.Nowhere}"
            )
        if init_noise != "independent":
            raise UserError(
                f"rollout.init_noise={init_noise} makes all samples of a prompt equal without step noise "
                f"and {name} has nothing to compare; use algorithm.rollout.init_noise=independent"
            )


def batch_of(
    scored: Scored,
    credit_N: dict[str, Tensor],
    credit_B: dict[str, Tensor] | None = None,
    kept_N: Tensor | None = None,
    stats: dict[str, float] | None = None,
) -> Batch:
    """This rank's Batch from credit over all samples (``credit_N``) or already local (``credit_B``).

    Denominators are global: a sample's weight is ``world / (counted samples of its part over all ranks)``,
    since sharded gradients are averaged over ranks. Failed samples (and those not in ``kept_N``) weigh
    nothing.
    """
    trajectory = scored.trajectory
    device = trajectory.x0_B.device
    index_B = torch.tensor([s.index for s in trajectory.samples])
    valid_N = scored.total_N.isfinite()
    counted_N = valid_N if kept_N is None else valid_N & kept_N
    part_B = torch.tensor([s.part for s in trajectory.samples], device=device)
    rank_order, parts = gather(index_B.to(device)).cpu(), gather(part_B).cpu()
    part_N = torch.empty_like(parts)
    part_N[rank_order] = parts
    world = len(part_N) // len(index_B)
    weight_N = sample_weights(counted_N, part_N) * world
    credit = {name: value[index_B].to(device) for name, value in credit_N.items()}
    return Batch(
        trajectory,
        {**credit, **(credit_B or {})},
        counted_N[index_B].to(device),
        weight_N[index_B].to(device),
        stats or {},
    )


def advantage_stats(advantage_N: Tensor) -> dict[str, float]:
    """Extremes, mean size and share of zeros (flat groups, failures) of a rollout's advantages, for the log."""
    return {
        "adv/min": float(advantage_N.min()),
        "adv/max": float(advantage_N.max()),
        "adv/abs_mean": float(advantage_N.abs().mean()),
        "adv/zero_share": float((advantage_N == 0).float().mean()),
    }


def without_idle_rows(batch: Batch) -> Batch:
    """Drop samples that weigh nothing, as far as every rank can drop as many from each update.

    Every rank must walk the same windows, so that each update keeps as many rows as its fullest rank needs
    (at least one); ranks that need fewer keep idle rows, which weigh 0.
    """
    part_B = torch.tensor([s.part for s in batch.trajectory.samples])
    idle_B = (batch.weight_B == 0).cpu()
    parts = int(part_B.max()) + 1
    busy = torch.tensor([int(((part_B == u) & ~idle_B).sum()) for u in range(parts)])
    room = largest(busy.to(batch.weight_B.device)).clamp_min(1).tolist()
    kept: list[int] = []
    for u in range(parts):
        rows = (part_B == u).nonzero().flatten()
        first_busy = rows[idle_B[rows].long().argsort(stable=True)]
        kept += sorted(first_busy[: room[u]].tolist())
    return batch.rows(torch.tensor(kept))


def take_steps(x_SB: Tensor, step_B: Tensor) -> Tensor:
    """Each sample's own step: (S, B, ...), (B,) -> (B, ...)."""
    return x_SB[step_B, torch.arange(len(step_B), device=step_B.device)]


def velocities_of(
    policy: Policy, name: str, zs: Sequence[Tensor], ts: Sequence[Tensor], condition: Condition
) -> list[Tensor]:
    """Raw outputs of the policy ``name`` at given latents and times, without grad, one forward each."""
    with policy.using(name), torch.no_grad():
        return [policy.velocity(z, t, condition) for z, t in zip(zs, ts, strict=True)]
