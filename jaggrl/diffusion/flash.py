"""MixGRPO-Flash: fewer and larger deterministic steps after the stochastic window.

Nothing after the window is trained, so that it need only be walked well. We follow
``fastvideo/utils/sampling_utils.py`` (``dpm_apply_strategy="post"``) and leave it in two places:

1. its ``max(int(remaining * ratio), 1)`` counts points of the schedule, both ends included: one point is no
   step at all and the sample stays noisy. We take at least 2 points, one step to sigma 0;
2. it keeps the x0 predictions of stochastic steps in the multistep memory; noise came between them, so that
   we start the solver anew after the window (its first step is first-order).
"""

from dataclasses import dataclass

from jaggrl.diffusion.schedule import DanceSchedule, Schedule
from jaggrl.diffusion.solvers import Solver
from jaggrl.errors import UserError


@dataclass(frozen=True)
class Compressed:
    """The schedule after the window shrinks to ``ratio`` of its points, walked by ``solver``."""

    solver: Solver
    ratio: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UserError(
                f"rollout.after_window.ratio={self.ratio} is outside (0, 1]; MixGRPO-Flash uses 0.4"
            )

    def __call__(self, rule: DanceSchedule, explored: range) -> Schedule:
        """``max(int((S - last) ratio), 2)`` points after the last stochastic step ``last``."""
        last = explored[-1]
        return rule.compressed(last + 1, max(int((rule.steps - last) * self.ratio), 2))
