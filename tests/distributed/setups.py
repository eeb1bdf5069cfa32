"""Models, algorithms and strategies by name, for the tests that start processes: a cell is one of each."""

from typing import Any, NamedTuple

from jaggrl.algorithms.base import Algorithm
from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Ends, Exact, Interpolant, Linear
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.models.base import Model
from jaggrl.models.policy import Lora
from jaggrl.rollout import Sampler
from tests.algorithms.presets import PRESETS
from tests.toys import ToyModel

STRATEGIES: dict[str, tuple[Interpolant, dict[str, Any]]] = {
    "exact": (Exact(), {}),
    "jagg": (Linear(), {"graph": "joint"}),
    "jagg_sequential": (Linear(), {"graph": "sequential"}),
    "ablate": (Ends(), {}),
    "jagg_batched": (Linear(), {"graph": "batched"}),
}
PROVED = ("exact", "jagg", "jagg_sequential", "ablate")
"""The strategies that every algorithm is proved with."""


class Cell(NamedTuple):
    """One training to compare."""

    model: str
    """``toy`` or ``flux`` (a few thousand parameters in FLUX's classes), with ``_lora`` for LoRA."""
    algorithm: str
    strategy: str

    @property
    def lora(self) -> Lora | None:
        """LoRA's settings."""
        return Lora(4, 8) if self.model.endswith("lora") else None


def every_cell() -> list[Cell]:
    """Every algorithm x proved strategy, full and LoRA, on the toy."""
    return [Cell(m, a, s) for m in ("toy", "toy_lora") for a in PRESETS for s in PROVED]


def diagonal() -> list[Cell]:
    """Every algorithm twice, full and LoRA, each with another strategy: all pairs of neighbours occur."""
    names = list(PRESETS)
    full = [Cell("toy", a, PROVED[i % 4]) for i, a in enumerate(names)]
    return full + [Cell("toy_lora", a, PROVED[(i + 1) % 4]) for i, a in enumerate(names)]


def small_model(name: str) -> Model:
    """The model of a cell before LoRA."""
    if name.startswith("toy"):
        return ToyModel()
    from tests.tiny_flux import tiny_flux

    return tiny_flux()


def algorithm_and_sampler(name: str) -> tuple[Algorithm, Sampler]:
    """A preset, or ``dance``: 5 steps with noise enough that a group's rewards differ by far more than rounding.

    The clip is wide: at the papers' 1e-6 to 1e-4 the rounding of a ratio decides now and then whether it is clipped.
    """
    if name in PRESETS:
        algorithm, sampler = PRESETS[name]()
    else:
        assert name == "dance"
        kernel = DanceSDE(1.0)
        algorithm = PolicyGradient(kernel, Advantage())
        sampler = Sampler(DanceSchedule(5, 3.0), Everywhere(), Euler(), kernel, "denoised", "rollout")
    if isinstance(algorithm, PolicyGradient):
        algorithm.clip_range = 0.1
    return algorithm, sampler


def backward_settings(name: str) -> tuple[Interpolant, dict[str, Any]]:
    """A strategy by its config's name."""
    interpolant, settings = STRATEGIES[name]
    return interpolant, {"window": 4, **settings}
