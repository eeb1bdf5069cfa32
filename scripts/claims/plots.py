"""The claims' curves: one panel per arm, and the presets' rewards against compute."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaggrl.infra.plots import COLOURS
from scripts.claims.verdicts import smooth

PANEL = (3.6, 2.6)  # inches
COLUMNS = 3


def draw(curves: Sequence[Mapping[str, Any]], presets: Sequence[str], file: Path) -> None:
    """Rewards as the verdicts see them, smoothed (raw: faint).

    Args:
        curves: of arms (reward less the untrained model's, against rollouts) and presets (reward against cost).
        presets: which of them are presets.
        file: picture to write.
    """
    arms = list(dict.fromkeys(c["arm"] for c in curves if c["arm"] not in presets))
    count = len(arms) + any(c["arm"] in presets for c in curves)
    lines = -(-count // COLUMNS)
    figure = Figure((PANEL[0] * COLUMNS, PANEL[1] * lines), layout="constrained")
    axes = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
    for axis, arm in zip(axes, arms, strict=False):
        for curve, colour in zip((c for c in curves if c["arm"] == arm), COLOURS, strict=False):
            axis.plot(curve["rewards"], color=colour, alpha=0.3)
            axis.plot(smooth(curve["rewards"]), color=colour, label=f"seed {curve['seed']}")
        axis.axhline(0, color="0.7", lw=0.8)
        axis.set_title(arm, fontsize=9)
        axis.set_xlabel("rollouts", fontsize=8)
        axis.set_ylabel("reward - untrained", fontsize=8)
    for preset, colour in zip(presets, COLOURS, strict=False):
        for i, curve in enumerate(c for c in curves if c["arm"] == preset):
            axes[len(arms)].plot(
                curve["cost"], smooth(curve["rewards"]), color=colour, label=None if i else preset
            )
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes[:count]:
        axis.grid(alpha=0.3)
    if count > len(arms):
        axes[len(arms)].set_title("presets", fontsize=9)
        axes[len(arms)].set_xlabel("forward-equivalents", fontsize=8)
        axes[len(arms)].legend(fontsize=6)
    figure.savefig(file, dpi=110)
