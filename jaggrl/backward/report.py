"""What a strategy says of its work: loss, statistics, and the count of network passes."""

from collections import defaultdict
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass
class Passes:
    """Network passes over one micro-batch, one step's forward or backward each (a batched call counts A)."""

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

    def units(self, backward: float) -> float:
        """Forward-equivalents, with ``backward`` forwards per backward (``cost.backward_units``)."""
        return self.grad_forwards + self.nograd_forwards + backward * self.backwards


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
        """Each statistic over all steps: the largest for names in ``_max``, else the mean; on the device."""
        reduced = {}
        for name, values in self.stats.items():
            stacked = torch.stack(values).float()
            reduced[name] = stacked.max() if name.endswith("_max") else stacked.mean()
        return reduced
