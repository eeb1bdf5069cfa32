"""Records that travel from the rollout to the update.

Shape legend (used as name suffixes everywhere):
    S  denoising steps of a trajectory       W  steps of a window
    N  samples of the rollout, all ranks     B  samples on this rank, or of a micro-batch
    G  samples of one prompt (its group)     P  prompts of a rollout
    D  elements of one latent                A  anchors of a backward strategy
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jaggrl.prompts import Prompt


@dataclass(frozen=True)
class Sample:
    """One picture to make: which prompt, which member of its group, which part of the update."""

    index: int
    """Global index ``prompt_index * G + member`` within the rollout."""
    prompt_index: int
    member: int
    part: int
    """The optimizer update of this rollout that trains on the sample."""


@dataclass(frozen=True)
class Condition:
    """What the network is conditioned on: named tensors, each with leading dimension B."""

    tensors: Mapping[str, Tensor]

    def rows(self, index: Tensor | slice) -> "Condition":
        """Select samples."""
        return Condition({k: v[index] for k, v in self.tensors.items()})

    def repeat(self, times: int) -> "Condition":
        """Stack ``times`` copies along the batch, for several steps in one forward."""
        return Condition({k: v.repeat(times, *[1] * (v.dim() - 1)) for k, v in self.tensors.items()})

    @staticmethod
    def cat(parts: Sequence["Condition"]) -> "Condition":
        """Concatenate along the batch."""
        return Condition({k: torch.cat([p.tensors[k] for p in parts]) for k in parts[0].tensors})


@dataclass(frozen=True)
class Trajectory:
    """Everything that one rank's rollout wrote down. Latents and log-probabilities are fp32."""

    samples: Sequence[Sample]
    prompts: Sequence[Prompt]
    """One per sample (B)."""
    condition: Condition
    t_S: Tensor
    """Network time per step, as fed to the network."""
    sigma_S: Tensor
    """S + 1 noise levels, falling to 0."""
    noisy_S: tuple[bool, ...]
    """Which steps were stochastic."""
    x0_B: Tensor
    """What was decoded and judged, in model latent space."""
    media_B: Tensor
    """Decoded pictures (B, 3, H, W) in [0, 1]."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """By name, what ``algorithm.record`` asked for: ``states`` (S+1, B, ...), ``velocities`` raw outputs (S, B, ...),
    ``log_prob`` (S, B), ``mean`` (S, B, ...)."""
    version: int = 0
    """The policy version that made it: the count of optimizer steps before the rollout."""
    predicted: frozenset[int] = frozenset()
    """Steps whose velocities a feature cache predicted: the cached policy's, not the network's."""

    def fresh(self, version: int, steps: Iterable[int]) -> bool:
        """Whether the recorded velocities of ``steps`` are those of the network at ``version``."""
        return version == self.version and self.predicted.isdisjoint(steps)

    def mended(self) -> tuple["Trajectory", Tensor]:
        """The trajectory with finite numbers only, and which samples (B,) had others.

        A broken sample takes numbers and condition of the first whole one (zeros without any): it will weigh
        nothing, but 0 x NaN would still make the gradient of its whole update NaN. Its media stay as they are.
        """
        values = [self.x0_B, *(x.transpose(0, 1) for x in self.recorded.values())]
        whole_B = torch.stack([x.isfinite().flatten(1).all(1) for x in values]).all(0)
        if whole_B.all():
            return self, ~whole_B
        row_B = torch.arange(len(whole_B), device=whole_B.device)
        row_B[~whole_B] = int(whole_B.float().argmax())

        def taken(x: Tensor, dim: int) -> Tensor:
            x = x.index_select(dim, row_B.to(x.device))
            return x if whole_B.any() else torch.zeros_like(x)

        recorded = {name: taken(x, 1) for name, x in self.recorded.items()}
        mended = replace(
            self, x0_B=taken(self.x0_B, 0), recorded=recorded, condition=self.condition.rows(row_B.cpu())
        )
        return mended, ~whole_B


@dataclass(frozen=True)
class Scored:
    """A trajectory and what every reward said of this rank's samples and of the whole rollout."""

    trajectory: Trajectory
    parts_N: Mapping[str, Tensor]
    """Raw values by reward name over ALL N samples of the rollout (all ranks), non-finite where scoring failed."""
    weights: Mapping[str, float]
    group_size: int

    @property
    def total_N(self) -> Tensor:
        """Weighted sum of raw rewards (N,); non-finite where any part failed."""
        return torch.stack([w * self.parts_N[name] for name, w in self.weights.items()]).sum(0)


@dataclass(frozen=True)
class Batch:
    """A credited rollout: what ``algorithm.windows`` cuts up. All tensors belong to this rank's samples."""

    trajectory: Trajectory
    credit: Mapping[str, Tensor]
    """By name, each with leading B: ``advantage``, ``r`` or ``direction``."""
    valid_B: Tensor
    """False for samples whose score failed: they stay in the computation with weight 0."""
    weight_B: Tensor
    """Each sample's share of its optimizer step's objective: world / (valid samples of its part, all ranks), or 0."""
    stats: Mapping[str, float] = field(default_factory=dict)

    def rows(self, index: Tensor) -> "Batch":
        """Select samples of this rank."""
        tr = self.trajectory
        keep = index.tolist()
        part = replace(
            tr,
            samples=[tr.samples[i] for i in keep],
            prompts=[tr.prompts[i] for i in keep],
            condition=tr.condition.rows(index),
            x0_B=tr.x0_B[index],
            media_B=tr.media_B[:0],
            recorded={k: v[:, index] for k, v in tr.recorded.items()},
        )
        credit = {k: v[index] for k, v in self.credit.items()}
        return replace(
            self, trajectory=part, credit=credit, valid_B=self.valid_B[index], weight_B=self.weight_B[index]
        )

    def split(self, updates: int) -> Iterator["Batch"]:
        """The parts of the rollout, one per optimizer update: disjoint and exhaustive; copied in turn."""
        part_B = torch.tensor([s.part for s in self.trajectory.samples])
        for u in range(updates):
            yield self.rows((part_B == u).nonzero().flatten())

    def micro_batches(self, size: int) -> Iterator["Batch"]:
        """Consecutive micro-batches of at most ``size`` samples."""
        n = len(self.trajectory.samples)
        for i in range(0, n, size):
            yield self.rows(torch.arange(i, min(i + size, n)))


def layout(prompts: int, group: int, updates: int, world: int, rank: int) -> list[Sample]:
    """This rank's samples of a rollout of ``prompts x group``, sorted by update.

    Every group is split within itself over the updates, and each update's samples are dealt round over the ranks, so
    that every update trains on the same samples however many ranks there are. Each update's ``prompts * share``
    samples must divide by ``world`` (checked when the config is read).
    """
    mine = []
    for part in range(updates):
        everyone = [
            Sample(p * group + k, p, k, part)
            for p in range(prompts)
            for k in range(group)
            if (k * updates // group + p) % updates == part  # + p: uneven shares take turns
        ]
        mine += everyone[rank::world]
    return mine
