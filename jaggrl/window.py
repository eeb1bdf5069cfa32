"""The seam: what an algorithm hands to a backward strategy, and nothing more.

An algorithm cuts its work into windows: W network outputs to compute and W losses to judge them. A backward
strategy turns a window into parameter gradients, ``sum_j J_j^T s_j`` exactly or by interpolating the Jacobians
``J_j = dv_j/dtheta`` between anchors. Closures keep the two apart: a strategy cannot reach prompts, advantages or
log-probabilities even by mistake, and a test builds a Window from a three-line model.

What an algorithm promises: ``loss`` treats stored tensors as constants; steps are in falling t; the sum of the
values of all windows of one optimizer step is the objective (micro-batch size never changes the gradient); every
rank yields the same number of windows of the same sizes in the same order, a fully clipped window included.

Shapes: W steps of the window, B samples of the micro-batch, ``...`` latent dimensions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepLoss:
    """One step's share of the objective and what the log wants to know about it."""

    value: Tensor
    """Scalar: the share of the optimizer step's objective."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached scalars, averaged over all steps of the update for the log (ratio, clip share, KL, mask share)."""


@dataclass(frozen=True)
class Window:
    """W consecutive denoising steps of one micro-batch."""

    t_WB: Tensor
    """Network time of each step and sample, falling along W, on the CPU; alpha_j comes from this, never from sigma."""
    position: float
    """In [0, 1): 0 is the noisiest window of its trajectory. 1.0 marks the remainder, which is always exact."""
    velocities: Callable[[Sequence[int]], list[Tensor]]
    """Steps -> raw network outputs (B, ...), computed in ONE forward; records a graph iff grad mode is on."""
    loss: Callable[[int, Tensor], StepLoss]
    """(j, raw v_j) -> L_j; combines guidance; differentiable in v_j alone."""
    stored: Callable[[int], Tensor] | None = None
    """The rollout's own raw output at step j, where the rollout kept it; None where states are not its own."""
    fresh: bool = False
    """True while the parameters are those of the rollout, so that ``stored`` is exact."""

    @property
    def size(self) -> int:
        """W, the number of steps."""
        return int(self.t_WB.shape[0])
