"""Every algorithm on toys: what the tests of identities and the matrix share."""

from collections.abc import Callable
from typing import Any

from jaggrl.algorithms.base import Algorithm
from jaggrl.algorithms.diffusion_art import DiffusionART
from jaggrl.algorithms.diffusion_nft import DiffusionNFT
from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import (
    Everywhere,
    Exploration,
    FixedWindow,
    Nowhere,
    RandomWindow,
    SlidingWindow,
)
from jaggrl.diffusion.flash import Compressed
from jaggrl.diffusion.kernels import DanceSDE, FlowCPS, FlowSDE, Kernel
from jaggrl.diffusion.schedule import DanceSchedule, ModelSchedule
from jaggrl.diffusion.solvers import DPMSolver2M, Euler
from jaggrl.rollout import Sampler

STEPS = 8
FG = Advantage(std="global", eps=1e-4, ddof=0)


def dance(kernel: Kernel, explore: Exploration | None = None, **kwargs: Any) -> Sampler:
    """DanceGRPO's schedule."""
    return Sampler(DanceSchedule(STEPS, 3.0), explore or Everywhere(), Euler(), kernel, **kwargs)


def flow(kernel: Kernel, explore: Exploration | None = None) -> Sampler:
    """The model's own schedule."""
    return Sampler(ModelSchedule(STEPS), explore or Everywhere(), Euler(), kernel)


def ode(second_order: bool = False) -> Sampler:
    """No noise."""
    return Sampler(ModelSchedule(STEPS), Nowhere(), DPMSolver2M() if second_order else Euler())


def _dance(**kwargs: Any) -> tuple[Algorithm, Sampler]:
    kernel = DanceSDE(0.3)
    return PolicyGradient(kernel, Advantage(), **kwargs), dance(
        kernel, decode="denoised", init_noise="rollout"
    )


def _flow(
    kernel: Kernel | None = None, explore: Exploration | None = None, **kwargs: Any
) -> tuple[Algorithm, Sampler]:
    kernel = kernel or FlowSDE(0.7)
    return PolicyGradient(kernel, kwargs.pop("advantage", FG), **kwargs), flow(kernel, explore)


def _mix(**kwargs: Any) -> tuple[Algorithm, Sampler]:
    kernel = FlowSDE(0.7)
    sampler = dance(kernel, SlidingWindow(4, iters=1, stride=1), **kwargs)
    return PolicyGradient(kernel, Advantage(mix="advantage")), sampler


def _nft(**kwargs: Any) -> tuple[Algorithm, Sampler]:
    return DiffusionNFT(FG, **kwargs), ode(second_order=True)


def _art(**kwargs: Any) -> tuple[Algorithm, Sampler]:
    return DiffusionART(FlowSDE(0.7), **kwargs), ode()


PRESETS: dict[str, Callable[[], tuple[Algorithm, Sampler]]] = {
    "dance_grpo": lambda: _dance(timestep_fraction=0.6),
    "dance_grpo_best_of_n": lambda: _dance(best_of_n=2),
    "flow_grpo": _flow,
    "flow_grpo_kl": lambda: _flow(kl_coef=0.04),
    "flow_grpo_velocity_kl": lambda: _flow(kl_coef=0.01, kl_form="velocity"),
    "flow_grpo_cps": lambda: _flow(FlowCPS(0.8)),
    "flow_grpo_fast": lambda: _flow(FlowCPS(0.8), RandomWindow(4, 0, 6), clip_range=1e-5),
    "flow_grpo_fast_fixed": lambda: _flow(FlowCPS(0.8), FixedWindow(1, 6), clip_range=1e-5),
    "mixgrpo": _mix,
    "mixgrpo_flash": lambda: _mix(after_window=Compressed(DPMSolver2M(), 0.4)),
    "grpo_guard": lambda: _flow(
        advantage=Advantage(std="group", eps=1e-4, ddof=0), guard=True, clip_range=2e-6
    ),
    "grpo_guard_reweighted": lambda: _flow(guard=True, guard_reweight=True, clip_range=2e-6),
    "diffusion_nft": _nft,
    "diffusion_nft_per_window": lambda: _nft(noise="per_window", decay=0.3, adaptive_weight=False),
    "diffusion_nft_unanchored": lambda: _nft(anchor="current", kl_coef=0.0),
    "diffusion_art": _art,
    "diffusion_art_pairwise": lambda: _art(pairwise=True),
}
"""Name -> (algorithm, its sampler)."""
