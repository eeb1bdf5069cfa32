"""Measuring gradients: what one call adds, and how two gradients compare, over all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from jaggrl.infra.distributed import total

SKETCH = 2**20
T = TypeVar("T")
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Likeness:
    """Inner products of an estimate g with the exact gradient e."""

    ge: float
    gg: float
    ee: float

    @property
    def cosine(self) -> float:
        """``<g, e> / (|g| |e|)``; nan when either vanishes."""
        return self.ge / math.sqrt(self.gg * self.ee) if self.gg > 0 and self.ee > 0 else math.nan

    @property
    def ratio(self) -> float:
        """``rho = |g| / |e|``; nan when the exact gradient vanishes."""
        return math.sqrt(self.gg / self.ee) if self.ee > 0 else math.nan


def alone(parameters: Sequence[Tensor], call: Callable[[], T]) -> tuple[T, Gradients]:
    """What ``call`` alone adds to the parameters' ``.grad``; what stood there before is put back."""
    if not parameters:
        raise RuntimeError(
            "no parameters to compare gradients of: Backward.attach(network, stopwatch) comes first"
        )
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    result = call()
    gradients = [p.grad for p in parameters]
    for p, g in zip(parameters, before, strict=True):
        p.grad = g
    return result, gradients


def deposit(parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Add gradients to the parameters' ``.grad``."""
    for p, g in zip(parameters, gradients, strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g


def shards(gradients: Gradients) -> list[Tensor | None]:
    """This rank's part of every gradient."""
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def likeness(estimate: Gradients, exact: Gradients) -> Likeness:
    """Inner products over all parameters and all ranks, so that every rank gets the same numbers.

    Sharded gradients are summed over their shards; replicas count alike in all three products.
    """
    device = next((g.device for g in shards(exact) if g is not None), torch.device("cpu"))
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for g, e in zip(shards(estimate), shards(exact), strict=True):
        g = None if g is None else g.detach().float().flatten()
        e = None if e is None else e.detach().float().flatten()
        if g is not None and e is not None:
            sums[0] += g @ e
        if g is not None:
            sums[1] += g @ g
        if e is not None:
            sums[2] += e @ e
    ge, gg, ee = total(sums).tolist()
    return Likeness(ge, gg, ee)


class Sketch:
    """Count sketch: a linear map of all gradients to ``SKETCH`` numbers that keeps inner products to about
    1e-3.

    Sharded gradients are sketched shard by shard; inner products are summed over ranks. Small networks are
    kept whole.
    """

    def __init__(self, parameters: Sequence[Tensor], size: int = SKETCH) -> None:
        count = sum(g.numel() for g in shards(list(parameters)) if g is not None)
        self.whole = count <= size
        self.size = count if self.whole else size

    def __call__(self, gradients: Gradients) -> Tensor:
        """All gradients -> (size,) on the CPU; missing ones must be missing every time."""
        flat = [g.detach().float().flatten() for g in shards(gradients) if g is not None]
        if self.whole:
            return torch.cat(flat).cpu()
        out = torch.zeros(self.size)
        for k, g in enumerate(flat):
            draw = torch.Generator().manual_seed(k)
            for piece in g.cpu().split(2**22):
                place = torch.randint(self.size, (len(piece),), generator=draw)
                sign = torch.randint(2, (len(piece),), generator=draw) * 2 - 1
                out.index_add_(0, place, piece * sign)
        return out
