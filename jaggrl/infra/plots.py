"""Curves and stage times of one or several runs, drawn from ``metrics.jsonl`` alone; a probe's frontier."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jaggrl.infra.report import stage_seconds

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
SMOOTH_FROM = 20  # points; shorter curves are drawn as they are
PANEL = (4.6, 3.0)  # inches


def draw_curves(runs: Mapping[str, Rows], file: Path) -> None:
    """One panel per reward (rollout mean as a line, held-out mean as dots), grad norm, ratio, clip share, KL.

    Args:
        runs: label -> lines of ``metrics.jsonl``; several runs are overlaid.
        file: picture to write; panels without data are left out.
    """
    keys = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    names = [key.split("/")[1] for key in keys if key.startswith("reward/") and key.endswith("/mean")]
    panels: list[tuple[str, list[str]]] = [(name, [f"reward/{name}/mean"]) for name in names]
    panels += [(f"{name} (held out)", [f"eval/{name}"]) for name in _evaluated(keys) if name not in names]
    for title, wanted in _TRAIN_PANELS:
        found = [key for key in keys if key.startswith("train/") and wanted(key.removeprefix("train/"))]
        panels += [(title, found)] if found else []
    columns = min(3, max(1, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    figure = Figure((PANEL[0] * columns, PANEL[1] * lines + 0.4), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for axes, (title, wanted_keys) in zip(grid, panels, strict=False):
        _panel(axes, title, wanted_keys, runs)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    if len(runs) > 1 and panels:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        shown = {label: handle for handle, label in zip(handles, labels, strict=True) if label in runs}
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=min(4, len(runs)))
    figure.savefig(file, dpi=120)


_TRAIN_PANELS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("gradient norm before clipping", lambda name: name == "grad_norm"),
    ("importance ratio", lambda name: name in ("ratio", "ratio_mean")),
    ("clip share", lambda name: name.startswith("clip")),
    ("KL", lambda name: name.startswith("kl") or name.endswith("_kl")),
)


def _evaluated(keys: Mapping[str, None]) -> list[str]:
    return [key.removeprefix("eval/") for key in keys if key.startswith("eval/")]


def _panel(axes: Axes, title: str, keys: Sequence[str], runs: Mapping[str, Rows]) -> None:
    """One metric of all runs; several keys (clip share high, low) by line style."""
    for number, (label, rows) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        for style, key in zip(("-", "--", ":", "-.") * len(keys), keys, strict=False):
            x, y = _series(rows, key)
            told = label if len(keys) == 1 else key.removeprefix("train/")
            if key.startswith("eval/"):
                axes.plot(x, y, "o-", color=colour, label=told)
                continue
            smooth = len(y) >= SMOOTH_FROM
            axes.plot(x, y, style, color=colour, alpha=0.3 if smooth else 1.0, label=None if smooth else told)
            if smooth:
                axes.plot(x, _smoothed(y), style, color=colour, label=told)
        if keys[0].startswith("reward/"):
            x, y = _series(rows, f"eval/{title}")
            axes.plot(x, y, "o", color=colour, mfc="white", label="held out" if len(runs) == 1 else None)
    if title.startswith("gradient"):
        axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("rollout step", fontsize=8)
    axes.tick_params(labelsize=8, which="both")
    axes.grid(alpha=0.25)
    if len(runs) == 1 and (len(keys) > 1 or keys[0].startswith("reward/")):
        axes.legend(fontsize=7)


def _series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a key where it was logged."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return np.array([x for x, _ in points]), np.array([y for _, y in points], dtype=float)


def _smoothed(y: np.ndarray) -> np.ndarray:
    """Running mean over a tenth of the curve; at the ends over what there is."""
    width = max(3, len(y) // 10)
    kernel = np.ones(width)
    return np.convolve(y, kernel, "same") / np.convolve(np.ones_like(y), kernel, "same")


def draw_timing(runs: Mapping[str, Rows], file: Path) -> None:
    """Seconds per stage: stacked over the steps for one run, and the mean step of every run with shares.

    The first step of each run is drawn but not averaged.
    """
    means = {label: _stages(stage_seconds(rows)) for label, rows in runs.items()}
    stages = list(dict.fromkeys(stage for parts in means.values() for stage in parts))
    colours = {stage: COLOURS[i % len(COLOURS)] for i, stage in enumerate(stages)}
    alone = len(runs) == 1
    height = 3.4 if alone else 1.4 + 0.45 * len(runs)
    figure = Figure((10.5 if alone else 8.0, height), layout="constrained")
    axes = figure.subplots(1, 2 if alone else 1, squeeze=False)[0]
    if alone:
        _stack_over_steps(axes[0], next(iter(runs.values())), colours)
    _mean_step(axes[-1], means, colours)
    handles = [axes[-1].barh(0, 0, color=colour) for colour in colours.values()]
    if handles:
        figure.legend(
            handles, list(colours), loc="outside lower center", ncols=min(7, len(stages)), fontsize=8
        )
    figure.savefig(file, dpi=120)


def _stages(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean seconds by stage of a step; what no stage accounts for is ``other``."""
    outside = ("step", "eval", "save")
    parts = {name: value["per_step"] for name, value in seconds.items() if name not in outside}
    rest = seconds["step"]["per_step"] - sum(parts.values()) if "step" in seconds else 0.0
    return parts | ({"other": rest} if rest > 0 else {})


def _stack_over_steps(axes: Axes, rows: Rows, colours: Mapping[str, str]) -> None:
    timed = [row for row in rows if "time/step_s" in row]
    x = np.array([row["step"] for row in timed])
    bottom = np.zeros(len(timed))
    for stage, colour in colours.items():
        if stage == "other":
            y = np.maximum(0, np.array([row["time/step_s"] for row in timed], dtype=float) - bottom)
        else:
            y = np.array([row.get(f"time/{stage}_s") or 0.0 for row in timed], dtype=float)
        axes.bar(x, y, width=1.0, bottom=bottom, color=colour)
        bottom += y
    axes.set_xlabel("rollout step", fontsize=8)
    axes.set_ylabel("seconds", fontsize=8)
    axes.set_title("seconds per step", fontsize=10)
    axes.tick_params(labelsize=8)


def _mean_step(axes: Axes, means: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> None:
    for y, parts in enumerate(means.values()):
        left, whole = 0.0, sum(parts.values())
        for stage, seconds in parts.items():
            axes.barh(y, seconds, 0.7, left=left, color=colours[stage])
            if seconds > 0.06 * whole:
                told = f"{seconds:.3g} s\n{seconds / whole:.0%}"
                axes.text(left + seconds / 2, y, told, ha="center", va="center", fontsize=7, color="white")
            left += seconds
    axes.set_yticks(range(len(means)), list(means) if len(means) > 1 else [""])
    axes.set_ylim(len(means) - 0.4, -0.6)  # the first run on top
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_title("mean step (without the first)", fontsize=10)
    axes.tick_params(labelsize=8)


def draw_frontier(
    points: Mapping[str, tuple[float, float, float]], accept: float, updates: int, file: Path
) -> None:
    """Distance to exact (1 - cosine, upside down) against the update's speed-up.

    Args:
        points: strategy -> (speed-up over exact in forward-equivalents, cosine to exact, its deviation).
        accept: cosine of the dashed line.
        updates: per rollout, of the speed-up.
        file: picture to write.
    """
    figure = Figure((8, 5), layout="constrained")
    axis = figure.subplots()
    for i, (name, (speed, cosine, std)) in enumerate(points.items()):
        away = max(1 - cosine, 1e-6)
        marker, colour = "os^Dv<P"[i % 7], f"C{i % 10}"
        error = [[min(std, 0.9 * away)], [std]]
        axis.errorbar(speed, away, error, fmt=marker, color=colour, capsize=2, ms=5, label=name)
    axis.axhline(1 - accept, color="0.7", lw=0.8, ls="--")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.invert_yaxis()
    axis.set_xticks([1, 1.5, 2, 3, 5, 7, 10])
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(
        f"speed-up of the update over exact, forward-equivalents (updates per rollout: {updates})"
    )
    axis.set_ylabel("1 - cosine of the update to exact (better upwards)")
    axis.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=130)
