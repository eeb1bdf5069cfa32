"""Transition kernels: pure functions ``(v, z, sigma, sigma_next) -> Transition``.

Conventions (rectified flow): ``z = (1 - sigma) x0 + sigma eps``, ``v ~ eps - x0``, sigma falls from 1 to 0,
``delta = sigma_next - sigma < 0``. All maths in fp32. ``sigma`` and ``sigma_next`` have shape (B,), so
samples of one batch may stand at different steps.

General reverse SDE with diffusion coefficient g, Euler-Maruyama: mean = z + [v + g^2 / (2 sigma) (z + (1 -
    sigma) v)] delta,   std = g sqrt|delta| JAGG prints the mean without the score term (``mean='euler'``);
    the code it extends has it (``mean='sde'``, our default).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.errors import UserError


def over_latent(x_B: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) so that it broadcasts over (B, ...)."""
    return x_B.view(-1, *[1] * (like.dim() - 1))


def mean_d(x: Tensor) -> Tensor:
    """Mean over all non-batch dimensions, (B, ...) -> (B,)."""
    return x.flatten(1).mean(1)


@dataclass(frozen=True)
class Transition:
    """A Gaussian step ``z_next ~ N(mean, std^2)``; ``std`` and ``g`` have shape (B,)."""

    mean: Tensor
    std: Tensor
    g: Tensor
    """Diffusion coefficient without the step length: the scale of Flow-GRPO's KL (std itself for CPS)."""
    normalised: bool = True
    """False for CPS, whose log-probability is the bare mean square."""

    def sample(self, noise: Tensor) -> Tensor:
        """``mean + std * noise``."""
        return self.mean + over_latent(self.std, noise) * noise

    def log_prob(self, z_next: Tensor) -> Tensor:
        """``mean_d[-(z' - mean)^2 / (2 std^2)] - ln std - ln(2 pi) / 2`` ; CPS: ``-mean_d (z' - mean)^2``.

        The mean over dimensions, not the sum (JAGG Eq. 5 prints the sum as notation): a sum over 1e5
        dimensions would saturate every ratio. ``z_next`` is a constant.
        """
        square = mean_d((z_next.detach() - self.mean) ** 2)
        if not self.normalised:
            return -square
        return -square / (2 * self.std**2) - self.std.log() - 0.5 * math.log(2 * math.pi)


class Kernel(ABC):
    """One step of the sampler, as a distribution."""

    @abstractmethod
    def __call__(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Transition:
        """The transition from ``z`` at ``sigma`` (B,) to ``sigma_next`` (B,), differentiable in ``v``."""

    @abstractmethod
    def kappa(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``d mean / d v``, one scalar per sample: the sensitivity of the mean to the network output."""

    @abstractmethod
    def std(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Standard deviation of the transition per sample; it does not depend on v."""


class _SDE(Kernel):
    """Euler-Maruyama of the reverse SDE with the score written through v."""

    mean: str

    def g(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Diffusion coefficient per sample."""
        raise NotImplementedError

    def kappa(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``delta (1 + g^2 (1 - sigma) / (2 sigma))``, or ``delta`` for the Euler mean."""
        delta = sigma_next - sigma
        if self.mean == "euler":
            return delta
        return delta * (1 + self.g(sigma, sigma_next) ** 2 * (1 - sigma) / (2 * sigma))

    def std(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``g sqrt|delta|``."""
        return self.g(sigma, sigma_next) * (sigma_next - sigma).abs().sqrt()

    def __call__(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Transition:
        """One Euler-Maruyama step."""
        g = self.g(sigma, sigma_next)
        delta = sigma_next - sigma
        z_factor = torch.ones_like(sigma)
        if self.mean == "sde":
            z_factor = 1 + g**2 * delta / (2 * sigma)
        mean = over_latent(z_factor, z) * z + over_latent(self.kappa(sigma, sigma_next), v) * v
        return Transition(mean, self.std(sigma, sigma_next), g)

    def _check_mean(self) -> None:
        if self.mean not in ("sde", "euler"):
            raise UserError(f"kernel.mean={self.mean} is unknown; use 'sde' (with score term) or 'euler'")


@dataclass(frozen=True)
class DanceSDE(_SDE):
    """DanceGRPO: constant ``g = eta``."""

    eta: float = 0.3
    mean: str = "sde"

    def __post_init__(self) -> None:
        self._check_mean()
        if not self.eta > 0:
            raise UserError(f"kernel.eta={self.eta} gives no exploration; use a value > 0 such as 0.3")

    def g(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``eta`` everywhere."""
        return torch.full_like(sigma, self.eta)


@dataclass(frozen=True)
class FlowSDE(_SDE):
    """Flow-GRPO: ``g = a sqrt(sigma / (1 - sigma~))`` with ``sigma~ = sigma_1`` where sigma is 1.

    The guard stands only in the denominator; sigma = 1 happens at step 0 alone, where sigma_1 is
    ``sigma_next``.
    """

    noise_level: float = 0.7
    mean: str = "sde"

    def __post_init__(self) -> None:
        self._check_mean()
        if not self.noise_level > 0:
            raise UserError(
                f"kernel.noise_level={self.noise_level} gives no exploration; use a value > 0 such as 0.7"
            )

    def g(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Diffusion coefficient per sample."""
        guarded = torch.where(sigma >= 1, sigma_next, sigma)
        return self.noise_level * (sigma / (1 - guarded)).sqrt()


@dataclass(frozen=True)
class FlowCPS(Kernel):
    """Flow-CPS (coefficient preserving).

    ``mean = (1 - sigma') x0^ + sigma' cos(a pi/2) x1^`` and ``std = sigma' sin(a pi/2)``.
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.noise_level < 1:
            raise UserError(
                f"kernel.noise_level={self.noise_level} is outside (0, 1) for CPS; use for instance 0.8"
            )

    def kappa(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``-sigma (1 - sigma') + (1 - sigma) sigma' cos(a pi/2)``."""
        cos = math.cos(self.noise_level * math.pi / 2)
        return -sigma * (1 - sigma_next) + (1 - sigma) * sigma_next * cos

    def std(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """``sigma' sin(a pi/2)``: 0 on the last step, which is deterministic by itself."""
        return sigma_next * math.sin(self.noise_level * math.pi / 2)

    def __call__(self, v: Tensor, z: Tensor, sigma: Tensor, sigma_next: Tensor) -> Transition:
        """The transition, of variance-preserving coefficients."""
        cos = math.cos(self.noise_level * math.pi / 2)
        z_factor = (1 - sigma_next) + sigma_next * cos
        mean = over_latent(z_factor, z) * z + over_latent(self.kappa(sigma, sigma_next), v) * v
        std = self.std(sigma, sigma_next)
        return Transition(mean, std, std, normalised=False)
