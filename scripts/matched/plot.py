"""Pictures of the comparison at equal compute: curves, gains and paired differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaggrl.infra.plots import COLOURS
from scripts.claims.verdicts import smooth


def plot(
    runs: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    trained: str,
    file: Path,
) -> None:
    """Rollout reward against forward-equivalents and seconds (mean over seeds); gains, differences."""
    from matplotlib.figure import Figure

    figure = Figure((12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    colours = {row["arm"]: colour for row, colour in zip(rows, COLOURS, strict=False)}
    for axis, key, label in zip(
        axes[0], ("cost", "seconds"), ("forward-equivalents", "seconds"), strict=True
    ):
        _curves(axis, runs, colours, titles, key)
        axis.set_xlabel(label)
        axis.set_ylabel(f"{trained} of the rollouts, running mean")
    axes[0][0].legend(fontsize=8)
    gains = [(titles[row["arm"]], row["gain"][trained], colours[row["arm"]]) for row in rows]
    _forest(axes[1][0], gains, f"gain of {trained} (95 % over seeds)")
    told = [
        (f"{titles[p['one']]}\nless {titles[p['other']]}", p["difference"], colours.get(p["one"], "0.2"))
        for p in pairs
    ]
    _forest(axes[1][1], told, f"difference of the gain of {trained}, paired by seed (95 %)")
    figure.savefig(file, dpi=110)


def _curves(
    axis: Any,
    runs: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
    titles: Mapping[str, str],
    key: str,
) -> None:
    """One line per arm, the mean over its seeds."""
    for arm, colour in colours.items():
        mine = [r for r in runs if r["arm"] == arm]
        length = min(len(r["curve"]) for r in mine)
        x = np.mean([r[key][:length] for r in mine], axis=0)
        y = np.mean([smooth(r["curve"][:length]) for r in mine], axis=0)
        axis.plot(x, y, color=colour, label=titles[arm])
    axis.grid(alpha=0.3)


def _forest(axis: Any, lines: Sequence[tuple[str, tuple[float, float | None], str]], label: str) -> None:
    """Estimates with their half-intervals, one under the other."""
    for place, (_, (mean, half), colour) in enumerate(lines):
        axis.errorbar(mean, -place, xerr=half or 0, fmt="o", color=colour, capsize=3)
    axis.set_yticks([-place for place in range(len(lines))], [title for title, _, _ in lines], fontsize=8)
    axis.axvline(0, color="0.6", lw=0.8)
    axis.locator_params(axis="x", nbins=5)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)
