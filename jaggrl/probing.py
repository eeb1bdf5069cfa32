"""Measuring backward strategies on the real gradients of a training set-up, at fixed parameters.

Per rollout every strategy pulls back the same windows of the same samples. Compared with the exact gradient:
by window position (the paper's Table 5) and for the whole update. Compared with the exact gradients of all
*other* rollouts: how much of a strategy's mini-batch gradient is signal at all, since the policy gradient's
own noise can hide the difference between strategies.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jaggrl.backward.interpolants import Exact
from jaggrl.backward.measure import Gradients, Likeness, Sketch, alone, likeness
from jaggrl.backward.report import Passes
from jaggrl.backward.strategy import Backward
from jaggrl.errors import UserError
from jaggrl.gradient_signal import Signal, signal
from jaggrl.infra.stopwatch import Stopwatch
from jaggrl.trainer import Trainer
from jaggrl.trajectory import Batch
from jaggrl.window import Window

log = logging.getLogger(__name__)

Micro = list[Window]


@dataclass
class Measured:
    """What was seen of one strategy, one entry per rollout in every list."""

    window: int | list[int]
    positions: dict[float, list[Likeness]] = field(default_factory=dict)
    """By window position, windows at position 1.0 (the remainder, always exact) left out."""
    groups: list[tuple[int, float]] = field(default_factory=list)
    """(W, position) of every window of an update."""
    stored: bool = True
    """Whether the windows' velocities can be served by the rollout."""
    whole: list[Likeness] = field(default_factory=list)
    sketches: list[Tensor] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)
    """Of all rollouts and micro-batches."""
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)


class Probe:
    """Runs rollouts of a trainer without updating it, and pulls their windows back by every strategy."""

    def __init__(self, trainer: Trainer, strategies: Mapping[str, Backward], after_updates: int = 0) -> None:
        """
        Args:
            trainer: a built trainer; its parameters, optimizer and shadows are left as they are.
            strategies: by name; exact is measured in any case.
            after_updates: exact updates on the rollout's first parts before the next part is measured, to see
                what stale velocities do; undone afterwards.
        """
        if not 0 <= after_updates < trainer.loop.updates_per_rollout:
            raise UserError(
                f"after_updates={after_updates} leaves no part of the rollout to measure; "
                f"raise updates_per_rollout={trainer.loop.updates_per_rollout} above it"
            )
        self.trainer = trainer
        self.after_updates = after_updates
        self.exact = Backward(Exact())
        self.strategies = {"exact": self.exact} | {n: b for n, b in strategies.items() if n != "exact"}
        for name, backward in self.strategies.items():
            if backward.auto is not None:
                raise UserError(f"strategies.{name}.route=auto cannot be probed; use route=jagg_frac")
            backward.attach(trainer.policy.model.network, Stopwatch(trainer.ranks.device))
        self.measured = {name: Measured(b.window) for name, b in self.strategies.items()}
        self.sketch = Sketch(trainer.policy.parameters)
        self.micro_batches = 0

    @property
    def rollouts(self) -> int:
        """How many were measured."""
        return len(self.measured["exact"].whole)

    def run(self, rollouts: int, tick: Callable[[int], None] = lambda done: None) -> None:
        """Sample, score, credit and measure ``rollouts`` times."""
        trainer = self.trainer
        for done in range(rollouts):
            batch = trainer.algorithm.credit(trainer.score(trainer.sample()))
            parts = list(batch.split(trainer.loop.updates_per_rollout))
            saved = [p.detach().clone() for p in trainer.policy.parameters] if self.after_updates else []
            try:
                for part in parts[: self.after_updates]:
                    self._update(part)
                self._measure(parts[self.after_updates])
            finally:
                with torch.no_grad():
                    for p, old in zip(trainer.policy.parameters, saved, strict=self.after_updates > 0):
                        p.copy_(old)
                trainer.policy.version -= self.after_updates
            trainer.steps_done += 1
            tick(done + 1)
        if not any(x.ee > 0 for x in self.measured["exact"].whole):
            raise UserError(
                f"every gradient of {rollouts} rollouts vanished (rewards equal within groups): choose a reward "
                "that tells the model's pictures apart, or a larger group_size"
            )

    def _update(self, part: Batch) -> None:
        """One exact step as AdamW's first: the sign of the gradient times the learning rate."""
        trainer = self.trainer
        groups = trainer.algorithm.groups(part.trajectory, trainer.steps_done, 1, trainer.loop.seed)
        for micro in part.micro_batches(trainer.loop.micro_batch):
            for window in trainer.algorithm.windows(micro, trainer.policy, groups):
                self.exact(window)
        with torch.no_grad():
            for group in trainer.optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad.sign()
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.policy.version += 1
        self.exact.stopwatch.collect()  # these seconds are none of the measurement's

    def _measure(self, part: Batch) -> None:
        """All strategies on one part, those of one window length together."""
        by_window: dict[str, list[str]] = {}
        for name, backward in self.strategies.items():
            if name != "exact":
                by_window.setdefault(str(backward.window), []).append(name)
        exact: Gradients | None = None
        for names in by_window.values():
            micros = self._windows(part, self.strategies[names[0]].window)
            sums = self._compare(micros, names, first=exact is None)
            exact = sums["exact"] if exact is None else exact
            for name in names:  # against the exact gradient of the same cut: noise may be drawn by window
                self._whole(name, sums[name], sums["exact"])
        assert exact is not None
        self._whole("exact", exact, exact)
        self.micro_batches += len(micros)

    def _windows(self, part: Batch, window: int | list[int]) -> list[Micro]:
        """The windows of every micro-batch, in the trainer's order."""
        trainer = self.trainer
        groups = trainer.algorithm.groups(part.trajectory, trainer.steps_done, window, trainer.loop.seed)
        return [
            list(trainer.algorithm.windows(micro, trainer.policy, groups))
            for micro in part.micro_batches(trainer.loop.micro_batch)
        ]

    def _compare(self, micros: Sequence[Micro], names: Sequence[str], first: bool) -> dict[str, Gradients]:
        """Window by window, the gradient over all micro-batches by exact and by each strategy. Returns sums.

        Exact's own passes and seconds count in the ``first`` cut only.
        """
        sums: dict[str, Gradients] = {}
        for k in range(len(micros[0])):
            windows = [micro[k] for micro in micros]
            exact = self._pull("exact", windows, timed=first)
            _accumulate(sums, "exact", exact)
            for name in names:
                gradients = self._pull(name, windows, timed=True)
                _accumulate(sums, name, gradients)
                if windows[0].position < 1:
                    told = self.measured[name]
                    told.positions.setdefault(windows[0].position, []).append(likeness(gradients, exact))
        for name in (*names, *(["exact"] if first else [])):
            self.measured[name].groups = [(w.size, w.position) for w in micros[0]]
            self.measured[name].stored = micros[0][0].stored is not None
            stages = self.strategies[name].stopwatch.collect()
            self.measured[name].forward_seconds.append(stages.get("update_fwd", 0.0))
            self.measured[name].seconds.append(stages.get("update_fwd", 0.0) + stages.get("update_bwd", 0.0))
        self.exact.stopwatch.collect()
        return sums

    def _pull(self, name: str, windows: Iterable[Window], timed: bool) -> Gradients:
        """One strategy's gradient of the same window of all micro-batches."""
        backward, passes = self.strategies[name], Passes()

        def call() -> None:
            for window in windows:
                passes.add(backward(window).passes)

        _, gradients = alone(self.trainer.policy.parameters, call)
        if timed:
            self.measured[name].passes.add(passes)
        return gradients

    def _whole(self, name: str, gradients: Gradients, exact: Gradients) -> None:
        self.measured[name].whole.append(likeness(gradients, exact))
        self.measured[name].sketches.append(self.sketch(gradients))

    def signals(self) -> dict[str, Signal]:
        """Each strategy's mini-batch gradient against the exact gradients of the other rollouts."""
        device = self.trainer.ranks.device
        exact = torch.stack(self.measured["exact"].sketches).to(device)
        return {
            name: signal(torch.stack(told.sketches).to(device), exact) for name, told in self.measured.items()
        }


def _accumulate(sums: dict[str, Gradients], name: str, gradients: Gradients) -> None:
    """Add to the strategy's whole update."""
    old = sums.get(name)
    if old is None:
        sums[name] = [None if g is None else g.clone() for g in gradients]
        return
    for k, g in enumerate(gradients):
        if g is not None:
            mine = old[k]
            old[k] = g.clone() if mine is None else mine + g
