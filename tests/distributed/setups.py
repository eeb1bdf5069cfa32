"""Small models, algorithms and strategies by name, for the tests that start processes."""

from typing import Any

from jaggrl.algorithms.base import Algorithm
from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Ends, Exact, Interpolant, Linear
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.models.base import Model
from jaggrl.rollout import Sampler
from tests.toys import ToyModel


def small_model(name: str) -> Model:
    """``toy``, or ``flux`` / ``flux_lora``: a few thousand parameters in FLUX's classes."""
    if name == "toy":
        return ToyModel()
    from tests.tiny_flux import tiny_flux

    return tiny_flux()


def algorithm_and_sampler(name: str) -> tuple[Algorithm, Sampler]:
    """DanceGRPO at 5 steps, with noise enough that a group's rewards differ by far more than rounding."""
    kernel = DanceSDE(1.0)
    sampler = Sampler(DanceSchedule(5, 3.0), Everywhere(), Euler(), kernel, "denoised", "rollout")
    assert name == "dance"
    return PolicyGradient(kernel, Advantage(), clip_range=0.1), sampler


def backward_settings(name: str) -> tuple[Interpolant, dict[str, Any]]:
    """A strategy by its config's name."""
    table: dict[str, tuple[Interpolant, dict[str, Any]]] = {
        "exact": (Exact(), {}),
        "jagg": (Linear(), {"graph": "joint"}),
        "jagg_batched": (Linear(), {"graph": "batched"}),
        "jagg_sequential": (Linear(), {"graph": "sequential"}),
        "ablate": (Ends(), {}),
    }
    interpolant, settings = table[name]
    return interpolant, {"window": 4, **settings}
