"""Interpolation rules for the Jacobian: which steps anchor, and with what weights.

The exact gradient of a window is ``sum_j J_j^T s_j``. A rule chooses anchors A and a table M such that
``J_j ~ sum_a M[a, j] J_a``; the gradient is then ``sum_a J_a^T c_a`` with cotangents ``c_a = sum_j M[a, j]
s_j``. Anchors stand in the order in which their graphs may be pulled back one at a time: a cotangent must be
complete by then, so that M is triangular in that order (``M[a, a'] = 0`` for every later anchor ``a'``).

Shapes: t_WB (W steps, B samples), weights_AWB (A anchors). Random rules draw from ``generator``, which is
the same on all ranks and kept in the checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from jaggrl.errors import UserError

SPREADS = ("even", "chebyshev", "gauss")


@dataclass(frozen=True)
class Table:
    """Anchors (step indices, in pull-back order) and their weights M (A, W, B)."""

    anchors: tuple[int, ...]
    weights_AWB: Tensor

    def between(self) -> list[int]:
        """Steps that are no anchors but whose cotangent counts: those with any weight."""
        used_W = (self.weights_AWB != 0).any(-1).any(0).tolist()
        return [j for j, used in enumerate(used_W) if used and j not in self.anchors]


class Interpolant(ABC):
    """A rule. ``anchor_count`` is how many graphs a window costs; shorter windows are pulled back exactly."""

    anchor_count: int
    by_time: ClassVar[bool] = True
    """Whether the weights need falling times; a rule without times also takes windows of permuted steps."""
    by_velocity: ClassVar[bool] = False
    """Whether ``weights`` looks at velocities."""

    def asks(self, t_WB: Tensor) -> bool:
        """Whether the rule first wants to ``learn`` how Jacobians are related in windows at these times."""
        return False

    def learn(self, t_WB: Tensor, kernel_WW: Tensor, energy_W: Tensor) -> None:
        """Take in inner products of Jacobians under white noise, and squared norms of the cotangents."""
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def state_dict(self) -> dict[str, Tensor]:
        """What was learned, of fixed shapes, for the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""
        assert not state

    @abstractmethod
    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """Anchors and weights for a window."""

    def weights(self, table: Table, j: int, v_j: Tensor, v_A: Sequence[Tensor]) -> Tensor:
        """Weights (A, B) of a step that is no anchor; ``v_A``: the anchors' velocities if ``by_velocity``."""
        return table.weights_AWB[:, j]

    def counts(self, size: int) -> tuple[float, float]:
        """Expected numbers of anchors, and of further steps that count, in an interpolated window."""
        return self.anchor_count, size - self.anchor_count


@dataclass(frozen=True)
class Exact(Interpolant):
    """Every step its own anchor: M = identity, W backwards."""

    anchor_count: int = 0
    by_time: ClassVar[bool] = False

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """Identity."""
        W, B = t_WB.shape
        return Table(tuple(range(W)), torch.eye(W).unsqueeze(-1).expand(W, W, B))

    def counts(self, size: int) -> tuple[float, float]:
        """All anchors."""
        return size, 0


@dataclass(frozen=True)
class Linear(Interpolant):
    """JAGG, Eq. (6), (7): anchors 0, W-1, weights ``1 - alpha_j``, ``alpha_j``; exact under Theorem 1."""

    anchor_count: int = 2

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """``alpha_j = (t_0 - t_j) / (t_0 - t_{W-1})`` per sample."""
        alpha_WB = alpha(t_WB)
        return Table((0, len(t_WB) - 1), torch.stack([1 - alpha_WB, alpha_WB]))


@dataclass(frozen=True)
class Ends(Interpolant):
    """The paper's ablation: both end steps with weight 1, the rest discarded (no alpha, no factor W/2)."""

    anchor_count: int = 2

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """Indicators of step 0 and step W-1."""
        last = len(t_WB) - 1
        return Table((0, last), _indicators((0, last), t_WB))

    def counts(self, size: int) -> tuple[float, float]:
        """The middle is discarded."""
        return 2, 0


@dataclass(frozen=True)
class Lagrange(Interpolant):
    """Polynomial interpolation in t over ``anchor_count`` anchors: 2 is JAGG, 3 is quadratic.

    ``spread``: ``even`` spreads the anchors over the window with both ends; ``chebyshev`` takes the steps
    nearest to the Chebyshev nodes, which lie inside the window.
    """

    anchor_count: int = 3
    spread: str = "even"

    def __post_init__(self) -> None:
        if self.anchor_count < 2:
            raise UserError(f"backward.interpolant.anchor_count={self.anchor_count} must be at least 2")
        if self.spread not in SPREADS:
            raise UserError(f"backward.interpolant.spread={self.spread} is unknown; use {', '.join(SPREADS)}")

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """``M[a, j] = prod_{b != a} (t_j - t_b) / (t_a - t_b)``."""
        anchors = _spread(t_WB, self.anchor_count, self.spread)
        return Table(anchors, lagrange(t_WB, anchors))


@dataclass(frozen=True)
class Subset(Interpolant):
    """``anchor_count`` random steps (DanceGRPO's step sampling): indicators, times W/k when ``unbiased``."""

    anchor_count: int = 2
    unbiased: bool = True
    by_time: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.anchor_count < 1:
            raise UserError(f"backward.interpolant.anchor_count={self.anchor_count} must be at least 1")

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """``E[M] = identity`` when unbiased."""
        W = len(t_WB)
        chosen = torch.randperm(W, generator=generator)[: self.anchor_count].sort().values.tolist()
        scale = W / self.anchor_count if self.unbiased else 1.0
        return Table(tuple(chosen), scale * _indicators(chosen, t_WB))

    def counts(self, size: int) -> tuple[float, float]:
        """Steps that were not drawn are discarded."""
        return self.anchor_count, 0


@dataclass(frozen=True)
class Fitted(Lagrange):
    """Lagrange weights, moved towards the least-squares fit of each middle velocity on the anchors'
    velocities.

    Per sample ``w = m + (V^T V + ridge tr(V^T V)/A I)^-1 V^T (v_j - V m)``, V the anchors' velocities as
    columns and m the Lagrange weights: what the anchors can say of v_j they should be able to say of its
    Jacobian.
    """

    anchor_count: int = 2
    ridge: float = 1e-2
    by_velocity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ridge > 0:
            raise UserError(
                f"backward.interpolant.ridge={self.ridge} must be > 0: neighbouring velocities are collinear"
            )

    def weights(self, table: Table, j: int, v_j: Tensor, v_A: Sequence[Tensor]) -> Tensor:
        """(A, B), on the velocities' device."""
        prior_AB = table.weights_AWB[:, j].to(v_j.device, torch.float64)
        V_ABD = torch.stack([v.detach().float().flatten(1) for v in v_A])
        rest_BD = v_j.detach().float().flatten(1) - (prior_AB.float().unsqueeze(-1) * V_ABD).sum(0)
        gram_BAA = torch.einsum("abd,cbd->bac", V_ABD, V_ABD).double()
        right_BA = torch.einsum("abd,bd->ba", V_ABD, rest_BD).double()
        scale_B = gram_BAA.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30)
        eye = torch.eye(len(v_A), dtype=torch.float64, device=v_j.device)
        step_BA = torch.linalg.solve(gram_BAA + self.ridge * scale_B.view(-1, 1, 1) * eye, right_BA)
        return (prior_AB + step_BA.T).float()


@dataclass(frozen=True)
class Debiased(Interpolant):
    """JAGG plus, with probability p, one random middle step whose correction makes the expectation exact.

    The drawn step m adds ``(W-2)/p (J_m^T s_m - interpolated)``, so that ``E[M] = identity``; 2 + p
    backwards. m comes first in the pull-back order: its s goes into both ends' cotangents.
    """

    probability: float = 1.0
    anchor_count: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise UserError(f"backward.interpolant.probability={self.probability} is outside (0, 1]")

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """The linear table, corrected on the drawn step."""
        W = len(t_WB)
        draw = float(torch.rand((), generator=generator))
        middle = int(torch.randint(1, W - 1, (), generator=generator))
        alpha_WB = alpha(t_WB)
        ends_AWB = torch.stack([1 - alpha_WB, alpha_WB])
        if draw >= self.probability:
            return Table((0, W - 1), ends_AWB)
        return Table((middle, 0, W - 1), corrected(ends_AWB, middle, (W - 2) / self.probability))

    def counts(self, size: int) -> tuple[float, float]:
        """The drawn step is an anchor, the others of the middle count."""
        return 2 + self.probability, size - 2 - self.probability


def alpha(t_WB: Tensor) -> Tensor:
    """Eq. (6): ``alpha_j = (t_0 - t_j) / (t_0 - t_{W-1})``, in [0, 1], per sample."""
    return (t_WB[0] - t_WB) / (t_WB[0] - t_WB[-1])


def lagrange(t_WB: Tensor, anchors: Sequence[int]) -> Tensor:
    """Lagrange basis polynomials of the anchors' times, evaluated at all times (A, W, B); fp64 inside."""
    t = t_WB.double()
    rows = []
    for a in anchors:
        row = torch.ones_like(t)
        for b in anchors:
            if b != a:
                row = row * (t - t[b]) / (t[a] - t[b])
        rows.append(row)
    weights = torch.stack(rows).to(t_WB.dtype)
    weights[:, list(anchors)] = (
        torch.eye(len(anchors)).unsqueeze(-1).to(weights)
    )  # cardinality to the last bit
    return weights


def corrected(ends_AWB: Tensor, middle: int, weight: float) -> Tensor:
    """Rows (middle, first, last): the ends' table plus ``weight (indicator - interpolated)`` at middle."""
    row = torch.zeros_like(ends_AWB[:1])
    row[0, middle] = weight
    ends = ends_AWB.clone()
    ends[:, middle] *= 1 - weight
    return torch.cat([row, ends])


def _indicators(steps: Sequence[int], t_WB: Tensor) -> Tensor:
    weights = torch.zeros(len(steps), *t_WB.shape)
    for row, j in enumerate(steps):
        weights[row, j] = 1
    return weights


def _spread(t_WB: Tensor, count: int, spread: str) -> tuple[int, ...]:
    """``count`` distinct steps spread over the window by time (the schedule's, so that all ranks agree)."""
    t = t_WB[:, 0].double()
    unit = torch.linspace(0, 1, count, dtype=torch.float64)
    if spread == "chebyshev":
        k = torch.arange(count, dtype=torch.float64)
        unit = 0.5 - 0.5 * torch.cos((2 * k + 1) * torch.pi / (2 * count))
    elif spread == "gauss":
        unit = 0.5 + 0.5 * torch.from_numpy(np.polynomial.legendre.leggauss(count)[0])
    chosen: list[int] = []
    for target in t[0] + unit * (t[-1] - t[0]):
        order = (t - target).abs().argsort(stable=True).tolist()
        chosen.append(next(j for j in order if j not in chosen))
    return tuple(sorted(chosen))
