"""What a reward curve shows: rise, collapse, cost of a level. The criteria are stated before any run."""

from collections.abc import Sequence
from dataclasses import dataclass

SPAN = 4
"""Half-life of the smoothing in rollouts. (DiffusionART's project page: 8, on curves of 300 steps.)"""
SHARE = 0.5
"""Of the rise that must be lost, and of the initial standard deviation that must be gained or lost."""

CRITERIA = (
    "Curve: mean trained reward of each rollout, on stability less the untrained model's on the same prompts and "
    f"noise, smoothed with a half-life of {SPAN} rollouts. Start: its mean over the first 5 rollouts. "
    f"Rise: peak - start >= {SHARE} s, s the standard deviation of rewards in the first rollout. "
    f"Collapse: peak - end >= {SHARE} s and peak - end >= {SHARE} (peak - start). "
    "A level is reached where the smoothed curve first crosses it."
)


@dataclass(frozen=True)
class Shape:
    """A smoothed curve against the criteria."""

    start: float
    peak: float
    end: float
    spread: float
    """Standard deviation of rewards in the first rollout."""

    @property
    def rose(self) -> bool:
        """By half a standard deviation."""
        return self.peak - self.start >= SHARE * self.spread

    @property
    def collapsed(self) -> bool:
        """Lost at least half of the rise, and half a standard deviation."""
        lost = self.peak - self.end
        return lost >= SHARE * self.spread and lost >= SHARE * (self.peak - self.start)

    def __str__(self) -> str:
        """``rose and collapsed (start .. peak .. end)``."""
        rise = "rose" if self.rose else "did not rise"
        fall = "collapsed" if self.collapsed else "did not collapse"
        return (
            f"{rise} and {fall} ({self.start:.4f} .. {self.peak:.4f} .. {self.end:.4f}, s {self.spread:.4f})"
        )


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean with a half-life of ``SPAN``, corrected for its start."""
    keep, total, weight = 2 ** (-1 / SPAN), 0.0, 0.0
    smoothed = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed


def shape(rewards: Sequence[float], spread: float) -> Shape:
    """The shape of a curve of rollout means."""
    smoothed = smooth(rewards)
    first = rewards[:5]
    return Shape(sum(first) / len(first), max(smoothed), smoothed[-1], spread)


def late_average(rewards: Sequence[float]) -> float:
    """Mean of the last third: "late average reward"."""
    late = rewards[-max(1, len(rewards) // 3) :]
    return sum(late) / len(late)


def first_reach(rewards: Sequence[float], costs: Sequence[float], level: float) -> float | None:
    """Cost at which the smoothed curve first reaches a level; None if it never does."""
    for value, cost in zip(smooth(rewards), costs, strict=True):
        if value >= level:
            return cost
    return None


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text."""
    low, high = min(values), max(values)
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(7, int(8 * (v - low) / (high - low or 1)))] for v in picked)
