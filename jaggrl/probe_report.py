"""What a probe tells: the paper's Table 5 with ours beside it, cost against quality, a plot, presets for training."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaggrl.backward.cost import Prediction, backward_units, predict
from jaggrl.backward.interpolants import Linear
from jaggrl.infra.files import write_atomic, write_json
from jaggrl.infra.logging import plain
from jaggrl.infra.plots import draw_frontier
from jaggrl.probe_verdicts import verdicts
from jaggrl.probing import Measured, Probe

# JAGG, Table 5: cosine (spread) and norm ratio (spread) by group, 20 steps, W = 4.
PAPER = {
    "paper, FLUX": ((0.85, 0.06, 0.96), (0.77, 0.18, 1.03), (0.74, 0.04, 1.08), (0.63, 0.13, 1.22), (0.41, 0.14, 1.56)),
    "paper, Qwen": ((0.79, 0.09, 1.15), (0.64, 0.19, 1.05), (0.58, 0.26, 1.19), (0.45, 0.12, 1.79), (0.22, 0.28, 4.35)),
}  # fmt: skip
UPDATES = (1, 2, 8)
THRESHOLD = 0.5  # the paper's rule for a window position
ACCEPT = 0.9  # of the whole update, for the frontier preset


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation over rollouts, those without a gradient left out."""

    mean: float
    std: float

    @staticmethod
    def of(values: Sequence[float]) -> "Moments":
        """nan of nothing; spread 0 of one."""
        good = [v for v in values if math.isfinite(v)]
        if not good:
            return Moments(math.nan, math.nan)
        return Moments(statistics.fmean(good), statistics.stdev(good) if len(good) > 1 else 0.0)


class ProbeReport:
    """Tables, plot and presets of a finished probe."""

    def __init__(self, probe: Probe, nodes: Mapping[str, dict[str, Any]], setting: Mapping[str, Any]) -> None:
        """
        Args:
            probe: after ``run``.
            nodes: the strategies' config nodes, for the presets.
            setting: what was probed, told in the header and stored.
        """
        self.probe, self.nodes, self.setting = probe, nodes, setting
        self.signals = probe.signals()
        loop = probe.trainer.loop
        self.updates = loop.updates_per_rollout
        self.steps = probe.trainer.rollout.sampler.schedule(probe.trainer.policy.model.sigmas).steps

    def cost(self, name: str, updates: int) -> Prediction:
        """Expected passes per sample of one rollout's updates."""
        policy, algorithm = self.probe.trainer.policy, self.probe.trainer.algorithm
        told, cache = self.probe.measured[name], self.probe.trainer.rollout.sampler.cache
        lora = policy.lora is not None
        return predict(
            self.probe.strategies[name],
            told.groups,
            updates,
            policy.backward_cost > backward_units(lora, checkpointing=False),
            lora,
            len({algorithm.behaviour, *algorithm.needs} - {"current"}),
            sum(policy.forward_shares(cache, self.steps)),
            told.stored,
            cache is None,
        )

    def cosine(self, name: str) -> Moments:
        """Of the whole update, to exact."""
        return Moments.of([x.cosine for x in self.probe.measured[name].whole])

    def efficiency(self, name: str, updates: int) -> tuple[float, float, float]:
        """Signal-to-noise per unit of compute (rollout included) over that of exact, with a 90 % interval."""

        def value(mine: float, exact: float) -> float:
            ours, theirs = self.cost(name, updates), self.cost("exact", updates)
            return mine / (ours.units + ours.rollout_units) / (exact / (theirs.units + theirs.rollout_units))

        mine, exact = self.signals[name], self.signals["exact"]
        whole = value(mine.snr, exact.snr)
        left_out = [value(m, e) for m, e in zip(mine.jackknife, exact.jackknife, strict=True)]
        n = len(left_out)
        if n < 3 or not all(map(math.isfinite, left_out)):
            return whole, math.nan, math.nan
        centre = statistics.fmean(left_out)
        error = math.sqrt((n - 1) / n * sum((v - centre) ** 2 for v in left_out))
        return whole, whole - 1.645 * error, whole + 1.645 * error

    def table_5(self) -> str:
        """Cosine ± spread | norm ratio by window position, strategies of one window length together."""
        lines = []
        by_window: dict[str, list[str]] = {}
        for name, told in self.probe.measured.items():
            if told.positions:
                by_window.setdefault(str(told.window), []).append(name)
        for window, names in by_window.items():
            positions = sorted(self.probe.measured[names[0]].positions)
            head = [f"group {i}" + (" (high noise)" if i == 0 else "") for i in range(len(positions))]
            lines.append(f"W={'all' if window == '0' else window}: cosine to exact ± spread | norm ratio")
            lines.append(
                f"{'':20}" + "".join(f"{h:>22}" for h in head) + f"{'whole update':>16}{'independent':>13}"
            )
            if window == "4" and len(positions) == 5:
                for paper, cells in PAPER.items():
                    lines.append(f"{paper:20}" + "".join(f"{_cell(c, s, r):>22}" for c, s, r in cells))
            lines += [self._row(name, positions) for name in names]
            lines.append("")
        return "\n".join(lines)

    def _row(self, name: str, positions: Sequence[float]) -> str:
        told = self.probe.measured[name]
        cells = []
        for p in positions:
            cosine = Moments.of([x.cosine for x in told.positions[p]])
            cells.append(
                _cell(cosine.mean, cosine.std, Moments.of([x.ratio for x in told.positions[p]]).mean)
            )
        whole = self.cosine(name)
        return (
            f"{name:20}"
            + "".join(f"{c:>22}" for c in cells)
            + f"{f'{whole.mean:.3f}±{whole.std:.3f}':>16}{independent(self.probe, name):>13.3f}"
        )

    def table_cost(self) -> str:
        """Cost at 1, 2 and 8 updates per rollout, seconds, quality and signal per unit of compute."""
        lines = [
            "update cost per sample in forward-equivalents (speed-up over exact) at 1, 2, 8 updates per rollout;",
            "seconds of the update as measured; signal: cosine of the mini-batch gradient to the exact gradient of",
            "many rollouts; per compute: its signal-to-noise per unit of rollout and update, exact = 1 (90 % interval)",
            f"{'':20}{'W':>9}"
            + "".join(f"{f'u={u}':>15}" for u in UPDATES)
            + f"{'seconds':>9}{'cos':>7}{'signal':>8}{'per compute':>22}",
        ]
        for name, told in self.probe.measured.items():
            cells = []
            for u in UPDATES:
                cost = self.cost(name, u)
                cells.append(f"{cost.units:.4g} ({cost.exact_units / cost.units:.2f}x)")
            value, low, high = self.efficiency(name, self.updates)
            lines.append(
                f"{name:20}{'all' if told.window == 0 else str(told.window):>9}"
                + "".join(f"{c:>15}" for c in cells)
                + f"{statistics.median(told.seconds):>9.2f}{self.cosine(name).mean:>7.3f}"
                + f"{self.signals[name].cosine:>8.3f}{f'{value:.2f} ({low:.2f} to {high:.2f})':>22}"
            )
        if not all(math.isfinite(self.signals[name].snr) for name in self.probe.measured):
            lines.append(
                "nan: the gradients' own noise hides the signal; take more rollouts or a larger group_size"
            )
        return "\n".join(lines) + "\n"

    def jagg_frac(self, name: str) -> float:
        """The paper's rule: the share of leading positions whose mean cosine reaches 0.5."""
        positions = self.probe.measured[name].positions
        good = 0
        for p in sorted(positions):
            if not Moments.of([x.cosine for x in positions[p]]).mean >= THRESHOLD:
                break
            good += 1
        return good / max(1, len(positions))

    def frontier(self) -> str:
        """The cheapest strategy whose whole update keeps a cosine of 0.9; exact if there is none."""
        good = [n for n in self.probe.strategies if n == "exact" or self.cosine(n).mean >= ACCEPT]
        return min(good, key=lambda n: self.cost(n, self.updates).units)

    def verdicts(self) -> list[str]:
        """Does JAGG beat its equals in cost, and does another strategy dominate it?"""
        strategies, measured = self.probe.strategies, self.probe.measured

        def same_rule(a: str, b: str) -> bool:
            size = measured[a].groups[0][0]
            counts = [strategies[n].interpolant.counts(size)[0] for n in (a, b)]
            return measured[a].groups == measured[b].groups and counts[0] == counts[1]

        return verdicts(
            {name: [x.cosine for x in told.whole] for name, told in measured.items()},
            {name: self.cost(name, self.updates).units for name in strategies},
            [name for name, b in strategies.items() if type(b.interpolant) is Linear],
            same_rule,
        )

    def write(self, folder: Path, recommend: str) -> str:
        """probe.json, probe.txt, probe.png and the presets backward/{probed,frontier}.yaml. Returns the text."""
        fraction, best = self.jagg_frac(recommend), self.frontier()
        cost = self.cost(best, self.updates)
        text = "\n".join(
            [
                "; ".join(f"{k} {v}" for k, v in self.setting.items()),
                "",
                self.table_5(),
                self.table_cost(),
                *self.verdicts(),
                "",
                f"recommended: {recommend} with jagg_frac={fraction:g} (leading positions with mean cosine >= "
                f"{THRESHOLD}; the paper's rule gives FLUX 0.8, and it chose 0.6)",
                f"frontier: {best} is the cheapest with cosine >= {ACCEPT} of the whole update: "
                f"{cost.exact_units / cost.units:.2f}x at {self.updates} updates per rollout",
                f"train with them: --config-dir {folder} backward=probed (or backward=frontier)",
            ]
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "backward").mkdir(exist_ok=True)
        write_atomic(folder / "probe.txt", text + "\n")
        write_json(folder / "probe.json", self.as_dict())
        self.plot(folder / "probe.png")
        told = f"# Written by a probe of {self.setting.get('model', 'this model')}: "
        self._preset(
            folder / "backward/probed.yaml",
            recommend,
            {"jagg_frac": fraction},
            told + "cosine >= 0.5 routes.\n",
        )
        self._preset(folder / "backward/frontier.yaml", best, {}, told + "cheapest at cosine >= 0.9.\n")
        return text

    def _preset(self, file: Path, name: str, changes: Mapping[str, Any], head: str) -> None:
        node = self.nodes.get(name, {"_target_": "jaggrl.backward.strategy.Backward"})
        if name == "exact" and "interpolant" not in node:
            node = {**node, "interpolant": {"_target_": "jaggrl.backward.interpolants.Exact"}}
        write_atomic(file, head + yaml.safe_dump({**node, **changes, "seed": "${seed}"}, sort_keys=False))

    def as_dict(self) -> dict[str, Any]:
        """Every number behind the tables."""
        return {
            "setting": dict(self.setting),
            "rollouts": self.probe.rollouts,
            "paper": PAPER,
            "verdicts": self.verdicts(),
            "strategies": {name: self._numbers(name, told) for name, told in self.probe.measured.items()},
        }

    def _numbers(self, name: str, told: Measured) -> dict[str, Any]:
        value, low, high = self.efficiency(name, self.updates)
        samples = self.probe.rollouts * self.probe.micro_batches / max(1, self.probe.rollouts)
        return {
            "window": told.window,
            "positions": {
                f"{p:.3f}": {"cos": [plain(x.cosine) for x in seen], "ratio": [plain(x.ratio) for x in seen]}
                for p, seen in told.positions.items()
            },
            "whole": {
                "cos": [plain(x.cosine) for x in told.whole],
                "ratio": [plain(x.ratio) for x in told.whole],
            },
            "independent": independent(self.probe, name),
            "units": {str(u): self.cost(name, u).units for u in UPDATES},
            "speedup": {str(u): self.cost(name, u).exact_units / self.cost(name, u).units for u in UPDATES},
            "passes_per_micro_batch": {k: v / samples for k, v in told.passes.as_dict().items()},
            "seconds": told.seconds,
            "forward_seconds": told.forward_seconds,
            "signal": {
                "cos": plain(self.signals[name].cosine),
                "snr": plain(self.signals[name].snr),
                "per_compute": [plain(value), plain(low), plain(high)],
            },
        }

    def plot(self, file: Path) -> None:
        """Distance to exact against the update's speed-up."""
        points = {}
        for name in (n for n in self.probe.strategies if n != "exact"):
            cost, cosine = self.cost(name, self.updates), self.cosine(name)
            points[name] = (cost.exact_units / cost.units, cosine.mean, cosine.std)
        draw_frontier(points, ACCEPT, self.updates, file)


def independent(probe: Probe, name: str) -> float:
    """``sqrt(k / W)``: the cosine that k of W independent equal-norm steps have to their sum; mean over windows."""
    groups, rule = probe.measured[name].groups, probe.strategies[name].interpolant
    values = [math.sqrt(min(1.0, rule.counts(size)[0] / size)) for size, position in groups if position < 1]
    return statistics.fmean(values) if values else 1.0


def _cell(cosine: float, spread: float, ratio: float) -> str:
    return f"{cosine:.2f}±{spread:.2f} | {ratio:.2f}"
