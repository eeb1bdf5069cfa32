"""From a window to parameter gradients: graph modes, routing, served velocities, and the count of passes.

A step's cotangent ``s_j = dL_j/dv_j`` is taken on a detached fp32 proxy of the raw network output; cotangents are summed
in fp32 and rounded once to the network's dtype. Graph modes, equal in fp32:

    joint        one forward per anchor, one backward call over all of them (JAGG, Algorithm 1)
    batched      all anchors in one forward of A * B samples, one backward: one gather per module under FSDP2
    sequential   one graph alive at a time (JAGG, Algorithm 2)
"""

from collections import defaultdict
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from jaggrl.backward.interpolants import Exact, Interpolant, Table
from jaggrl.errors import UserError
from jaggrl.infra.stopwatch import Stopwatch
from jaggrl.window import Window

GRAPHS = ("joint", "batched", "sequential")
SERVED = ("off", "fresh", "always")


@dataclass
class Passes:
    """Network passes over one micro-batch, in units of one step's forward or backward (a batched call counts A)."""

    windows: int = 0
    grad_forwards: int = 0
    nograd_forwards: int = 0
    served: int = 0
    backwards: int = 0
    forward_calls: int = 0
    backward_calls: int = 0

    def add(self, other: "Passes") -> None:
        """Sum in place."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def as_dict(self) -> dict[str, int]:
        """For the log."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Report:
    """What happened over the windows of one optimizer step (or of one window): loss, statistics, passes."""

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    stats: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    passes: Passes = field(default_factory=Passes)

    def add(self, other: "Report") -> None:
        """Sum in place."""
        self.loss = self.loss.to(other.loss.device) + other.loss
        for name, values in other.stats.items():
            self.stats[name] += values
        self.passes.add(other.passes)

    def summary(self) -> dict[str, Tensor]:
        """Each statistic over all steps: the largest for names in ``_max``, else the mean (still on the device)."""
        reduced = {}
        for name, values in self.stats.items():
            stacked = torch.stack(values).float()
            reduced[name] = stacked.max() if name.endswith("_max") else stacked.mean()
        return reduced


class Backward:
    """A backward strategy: which rule interpolates, how graphs are kept, and which windows it takes."""

    def __init__(
        self,
        interpolant: Interpolant,
        window: int | list[int] = 4,
        graph: str = "joint",
        jagg_frac: float = 1.0,
        served: str = "fresh",
        seed: int = 0,
    ) -> None:
        """
        Args:
            interpolant: rule for the routed windows; the others are pulled back exactly.
            window: W, or a list of sizes.
            graph: ``joint``, ``batched`` or ``sequential``.
            jagg_frac: windows with ``position < jagg_frac`` are interpolated (the noisiest first; ceil of the count).
            served: middle velocities from the rollout: ``off``, ``fresh`` (while the parameters are the rollout's) or
                ``always`` (stale after an update, an approximation).
            seed: of the generator that random rules draw from, the same on all ranks.
        """
        if graph not in GRAPHS:
            raise UserError(f"backward.graph={graph} is unknown; use {', '.join(GRAPHS)}")
        if served not in SERVED:
            raise UserError(f"backward.served={served} is unknown; use {', '.join(SERVED)}")
        if not 0 <= jagg_frac <= 1:
            raise UserError(f"backward.jagg_frac={jagg_frac} is outside [0, 1]; the paper uses 0.6")
        self.interpolant = interpolant
        self.window = window
        self.graph = graph
        self.jagg_frac = jagg_frac
        self.served = served
        self.generator = torch.Generator().manual_seed(seed)
        self.stopwatch = Stopwatch(torch.device("cpu"))

    def routed(self, position: float, size: int) -> bool:
        """Whether a window is interpolated; a decision from the schedule alone, the same on all ranks."""
        return position < self.jagg_frac and size > max(self.interpolant.anchor_count, 1) and self._interpolates

    @property
    def _interpolates(self) -> bool:
        return not isinstance(self.interpolant, Exact)

    def __call__(self, window: Window) -> Report:
        """Add the window's gradient to the parameters' ``.grad``."""
        distinct = bool((window.t_WB[:-1] > window.t_WB[1:]).all())
        if not (self.routed(window.position, window.size) and distinct):
            table = Exact().table(window.t_WB, self.generator)
            return self._sequential(window, table)
        table = self.interpolant.table(window.t_WB, self.generator)
        if self.graph == "sequential":
            return self._sequential(window, table)
        return self._together(window, table)

    def _together(self, window: Window, table: Table) -> Report:
        """Joint and batched: all anchors' graphs alive, one backward call."""
        report = Report()
        report.passes.windows = 1
        anchors = table.anchors
        cotangents = _Cotangents(table)
        with self.stopwatch("update_fwd"):
            calls = [list(anchors)] if self.graph == "batched" else [[a] for a in anchors]
            outputs = [v for call in calls for v in window.velocities(call)]
            report.passes.grad_forwards += len(anchors)
            report.passes.forward_calls += len(calls)
            for a, v in zip(anchors, outputs, strict=True):
                cotangents.add(a, self._cotangent(window, a, v, report))
            self._middle(window, table, cotangents, report)
        with self.stopwatch("update_bwd"):
            torch.autograd.backward(outputs, [cotangents.take(i, v) for i, v in enumerate(outputs)])
        report.passes.backwards += len(anchors)
        report.passes.backward_calls += 1
        return report

    def _sequential(self, window: Window, table: Table) -> Report:
        """Middle steps first, then one anchor at a time: forward, complete its cotangent, pull back, free."""
        report = Report()
        report.passes.windows = 1
        cotangents = _Cotangents(table)
        with self.stopwatch("update_fwd"):
            self._middle(window, table, cotangents, report)
        for i, a in enumerate(table.anchors):
            with self.stopwatch("update_fwd"):
                (v,) = window.velocities([a])
                cotangents.add(a, self._cotangent(window, a, v, report))
            with self.stopwatch("update_bwd"):
                torch.autograd.backward(v, cotangents.take(i, v))
        count = len(table.anchors)
        report.passes.grad_forwards += count
        report.passes.forward_calls += count
        report.passes.backwards += count
        report.passes.backward_calls += count
        return report

    def _middle(self, window: Window, table: Table, cotangents: "_Cotangents", report: Report) -> None:
        """Steps that are not anchors but count: served by the rollout, or a forward without grad."""
        for j in table.used():
            if j in table.anchors:
                continue
            if window.stored is not None and (self.served == "always" or (self.served == "fresh" and window.fresh)):
                v = window.stored(j)
                report.passes.served += 1
            else:
                with torch.no_grad():
                    (v,) = window.velocities([j])
                report.passes.nograd_forwards += 1
                report.passes.forward_calls += 1
            cotangents.add(j, self._cotangent(window, j, v, report))

    @staticmethod
    def _cotangent(window: Window, j: int, v: Tensor, report: Report) -> Tensor:
        """``s_j = dL_j / dv_j`` by autograd on the proxy; the network is not touched."""
        proxy = v.detach().float().requires_grad_()
        with torch.enable_grad():
            loss = window.loss(j, proxy)
            (s,) = torch.autograd.grad(loss.value, proxy)
        report.loss = report.loss.to(loss.value.device) + loss.value.detach()
        for name, value in loss.stats.items():
            report.stats[name].append(value.detach())
        return s

    def state_dict(self) -> dict[str, Tensor]:
        """The generator, for the checkpoint."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue the random rules where they were."""
        self.generator.set_state(state["generator"].cpu().to(torch.uint8))


class _Cotangents:
    """``c_a = sum_j M[a, j] s_j`` in fp32, one accumulator per anchor (Eq. 7)."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows = (table.weights_AWB != 0).any(-1).tolist()
        self._sums: list[Tensor | None] = [None] * len(table.anchors)

    def add(self, j: int, s: Tensor) -> None:
        """Distribute step j's cotangent over the anchors."""
        for i in range(len(self._sums)):
            if not self._rows[i][j]:
                continue
            weight_B = self._table.weights_AWB[i, j].to(device=s.device, dtype=s.dtype, non_blocking=True)
            term = weight_B.view(-1, *[1] * (s.dim() - 1)) * s
            old = self._sums[i]
            self._sums[i] = term if old is None else old + term

    def take(self, i: int, v: Tensor) -> Tensor:
        """Anchor i's cotangent in the network's dtype; zeros if no step reached it (collectives still run)."""
        total = self._sums[i]
        self._sums[i] = None
        return torch.zeros_like(v) if total is None else total.to(v.dtype)
