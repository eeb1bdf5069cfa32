"""Rewards to credit: advantages, NFT's r, ART's direction. Pure functions over the whole rollout.

Arrays are in global sample order: sample ``p * G + k`` is member k of prompt p: (N,) reshapes to (P, G).
Failed scores (non-finite) are left out of every statistic and get credit 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.errors import UserError

MIXES = ("reward", "advantage")


@dataclass(frozen=True)
class Advantage:
    """How rewards become advantages (Eq. 3): centred per group, divided by a standard deviation, clamped.

    ``std``: ``group`` (DanceGRPO, MixGRPO, JAGG), or ``global``: of all raw rewards of the rollout, not
    centred per group (Flow-GRPO, NFT). ``ddof``: 1 is torch's, 0 numpy's. ``mix``: ``reward`` sums weighted
    raw rewards, then normalises; ``advantage`` normalises each reward, then sums with the weights (no
    re-normalisation). ``centre``: ``group``, or ``global`` for DanceGRPO without groups.
    """

    std: str = "group"
    centre: str = "group"
    eps: float = 1e-8
    ddof: int = 1
    clip: float = 5.0
    mix: str = "reward"

    def __post_init__(self) -> None:
        choices = {"std": ("group", "global"), "centre": ("group", "global"), "mix": MIXES}
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise UserError(f"advantage.{key}={getattr(self, key)} is unknown; use {' or '.join(known)}")

    def __call__(self, parts_N: Mapping[str, Tensor], weights: Mapping[str, float], group: int) -> Tensor:
        """Advantages (N,), clamped to ``+-clip``; 0 where the score failed or the group is all equal."""
        total = sum(w * parts_N[n] for n, w in weights.items())
        assert isinstance(total, Tensor)
        valid = total.isfinite()
        if self.mix == "reward":
            advantage = self._normalise(total, valid, group)
        else:
            advantage = torch.zeros_like(total)
            for name, weight in weights.items():
                advantage = advantage + weight * self._normalise(parts_N[name], valid, group)
        return torch.where(valid, advantage.clamp(-self.clip, self.clip), torch.zeros_like(advantage))

    def _normalise(self, reward_N: Tensor, valid_N: Tensor, group: int) -> Tensor:
        r = reward_N.double().view(-1, group)
        valid = valid_N.view(-1, group)
        r = torch.where(valid, r, torch.zeros_like(r))
        everything = (r.view(1, -1), valid.view(1, -1))
        mean, _ = masked_moments(*((r, valid) if self.centre == "group" else everything), self.ddof)
        group_mean, group_std = masked_moments(r, valid, self.ddof)
        _, std = (None, group_std) if self.std == "group" else masked_moments(*everything, self.ddof)
        advantage = (r - mean) / (std + self.eps)
        if self.centre == "group":
            tie = _tie(torch.where(valid, r - group_mean, 0.0), group_mean)
            advantage = torch.where(tie | (valid.sum(1, keepdim=True) < 2), torch.zeros_like(r), advantage)
        return advantage.float().view(-1)


def masked_moments(r_PG: Tensor, valid_PG: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per row over valid entries, (P, 1) each; std 0 with too few of them."""
    count = valid_PG.sum(1, keepdim=True)
    mean = torch.where(valid_PG, r_PG, 0.0).sum(1, keepdim=True) / count.clamp_min(1)
    square = torch.where(valid_PG, (r_PG - mean) ** 2, 0.0).sum(1, keepdim=True)
    return mean, (square / (count - ddof).clamp_min(1)).sqrt()


def optimality(advantage_N: Tensor, clip: float) -> Tensor:
    """DiffusionNFT: ``r = clamp(clamp(A, -c, c) / (2c) + 1/2, 0, 1)``."""
    return (advantage_N.clamp(-clip, clip) / (2 * clip) + 0.5).clamp(0, 1)


def standardised_total(parts_N: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of rewards (N,), each divided by its standard deviation over the rollout first."""
    total = sum(w * parts_N[n] for n, w in weights.items())
    assert isinstance(total, Tensor)
    valid = total.isfinite()
    scaled = torch.zeros_like(total)
    for name, weight in weights.items():
        _, std = masked_moments(parts_N[name].double().view(1, -1), valid.view(1, -1), 0)
        scaled = scaled + weight * parts_N[name] / float(std.clamp_min(1e-12))
    return torch.where(valid, scaled, torch.full_like(scaled, float("nan")))


def preference(reward_N: Tensor, group: int, pairwise: bool) -> Tensor:
    """DiffusionART: each sample's share of ``Cov(R, x0 | c)`` (N,), of sum 0 in a group; 0 if all equal.

    Scalar: ``(R_i - mean R) / K`` over the valid samples. Pairwise: +1 for the better of neighbours (0, 1),
    (2, 3), ..., -1 for the worse; pairs that tie or failed give 0.
    """
    if pairwise:
        gap = (reward_N.view(-1, 2)[:, 0] - reward_N.view(-1, 2)[:, 1]).nan_to_num(0.0, 0.0, 0.0).sign()
        return torch.stack([gap, -gap], 1).flatten().float()
    r = reward_N.double().view(-1, group)
    valid = r.isfinite()
    mean, _ = masked_moments(torch.where(valid, r, 0.0), valid, 0)
    share = torch.where(valid, r - mean, 0.0)
    share = torch.where(_tie(share, mean), 0.0, share)
    return (share / valid.sum(1, keepdim=True).clamp_min(1)).float().flatten()


def _tie(deviation_PG: Tensor, mean_P: Tensor) -> Tensor:
    """Groups whose rewards are all equal up to the rounding of their mean (P, 1)."""
    return deviation_PG.abs().amax(1, keepdim=True) <= 1e-12 * mean_P.abs().clamp_min(1e-12)


def sample_weights(valid_N: Tensor, part_N: Tensor) -> Tensor:
    """Each sample's share of its update's objective (N,): 1 / (valid samples of its part), 0 if failed."""
    weight = torch.zeros(len(valid_N))
    for part in part_N.unique():
        rows = valid_N & (part_N == part)
        weight[rows] = 1.0 / max(1, int(rows.sum()))
    return weight


def best_of(advantage_N: Tensor, valid_N: Tensor, group: int, keep: int) -> Tensor:
    """Best-of-n: True for the ``keep/2`` highest and ``keep/2`` lowest advantages of each group (N,)."""
    ranked = torch.where(valid_N, advantage_N, torch.full_like(advantage_N, float("inf"))).view(-1, group)
    order = ranked.argsort(dim=1, stable=True)
    valid_P = valid_N.view(-1, group).sum(1)
    chosen = torch.zeros_like(ranked, dtype=torch.bool)
    for p in range(len(ranked)):
        n = int(valid_P[p])
        low = order[p, : min(keep // 2, n)]
        high = order[p, max(n - (keep - keep // 2), 0) : n]
        chosen[p, low] = True
        chosen[p, high] = True
    return chosen.view(-1) & valid_N
