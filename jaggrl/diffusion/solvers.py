"""Deterministic steps: Euler, and the order-2 multistep DPM-Solver++ that DiffusionNFT samples with.

A solver is called step by step and may remember its last prediction; ``reset`` forgets it.
"""

import math
from abc import ABC, abstractmethod

from torch import Tensor


class Solver(ABC):
    """One trajectory's deterministic integrator; ``sigma`` is a float, the same for the whole batch."""

    def reset(self) -> None:  # noqa: B027  (a one-step solver has nothing to forget)
        """Forget the previous step (a new trajectory, or a stochastic step in between)."""

    @abstractmethod
    def step(self, v: Tensor, z: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """``z`` at ``sigma_next``."""


class Euler(Solver):
    """``z' = z + v (sigma' - sigma)``."""

    def step(self, v: Tensor, z: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """One first-order step."""
        return z + v * (sigma_next - sigma)


class DPMSolver2M(Solver):
    """DPM-Solver++(2M) for rectified flow: ``alpha = 1 - sigma``, ``lambda = ln alpha - ln sigma``.

    ``z' = (sigma'/sigma) z + alpha' (1 - e^{-h}) D`` with ``e^{-h} = sigma' alpha / (sigma alpha')`` and
    ``D = x0_i + (x0_i - x0_{i-1}) / (2 r)``, ``r = h_{i-1} / h_i``. The first step (lambda = -inf) and the
    last (lambda' = inf) are first-order by their limits.
    """

    def __init__(self) -> None:
        self._x0: Tensor | None = None
        self._lambda: float = float("-inf")

    def reset(self) -> None:
        """Forget the previous prediction."""
        self._x0 = None

    def step(self, v: Tensor, z: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """One second-order multistep step where the history allows it."""
        x0 = z - sigma * v
        direction = x0
        if self._x0 is not None and sigma_next > 0 and self._lambda > float("-inf"):
            ratio = (_lambda(sigma_next) - _lambda(sigma)) / (_lambda(sigma) - self._lambda)
            direction = x0 + (x0 - self._x0) * (0.5 * ratio)
        decay = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next)) if sigma_next < 1 else 1.0
        self._x0, self._lambda = x0, _lambda(sigma)
        return (sigma_next / sigma) * z + (1 - sigma_next) * (1 - decay) * direction


def _lambda(sigma: float) -> float:
    """Half log signal-to-noise ratio."""
    if sigma >= 1:
        return float("-inf")
    return math.log(1 - sigma) - math.log(sigma)
