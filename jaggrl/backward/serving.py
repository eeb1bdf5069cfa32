"""Velocities of the steps between the anchors without a forward: the rollout's own, as they are or corrected.

While the parameters are the rollout's, the stored velocity is exact. After an update ``corrected`` moves it by what the
anchors moved,

    v_j ~ v_j^old + sum_a M[a, j] (v_a - v_a^old),

the interpolation of Jacobians that JAGG rests on, applied to the parameters' own change (exact under Theorem 1);
``always`` leaves it stale. Both are approximations that spare all forwards between the anchors.
"""

from collections.abc import Sequence

from torch import Tensor

from jaggrl.backward.cotangents import per_sample
from jaggrl.backward.interpolants import Table
from jaggrl.window import Window

SERVED = ("off", "fresh", "corrected", "always")


def source(served: str, window: Window) -> str:
    """Where a window's middle velocities come from: ``forward``, ``stored`` or ``corrected``."""
    if window.stored is None or served == "off" or (served == "fresh" and not window.fresh):
        return "forward"
    return "corrected" if served == "corrected" and not window.fresh else "stored"


def stored_velocity(window: Window, j: int) -> Tensor:
    """The rollout's raw output at step j."""
    assert window.stored is not None
    return window.stored(j)


def corrected_velocity(window: Window, table: Table, j: int, v_A: Sequence[Tensor]) -> Tensor:
    """The rollout's velocity at step j, moved by the interpolated change of the anchors' velocities; fp32."""
    v = stored_velocity(window, j).float()
    for i, a in enumerate(table.anchors):
        moved = v_A[i].float() - stored_velocity(window, a).float()
        v = v + per_sample(table.weights_AWB[i, j], moved) * moved
    return v
