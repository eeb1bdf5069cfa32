"""From a window to parameter gradients: graph modes, routing, served velocities, and the count of passes.

A step's cotangent ``s_j = dL_j/dv_j`` is taken on a detached fp32 proxy of the raw network output; cotangents
are summed in fp32 and rounded once to the network's dtype. Graph modes, equal in fp32:

    joint        one forward per anchor, one backward call over all of them (JAGG, Algorithm 1)
    batched      all anchors in one forward of A * B samples, one backward: one gather per module under FSDP2
    sequential   one graph alive at a time (JAGG, Algorithm 2)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jaggrl.backward.cotangents import Cotangents, cotangent
from jaggrl.backward.interpolants import Exact, Interpolant, Table
from jaggrl.backward.kriging import jacobian_kernel
from jaggrl.backward.measure import alone, deposit, likeness
from jaggrl.backward.report import Passes, Report
from jaggrl.backward.routing import BACKWARD_UNITS, Auto
from jaggrl.backward.serving import SERVED, corrected_velocity, source, stored_velocity
from jaggrl.backward.sharded import kept_gathered, units
from jaggrl.errors import UserError
from jaggrl.infra.distributed import rank
from jaggrl.infra.stopwatch import Stopwatch
from jaggrl.window import Window

GRAPHS = ("auto", "joint", "batched", "sequential")
ROUTES = ("jagg_frac", "auto")


class Backward:
    """A backward strategy: which rule interpolates, how graphs are kept, and which windows it takes."""

    def __init__(
        self,
        interpolant: Interpolant,
        window: int | list[int] = 4,
        graph: str = "auto",
        jagg_frac: float = 1.0,
        served: str = "fresh",
        route: str = "jagg_frac",
        auto: Auto | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            interpolant: rule for the routed windows; the others are pulled back exactly.
            window: W, or a list of sizes.
            graph: ``joint``, ``batched``, ``sequential``, or ``auto``: batched when sharded, else joint.
            jagg_frac: windows with ``position < jagg_frac`` are interpolated (the noisiest first; ceil of the
                count).
            served: middle velocities from the rollout: ``off``, ``fresh`` (while the parameters are the
                rollout's), ``corrected`` (after an update moved by what the anchors moved) or ``always``
                (stale).
            route: ``jagg_frac``, or ``auto``: cosines measured while training decide by window position.
            auto: how ``route=auto`` measures and decides.
            seed: of the generator that random rules draw from, the same on all ranks.
        """
        if graph not in GRAPHS:
            raise UserError(f"backward.graph={graph} is unknown; use {', '.join(GRAPHS)}")
        if served not in SERVED:
            raise UserError(f"backward.served={served} is unknown; use {', '.join(SERVED)}")
        if route not in ROUTES:
            raise UserError(f"backward.route={route} is unknown; use {' or '.join(ROUTES)}")
        if not 0 <= jagg_frac <= 1:
            raise UserError(f"backward.jagg_frac={jagg_frac} is outside [0, 1]; the paper uses 0.6")
        self.interpolant = interpolant
        self.window: int | list[int] = window
        self.graph = graph
        self.jagg_frac = jagg_frac
        self.served = served
        self.auto = (auto or Auto()) if route == "auto" else None
        if self.auto is not None:
            self.window = self.auto.window or window
        self.generator = torch.Generator().manual_seed(seed)
        self._seed, self._learned = seed, 0
        self.stopwatch = Stopwatch(torch.device("cpu"))
        self._joint_call: Callable[[], AbstractContextManager[None]] = nullcontext
        self._sharded = False
        self._parameters: list[Tensor] = []

    def attach(self, network: nn.Module, stopwatch: Stopwatch) -> None:
        """Learn from the trainer what graphs run through (is it sharded?) and where seconds are counted."""
        self.stopwatch = stopwatch
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._sharded = bool(units(network))
        self._joint_call = (lambda: kept_gathered(network)) if self._sharded else nullcontext

    @property
    def by_time(self) -> bool:
        """Whether windows must be consecutive steps in falling t (else they may be permuted per sample)."""
        return self.interpolant.by_time

    def begin(self) -> None:
        """The updates of a rollout begin; under ``route=auto`` the window length may change here."""
        if self.auto is not None:
            self.auto.begin()
            self.window = self.auto.window or self.window

    def can_interpolate(self, position: float, size: int) -> bool:
        """Whether the rule applies: not to the remainder, nor to windows no longer than its anchors."""
        return (
            not isinstance(self.interpolant, Exact)
            and position < 1
            and size > max(self.interpolant.anchor_count, 1)
        )

    def routed(self, position: float, size: int) -> bool:
        """Whether a window is interpolated: by schedule or by all-reduced cosines, alike on all ranks."""
        if not self.can_interpolate(position, size):
            return False
        return self.auto.routed(position) if self.auto is not None else position < self.jagg_frac

    def __call__(self, window: Window) -> Report:
        """Add the window's gradient to the parameters' ``.grad``."""
        possible = self.can_interpolate(window.position, window.size)
        learned = self._learn(window) if possible and self.interpolant.asks(window.t_WB) else None
        if self.auto is not None and possible and self.auto.wants(window.position):
            return self._measured(window, self.auto)
        report = self.pull(window, self.routed(window.position, window.size))
        if learned is not None:
            report.passes.add(learned)
        if self.auto is not None:
            self.auto.account(window.position, report.passes.units(BACKWARD_UNITS))
        return report

    def _learn(self, window: Window) -> Passes:
        """Let the rule see how the window's Jacobians are related; one exact pull's worth of passes."""
        if not self._parameters:
            raise RuntimeError(
                "a rule that learns looks at gradients: attach(network, stopwatch) comes first"
            )
        self._learned += 1
        noise = torch.Generator().manual_seed(hash((self._seed, self._learned, rank())) & (2**63 - 1))
        with self.stopwatch("probe"):
            self.interpolant.learn(window.t_WB, *jacobian_kernel(window, self._parameters, noise))
        return _one_by_one(window.size)

    def _measured(self, window: Window, auto: Auto) -> Report:
        """Pull back both ways, compare, keep the routed one; its passes and seconds count the other's too."""
        ways = [alone(self._parameters, partial(self.pull, window, way)) for way in (True, False)]
        auto.observe(window.position, likeness(ways[0][1], ways[1][1]))
        taken = 0 if self.routed(window.position, window.size) else 1
        report, gradients = ways[taken]
        deposit(self._parameters, gradients)
        other = ways[1 - taken][0].passes
        worked = report.passes.units(BACKWARD_UNITS)
        auto.account(window.position, worked, other.units(BACKWARD_UNITS))
        report.passes.add(other)
        report.passes.windows = 1
        return report

    def pull(self, window: Window, interpolated: bool) -> Report:
        """Add the window's gradient, interpolated or exact; times that do not fall fall back to exact."""
        if not interpolated or (self.by_time and not _falling(window.t_WB)):
            return self._sequential(window, Exact().table(window.t_WB, self.generator))
        table = self.interpolant.table(window.t_WB, self.generator)
        if self.graph == "sequential":
            return self._sequential(window, table)
        return self._together(window, table)

    @property
    def batched(self) -> bool:
        """Whether all anchors share one forward."""
        return self.graph == "batched" or (self.graph == "auto" and self._sharded)

    def _together(self, window: Window, table: Table) -> Report:
        """Joint and batched: all anchors' graphs alive, one backward call."""
        report, cotangents = Report(), Cotangents(table)
        with self.stopwatch("update_fwd"):
            outputs = self._forward(window, table.anchors, report)
            report.passes.grad_forwards += len(outputs)
            for a, v in zip(table.anchors, outputs, strict=True):
                cotangents.add(a, self._cotangent(window, a, v, report), table.weights_AWB[:, a])
            self._middle(window, table, [v.detach() for v in outputs], cotangents, report)
        together = nullcontext() if self.batched else self._joint_call()
        with self.stopwatch("update_bwd"), together:
            torch.autograd.backward(outputs, [cotangents.take(i, v) for i, v in enumerate(outputs)])
        report.passes.add(Passes(windows=1, backwards=len(outputs), backward_calls=1))
        return report

    def _sequential(self, window: Window, table: Table) -> Report:
        """Middle steps first, then one anchor at a time: forward, complete its cotangent, pull back, free."""
        report, cotangents = Report(passes=Passes(windows=1)), Cotangents(table)
        with self.stopwatch("update_fwd"):
            self._middle(window, table, self._anchors_ahead(window, table, report), cotangents, report)
        for i, a in enumerate(table.anchors):
            with self.stopwatch("update_fwd"):
                (v,) = window.velocities([a])
                cotangents.add(a, self._cotangent(window, a, v, report), table.weights_AWB[:, a])
            with self.stopwatch("update_bwd"):
                torch.autograd.backward(v, cotangents.take(i, v))
        report.passes.add(_one_by_one(len(table.anchors)))
        return report

    def _forward(self, window: Window, js: Sequence[int], report: Report) -> list[Tensor]:
        """Raw outputs of several steps: one call when batched, else one call each."""
        calls = [list(js)] if self.batched else [[j] for j in js]
        report.passes.forward_calls += len(calls)
        return [v for call in calls for v in window.velocities(call)]

    def _anchors_ahead(self, window: Window, table: Table, report: Report) -> list[Tensor]:
        """The anchors' velocities before their graphs, for the sequential mode, if a middle step asks."""
        where = source(self.served, window)
        if not table.between() or not (self.interpolant.by_velocity or where == "corrected"):
            return []
        if where == "stored":
            return [stored_velocity(window, a) for a in table.anchors]
        with torch.no_grad():
            ahead = self._forward(window, table.anchors, report)
        report.passes.nograd_forwards += len(ahead)
        return ahead

    def _middle(
        self, window: Window, table: Table, v_A: Sequence[Tensor], cotangents: Cotangents, report: Report
    ) -> None:
        """Steps that are not anchors but count, in one forward never more than there are anchors."""
        between, where = table.between(), source(self.served, window)
        size = len(table.anchors) if self.batched else 1
        for start in range(0, len(between), size):
            js = between[start : start + size]
            if where == "forward":
                with torch.no_grad():
                    vs = self._forward(window, js, report)
                report.passes.nograd_forwards += len(js)
            else:
                vs = [
                    corrected_velocity(window, table, j, v_A)
                    if where == "corrected"
                    else stored_velocity(window, j)
                    for j in js
                ]
                report.passes.served += len(js)
            for j, v in zip(js, vs, strict=True):
                weights_AB = self.interpolant.weights(table, j, v, v_A)
                cotangents.add(j, self._cotangent(window, j, v, report), weights_AB)

    @staticmethod
    def _cotangent(window: Window, j: int, v: Tensor, report: Report) -> Tensor:
        """``s_j``, and its loss and statistics into the report."""
        s, loss = cotangent(window, j, v)
        report.loss = report.loss.to(s.device) + loss.value.detach()
        for name, value in loss.stats.items():
            report.stats[name].append(value.detach())
        return s

    def state_dict(self) -> dict[str, Any]:
        """The generators and what was learned or measured, for the checkpoint."""
        state: dict[str, Any] = {
            "generator": self.generator.get_state(),
            "learned": self._learned,
            "interpolant": self.interpolant.state_dict(),
        }
        return state if self.auto is None else state | {"auto": self.auto.state_dict()}

    def metrics(self) -> dict[str, float]:
        """What ``route=auto`` wants to log."""
        return {} if self.auto is None else self.auto.metrics()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the random rules and the routing where they were."""
        self.generator.set_state(state["generator"].cpu().to(torch.uint8))
        self._learned = int(state["learned"])
        self.interpolant.load_state_dict(state["interpolant"])
        if self.auto is not None:
            self.auto.load_state_dict(state["auto"])
            self.window = self.auto.window or self.window


def _one_by_one(count: int) -> Passes:
    """Passes of ``count`` steps, each with its own forward and backward call."""
    return Passes(grad_forwards=count, backwards=count, forward_calls=count, backward_calls=count)


def _falling(t_WB: Tensor) -> bool:
    return bool((t_WB[:-1] > t_WB[1:]).all())
