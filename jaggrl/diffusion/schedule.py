"""Denoising schedules: ``t`` is what the network is fed, ``sigma`` what the kernel uses. Never swap them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """S steps: network times (S,) and noise levels (S + 1,), both fp32 and falling."""

    t_S: Tensor
    sigma_S: Tensor

    @property
    def steps(self) -> int:
        """S."""
        return len(self.t_S)


ModelSigmas = Callable[[int], Tensor]
"""N -> the N + 1 noise levels of the model's own scheduler."""


@dataclass(frozen=True)
class DanceSchedule:
    """DanceGRPO: ``sigma = shift tau / (1 + (shift-1) tau)`` of an even tau, fed as ``int(1000 sigma)``.

    The truncation is of a float32 value (0.8 * 1000 becomes 799), the SDE uses the un-truncated sigma. The
    model's own scheduler is not used. shift: 3 images, 5 Hunyuan, 7 SkyReels.
    """

    steps: int = 21
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if not self.shift > 0:
            raise UserError(f"schedule.shift={self.shift} must be > 0; the papers use 3 for images")

    def __call__(self, model_sigmas: ModelSigmas) -> Schedule:
        """The schedule; ``model_sigmas`` is not asked."""
        return self._at(torch.linspace(1, 0, self.steps + 1))

    def compressed(self, end: int, points: int) -> Schedule:
        """The first ``end`` steps as they are, then ``points - 1`` steps to 0, even in tau (Flash)."""
        tau = torch.linspace(1, 0, self.steps + 1)
        return self._at(torch.cat([tau[:end], torch.linspace(float(tau[end]), 0, points)]))

    def _at(self, tau: Tensor) -> Schedule:
        sigma = self.shift * tau / (1 + (self.shift - 1) * tau)
        t = (sigma[:-1] * 1000).to(torch.int32).float() / 1000
        return Schedule(t, sigma)


@dataclass(frozen=True)
class ModelSchedule:
    """Flow-GRPO, DiffusionNFT: the model's own scheduler; the network is fed ``sigma`` un-truncated."""

    steps: int = 10

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, model_sigmas: ModelSigmas) -> Schedule:
        """The schedule from the model's sigmas."""
        sigma = model_sigmas(self.steps).float()
        return Schedule(sigma[:-1].clone(), sigma)


def _check_steps(steps: int) -> None:
    if steps < 2:
        raise UserError(f"schedule.steps={steps} is too short; use at least 2")
