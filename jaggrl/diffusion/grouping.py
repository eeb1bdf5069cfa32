"""Which steps are trained, and how they are cut into windows."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaggrl.errors import UserError


@dataclass(frozen=True)
class Group:
    """Consecutive trained steps that one backward strategy call handles together."""

    steps: tuple[int, ...]
    position: float
    """Index of the group over the number of full groups: 0 is the noisiest; 1.0 marks the remainder."""


def cut(steps: Sequence[int], window: int | Sequence[int]) -> list[Group]:
    """Cut trained steps (in falling t) into windows of W (0: all of them), or of the listed sizes repeated.

    The trailing remainder (the cleanest steps) is a shorter group at position 1.0, which is always pulled
    back exactly.
    """
    sizes = [window or max(1, len(steps))] if isinstance(window, int) else list(window)
    if not sizes or min(sizes) < 1:
        raise UserError(f"backward.window={window} must be at least 1, or 0 for the whole trajectory")
    full: list[tuple[int, ...]] = []
    start = 0
    while start + sizes[len(full) % len(sizes)] <= len(steps):
        end = start + sizes[len(full) % len(sizes)]
        full.append(tuple(steps[start:end]))
        start = end
    groups = [Group(g, i / len(full)) for i, g in enumerate(full)]
    if start < len(steps):
        groups.append(Group(tuple(steps[start:]), 1.0))
    return groups


def eligible(trained: int, timestep_fraction: float) -> int:
    """``int(trained * timestep_fraction)``: how many transitions an update trains on (0.6 of 5 is 3)."""
    if not 0 < timestep_fraction <= 1:
        raise UserError(
            f"algorithm.timestep_fraction={timestep_fraction} is outside (0, 1]; the papers use 0.6 or 1.0"
        )
    count = int(trained * timestep_fraction + 1e-9)
    if count < 1:
        raise UserError(
            f"algorithm.timestep_fraction={timestep_fraction} of {trained} transitions trains none; raise it"
        )
    return count
