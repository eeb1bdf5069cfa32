"""Interpolation by the measured kernel of Jacobians: the best anchors and weights for what one backward each
can say.

How far ``J_j`` can be told from the anchors' Jacobians is a matter of their inner products under a random
cotangent,

    K_jk = E_r <J_j^T r, J_k^T r>       (r white noise, the same at both steps),

the neural tangent kernel between the steps of a window. For cotangents s_j that are white and independent
over steps (in a policy gradient they are the rollout's own noise) the weights of least mean square error are
the kriging weights

    M[:, j] = K_AA^-1 K_Aj,   leaving   E|J_j^T s_j - sum_a M[a, j] J_a^T s_j|^2 ~ |s_j|^2 (K_jj - K_jA M[:, j]),

and the anchors are those that leave least. Unlike polynomials in t they shrink where Jacobians are not alike,
so that the norm does not inflate. The kernel of a window (known by its times) is measured on one micro-batch (as
many passes as exact backward takes there), now and then renewed.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from jaggrl.backward.cotangents import cotangent
from jaggrl.backward.interpolants import Interpolant, Table
from jaggrl.backward.measure import Sketch, alone
from jaggrl.errors import UserError
from jaggrl.infra.distributed import total
from jaggrl.window import Window

SLOTS, LONGEST = 64, 64  # windows and steps that the state has room for
JITTER = 1e-4


class Kriging(Interpolant):
    """Anchors and weights from the measured kernel of each window, which the times of its first and last step tell."""

    def __init__(
        self, anchor_count: int = 2, target: float | None = None, every: int = 200, memory: float = 0.5
    ) -> None:
        """
        Args:
            anchor_count: backwards per window; with ``target`` the smallest number.
            target: add anchors until the expected cosine to exact reaches it; null keeps ``anchor_count``.
            every: how often a window is pulled back between two measurements of its kernel.
            memory: weight of the past when a kernel is measured again.
        """
        if anchor_count < 1:
            raise UserError(f"backward.interpolant.anchor_count={anchor_count} must be at least 1")
        if target is not None and not 0 < target < 1:
            raise UserError(f"backward.interpolant.target={target} is outside (0, 1); use for instance 0.95")
        if every < 1:
            raise UserError(f"backward.interpolant.every={every} must be at least 1")
        self.anchor_count = anchor_count
        self.target = target
        self.every = every
        self.memory = memory
        self._kernels = torch.zeros(SLOTS, LONGEST, LONGEST, dtype=torch.float64)
        self._energies = torch.zeros(SLOTS, LONGEST, dtype=torch.float64)
        self._slots = torch.full((SLOTS, 4), -1.0, dtype=torch.float64)
        """First and last time, steps, and windows since the last measurement of each slot."""
        self._plans: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def asks(self, t_WB: Tensor) -> bool:
        """At first, and after ``every`` windows at these times; called once per window."""
        slot = self._slot(t_WB)
        if self._slots[slot, 2] < 0:
            return True
        self._slots[slot, 3] += 1
        return bool(self._slots[slot, 3] >= self.every)

    def learn(self, t_WB: Tensor, kernel_WW: Tensor, energy_W: Tensor) -> None:
        """Renew a window's kernel (scaled to mean diagonal 1) and the energies of its cotangents."""
        slot, (first, last, W) = self._slot(t_WB), _times(t_WB)
        if W > LONGEST:
            raise UserError(f"backward.window={W}: kriging keeps kernels of at most {LONGEST} steps")
        kernel = kernel_WW.double() / kernel_WW.diagonal().mean().clamp(min=1e-300)
        energy = energy_W.double() / energy_W.mean().clamp(min=1e-300)
        keep = self.memory if self._slots[slot, 2] >= 0 else 0.0
        self._kernels[slot, :W, :W] = keep * self._kernels[slot, :W, :W] + (1 - keep) * kernel
        self._energies[slot, :W] = keep * self._energies[slot, :W] + (1 - keep) * energy
        self._slots[slot] = torch.tensor([first, last, W, 0.0])
        self._plans.pop(slot, None)

    def table(self, t_WB: Tensor, generator: torch.Generator) -> Table:
        """The plan of the window's times, the same for all samples."""
        anchors, weights_AW = self._plan(self._slot(t_WB))
        return Table(anchors, weights_AW.to(t_WB.dtype).unsqueeze(-1).expand(-1, -1, t_WB.shape[1]))

    def expected_cosine(self, t_WB: Tensor) -> float:
        """Of the window's gradient to exact, as the kernel has it."""
        slot, W = self._slot(t_WB), len(t_WB)
        return expected_cosine(self._kernels[slot, :W, :W], self._energies[slot, :W], self._plan(slot)[0])

    def _plan(self, slot: int) -> tuple[tuple[int, ...], Tensor]:
        if slot not in self._plans:
            W = int(self._slots[slot, 2])
            kernel, energy = self._kernels[slot, :W, :W], self._energies[slot, :W]
            count = min(self.anchor_count, W)
            anchors = best_anchors(kernel, energy, count)
            while self.target and count < W and expected_cosine(kernel, energy, anchors) < self.target:
                count += 1
                anchors = best_anchors(kernel, energy, count)
            self._plans[slot] = (anchors, kriging_weights(kernel, anchors))
        return self._plans[slot]

    def _slot(self, t_WB: Tensor) -> int:
        """The window's slot, or the next free one."""
        first, last, W = _times(t_WB)
        for slot, (begin, end, size, _) in enumerate(self._slots.tolist()):
            if size < 0 or (size == W and abs(begin - first) < 1e-6 and abs(end - last) < 1e-6):
                return slot
        raise UserError(
            f"more than {SLOTS} different windows are too many for kriging; use a longer backward.window"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Kernels, energies and slots."""
        return {
            "kernels": self._kernels.clone(),
            "energies": self._energies.clone(),
            "slots": self._slots.clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue with the kernels of before."""
        self._kernels = state["kernels"].cpu().double()
        self._energies = state["energies"].cpu().double()
        self._slots = state["slots"].cpu().double()
        self._plans.clear()


def _times(t_WB: Tensor) -> tuple[float, float, int]:
    """First and last time (the schedule's, so that all ranks agree) and length of a window."""
    return float(t_WB[0, 0]), float(t_WB[-1, 0]), len(t_WB)


def jacobian_kernel(
    window: Window, parameters: Sequence[Tensor], noise: torch.Generator
) -> tuple[Tensor, Tensor]:
    """K (W, W) under one draw of white noise, and ``|s_j|^2`` (W,), summed over ranks; one backward per step.

    ``noise`` differs between ranks: samples of different ranks must not share their cotangent.
    """
    sketch, r = Sketch(parameters), None
    rows, energies = [], []
    for j in range(window.size):
        (v,) = window.velocities([j])
        energies.append(cotangent(window, j, v)[0].square().sum())
        if r is None:
            r = torch.randn(v.shape, generator=noise).to(v.device, v.dtype)
        _, gradients = alone(parameters, partial(torch.autograd.backward, v, r))
        rows.append(sketch(gradients))
    X = torch.stack(rows).to(v.device).double()
    return total(X @ X.T).cpu(), total(torch.stack(energies)).cpu()


def kriging_weights(kernel_WW: Tensor, anchors: Sequence[int]) -> Tensor:
    """``K_AA^-1 K_A:`` (A, W), exactly the indicators at the anchors; a jitter keeps like anchors apart."""
    index = list(anchors)
    K_AA = kernel_WW[index][:, index]
    jitter = JITTER * K_AA.diagonal().mean() * torch.eye(len(index), dtype=kernel_WW.dtype)
    weights = torch.linalg.solve(K_AA + jitter, kernel_WW[index])
    weights[:, index] = torch.eye(len(index), dtype=kernel_WW.dtype)
    return weights


def residuals(kernel_WW: Tensor, anchors: Sequence[int]) -> Tensor:
    """``K_jj - 2 K_jA M_j + M_j^T K_AA M_j`` (W,): what the anchors cannot say of each step."""
    index = list(anchors)
    weights = kriging_weights(kernel_WW, index)
    cross = (weights * kernel_WW[index]).sum(0)
    own = (weights * (kernel_WW[index][:, index] @ weights)).sum(0)
    return (kernel_WW.diagonal() - 2 * cross + own).clamp(min=0)


def expected_cosine(kernel_WW: Tensor, energy_W: Tensor, anchors: Sequence[int]) -> float:
    """``sqrt(1 - sum_j |s_j|^2 residual_j / sum_j |s_j|^2 K_jj)``."""
    missed = float((energy_W * residuals(kernel_WW, anchors)).sum())
    whole = float((energy_W * kernel_WW.diagonal()).sum())
    return math.sqrt(max(0.0, 1 - missed / whole)) if whole > 0 else 1.0


def best_anchors(kernel_WW: Tensor, energy_W: Tensor, count: int) -> tuple[int, ...]:
    """The ``count`` steps that leave least: one by one, then exchanged as long as that helps."""
    W = len(energy_W)

    def missed(anchors: Sequence[int]) -> float:
        return float((energy_W * residuals(kernel_WW, anchors)).sum())

    chosen: list[int] = []
    for _ in range(count):
        rest = [j for j in range(W) if j not in chosen]
        chosen.append(min(rest, key=lambda j: missed([*chosen, j])))
    improved = True
    while improved:
        improved = False
        for i in range(count):
            rest = [j for j in range(W) if j not in chosen]
            swaps = {j: missed([*chosen[:i], j, *chosen[i + 1 :]]) for j in rest}
            best = min(swaps, key=lambda j: swaps[j], default=None)
            if best is not None and swaps[best] < missed(chosen) * (1 - 1e-9):
                chosen[i] = best
                improved = True
    return tuple(sorted(chosen))
