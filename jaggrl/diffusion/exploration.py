"""Which steps of a rollout are stochastic: a pure function of the rollout's index, the same on all ranks."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from jaggrl.diffusion.noise import generator
from jaggrl.errors import UserError


class Exploration(ABC):
    """Chooses the stochastic steps ``[start, end)`` of a rollout of S steps."""

    @abstractmethod
    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """Stochastic steps of this rollout."""


@dataclass(frozen=True)
class Everywhere(Exploration):
    """All steps (DanceGRPO, Flow-GRPO)."""

    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """``[0, S)``."""
        return range(steps)


@dataclass(frozen=True)
class Nowhere(Exploration):
    """ODE rollout (NFT, ART, evaluation)."""

    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """Empty."""
        return range(0)


@dataclass(frozen=True)
class FixedWindow(Exploration):
    """``[start, end)``; JAGG's ``sde_window 4-12`` is start 4, end 12."""

    start: int = 0
    end: int = 4

    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """The window, which must lie inside the trajectory."""
        if not 0 <= self.start < self.end <= steps:
            raise UserError(
                f"exploration {self.start}-{self.end} does not lie in 0-{steps}; change it or schedule.steps"
            )
        return range(self.start, self.end)


@dataclass(frozen=True)
class RandomWindow(Exploration):
    """Flow-GRPO-Fast: start uniform in ``[low, high - size]``, both ends included.

    One draw per rollout for all ranks.
    """

    size: int = 3
    low: int = 0
    high: int = 5

    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """A window drawn from (seed, rollout)."""
        if not 0 <= self.low <= self.high - self.size or self.size < 1 or self.high > steps:
            raise UserError(
                f"exploration of size {self.size} in {self.low}-{self.high} does not fit {steps} steps; widen"
            )
        choices = self.high - self.size - self.low + 1
        start = self.low + int(torch.randint(choices, (), generator=generator(seed, rollout, "exploration")))
        return range(start, start + self.size)


@dataclass(frozen=True)
class SlidingWindow(Exploration):
    """MixGRPO: a window ``range(cur, min(cur + size, S - 2))`` that moves with training.

    ``progressive``: after ``iters`` rollouts move by ``stride``, stay at the end (or restart with
    ``roll_back``); ``random``: uniform start each ``iters`` rollouts; ``decay`` and ``exp_decay``: the stay
    shrinks along the trajectory (``ceil(iters exp(-0.1 max(0, cur - 13)))`` for exp_decay, ``max(1, iters -
    cur)`` for decay).
    """

    size: int = 4
    iters: int = 25
    stride: int = 1
    strategy: str = "progressive"
    roll_back: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in ("progressive", "random", "decay", "exp_decay"):
            raise UserError(
                f"exploration.strategy={self.strategy} is unknown; use progressive, random, decay, exp_decay"
            )
        if self.size < 1 or self.iters < 1 or self.stride < 0:
            raise UserError("exploration needs size >= 1, iters >= 1 and stride >= 0")

    def __call__(self, rollout: int, steps: int, seed: int) -> range:
        """The window at this rollout, found by replaying the moves."""
        last = steps - 2
        if last < 1:
            raise UserError(f"schedule.steps={steps} leaves no room for a sliding window; use at least 3")
        if self.strategy == "random":
            draw = generator(seed, rollout // self.iters, "exploration")
            start = int(torch.randint(max(1, last - self.size + 1), (), generator=draw))
            return range(start, min(start + self.size, last))
        current, left = 0, self._stay(0)
        for _ in range(rollout):
            left -= 1
            if left == 0:
                current = self._move(current, last)
                left = self._stay(current)
        return range(current, min(current + self.size, last))

    def _move(self, current: int, last: int) -> int:
        moved = current + self.stride
        if moved < last:
            return moved
        return 0 if self.roll_back else current

    def _stay(self, current: int) -> int:
        if self.strategy == "decay":
            return max(1, self.iters - current)
        if self.strategy == "exp_decay":
            return math.ceil(self.iters * math.exp(-0.1 * max(0, current - 13)))
        return self.iters
