"""Routing by measured cosines while training: which window positions may be interpolated, and how long
windows may be.

At first every window position is measured once, on one micro-batch: its gradient by the rule and exactly.
Later a budget decides: ``overhead`` of the network passes spent so far buys the measurement that is longest
due. All numbers come from all-reduced inner products and from pass counts, so that every rank decides alike.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jaggrl.backward.measure import Likeness
from jaggrl.errors import UserError

BINS = 64  # window positions are told apart to 1/64
COUNT, COSINE, GE, GG, EE, ROUTED, POSITION, EXTRA, MET = range(9)
BACKWARD_UNITS = 2.0  # price of a backward in forwards when budget and cost are compared


class Auto:
    """The running probe: cosines by window position (and length), and what follows from them."""

    def __init__(
        self,
        threshold: float = 0.5,
        hysteresis: float = 0.05,
        overhead: float = 0.05,
        memory: float = 0.7,
        windows: Sequence[int] | None = None,
        climb: float = 0.9,
    ) -> None:
        """
        Args:
            threshold: interpolate positions whose cosine reaches it (the paper's rule: 0.5).
            hysteresis: a routed position falls back to exact only this far below the threshold, and the
                reverse.
            overhead: largest share of the update's passes that measuring may take, after the first look.
            memory: weight of the past in the running mean of each position.
            windows: window lengths to try in this order, for instance [4, 10, 20]; null keeps
                ``backward.window``.
            climb: cosine of the whole update that the present length must reach before the next one is tried;
                a length that falls below it is left for good.
        """
        if not -1 < threshold < 1:
            raise UserError(f"backward.auto.threshold={threshold} is outside (-1, 1); the paper uses 0.5")
        if not 0 < overhead <= 1:
            raise UserError(f"backward.auto.overhead={overhead} is outside (0, 1]; 0.05 is 5 % of the update")
        if not 0 <= memory < 1:
            raise UserError(f"backward.auto.memory={memory} is outside [0, 1)")
        if windows is not None and (not windows or sorted(set(windows)) != list(windows) or windows[0] < 2):
            raise UserError(f"backward.auto.windows={windows} must be growing lengths of at least 2, or null")
        self.threshold, self.hysteresis, self.overhead, self.memory = threshold, hysteresis, overhead, memory
        self.windows = list(windows) if windows is not None else None
        self.climb = climb
        rungs = len(self.windows) if self.windows else 1
        self._stats = torch.zeros(rungs, BINS, 9, dtype=torch.float64)
        self._rung, self._ceiling = 0, rungs - 1
        self._worked, self._spent = 0.0, 0.0
        self._due: dict[int, int] = {}

    @property
    def window(self) -> int | None:
        """The present window length; None keeps the strategy's own."""
        return self.windows[self._rung] if self.windows else None

    def begin(self) -> None:
        """A rollout's updates begin: climb or fall back, then spend the budget on what is longest due."""
        self._move()
        self._due = {}
        budget = self.overhead * self._worked - self._spent
        rows = self._stats[self._rung]
        for b in sorted(range(BINS), key=lambda b: (float(rows[b, COUNT]), b)):
            budget -= float(rows[b, EXTRA])
            if budget < 0:
                break
            if rows[b, COUNT] > 0:  # another micro-batch (and age of the rollout) each time
                self._due[b] = int(rows[b, COUNT]) % max(1, int(rows[b, MET]))
        rows[:, MET] = 0

    def wants(self, position: float) -> bool:
        """Whether this window is to be measured; called once per window."""
        b = _bin(position)
        row = self._stats[self._rung, b]
        turn = int(row[MET])
        row[MET] += 1
        if row[COUNT] == 0:
            return True
        if self._due.get(b, -1) != turn:
            return False
        del self._due[b]
        return True

    def routed(self, position: float) -> bool:
        """Whether a position is interpolated."""
        return bool(self._stats[self._rung, _bin(position), ROUTED])

    def observe(self, position: float, seen: Likeness) -> None:
        """Take in a measurement; a vanished gradient (all steps clipped) says nothing and keeps the route."""
        row = self._stats[self._rung, _bin(position)]
        first = row[COUNT] == 0
        row[COUNT] += 1
        row[POSITION] = position
        if math.isnan(seen.cosine):
            return
        keep = 0.0 if first or row[EE] == 0 else self.memory
        new = torch.tensor([seen.cosine, seen.ge, seen.gg, seen.ee], dtype=torch.float64)
        row[COSINE : EE + 1] = keep * row[COSINE : EE + 1] + (1 - keep) * new
        margin = 0.0 if keep == 0 else (-self.hysteresis if row[ROUTED] else self.hysteresis)
        row[ROUTED] = float(row[COSINE] >= self.threshold + margin)

    def account(self, position: float, worked: float, extra: float = 0.0) -> None:
        """Passes that an update took, and of a measurement what it took beyond that."""
        self._worked += worked
        self._spent += extra
        if extra:
            self._stats[self._rung, _bin(position), EXTRA] = extra

    def whole(self, rung: int | None = None) -> Likeness:
        """The update's likeness as routed: window gradients taken as orthogonal, exact positions as exact."""
        rows = self._stats[self._rung if rung is None else rung]
        rows = rows[rows[:, EE] > 0]
        routed = rows[:, ROUTED] > 0
        ge = torch.where(routed, rows[:, GE], rows[:, EE]).sum()
        gg = torch.where(routed, rows[:, GG], rows[:, EE]).sum()
        return Likeness(float(ge), float(gg), float(rows[:, EE].sum()))

    def _move(self) -> None:
        """One rung up when the present length is good enough, down for good when it is not (or too long to be cut)."""
        rows = self._stats[self._rung]
        seen = rows[rows[:, COUNT] > 0]
        if not len(seen):
            if self._rung > 0:
                self._rung -= 1
                self._ceiling = self._rung
            return
        cosine = self.whole().cosine
        if self._rung > 0 and cosine < self.climb - self.hysteresis:
            self._rung -= 1
            self._ceiling = self._rung
        elif self._rung < self._ceiling and cosine >= self.climb and float(seen[:, COUNT].min()) >= 2:
            self._rung += 1

    def metrics(self) -> dict[str, float]:
        """Cosine, norm ratio and route by position; the whole update's cosine; the share spent on it."""
        told: dict[str, float] = {}
        for row in self._stats[self._rung]:
            if row[EE] > 0:
                name = f"{float(row[POSITION]):.2f}"
                told[f"backward/cos/{name}"] = float(row[COSINE])
                told[f"backward/norm/{name}"] = math.sqrt(float(row[GG] / row[EE]))
                told[f"backward/routed/{name}"] = float(row[ROUTED])
        if told:
            told["backward/cos"] = self.whole().cosine
        told["backward/probe_share"] = self._spent / max(1.0, self._worked)
        if self.windows:
            told["backward/window"] = float(self.windows[self._rung])
        return told

    def state_dict(self) -> dict[str, Tensor]:
        """Of fixed shape, so that a checkpoint loads into it."""
        scalars = [self._rung, self._ceiling, self._worked, self._spent]
        return {"stats": self._stats.clone(), "scalars": torch.tensor(scalars, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue where ``state_dict`` was taken."""
        self._stats = state["stats"].cpu().double()
        rung, ceiling, self._worked, self._spent = state["scalars"].tolist()
        self._rung, self._ceiling = int(rung), int(ceiling)


def _bin(position: float) -> int:
    return min(BINS - 1, int(position * BINS + 1e-9))
