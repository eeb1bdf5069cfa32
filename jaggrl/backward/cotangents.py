"""Cotangents: of each step, ``s_j = dL_j / dv_j``, and of the anchors, ``c_a = sum_j M[a, j] s_j``."""

import torch
from torch import Tensor

from jaggrl.backward.interpolants import Table
from jaggrl.window import StepLoss, Window


def cotangent(window: Window, j: int, v: Tensor) -> tuple[Tensor, StepLoss]:
    """``s_j = dL_j / dv_j`` by autograd on a detached fp32 proxy of v; the network is not touched."""
    proxy = v.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = window.loss(j, proxy)
        (s,) = torch.autograd.grad(loss.value, proxy)
    return s, loss


class Cotangents:
    """``c_a = sum_j M[a, j] s_j`` in fp32, one accumulator per anchor (Eq. 7)."""

    def __init__(self, table: Table) -> None:
        self._rows = (table.weights_AWB != 0).any(-1).tolist()
        self._sums: list[Tensor | None] = [None] * len(table.anchors)

    def add(self, j: int, s: Tensor, weights_AB: Tensor) -> None:
        """Distribute step j's cotangent over the anchors."""
        for i in range(len(self._sums)):
            if not self._rows[i][j]:
                continue
            term = per_sample(weights_AB[i], s) * s
            old = self._sums[i]
            self._sums[i] = term if old is None else old + term

    def take(self, i: int, v: Tensor) -> Tensor:
        """Anchor i's cotangent in the network's dtype; zeros if no step reached it (collectives run)."""
        total = self._sums[i]
        self._sums[i] = None
        return torch.zeros_like(v) if total is None else total.to(v.dtype)


def per_sample(weight_B: Tensor, x: Tensor) -> Tensor:
    """Weights (B,) shaped to multiply (B, ...), on its device and in its dtype."""
    return weight_B.to(x.device, x.dtype, non_blocking=True).view(-1, *[1] * (x.dim() - 1))
