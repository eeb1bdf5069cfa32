"""What the benchmark tells: a table per variant and one plot."""

from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]

BARS = {"speedup_model": "cost model", "speedup_flops": "FLOPs", "speedup_clock": "clock"}
COLUMNS = (  # key, title, width, digits, scale
    ("speedup_model", "model", 7, 2, 1),
    ("speedup_flops", "FLOPs", 7, 2, 1),
    ("speedup_clock", "clock", 7, 2, 1),
    ("update_s", "update s", 10, 3, 1),
    ("forward_s", "fwd s", 8, 3, 1),
    ("backward_s", "bwd s", 8, 3, 1),
    ("saved_bytes", "saved GB", 10, 3, 1e9),
    ("peak_bytes", "peak GB", 9, 3, 1e9),
    ("all_gathers", "gathers", 9, 0, 1),
    ("reduce_scatters", "scatters", 9, 0, 1),
)


def ratios(rows: Rows) -> None:
    """Add the speed-ups over exact by cost model, FLOPs and clock."""
    exact = dict(rows["exact"])
    for row in rows.values():
        row["speedup_model"] = exact["units"] / row["units"]
        row["speedup_flops"] = exact["flops"] / row["flops"]
        if "update_s" in exact:
            row["speedup_clock"] = exact["update_s"] / row["update_s"]


def table(variant: str, rows: Rows) -> str:
    """Strategies as rows: speed-ups over exact, seconds, gigabytes, collectives; no empty columns."""
    columns = [c for c in COLUMNS if any(c[0] in row for row in rows.values())]
    lines = [
        f"{variant}: {rows['exact']['parameters'] / 1e6:.1f}M parameters; first columns: speed-up over exact",
        " " * 22 + "".join(f"{title:>{width}}" for _, title, width, _, _ in columns),
    ]
    for name, row in rows.items():
        cells = [
            f"{row[key] / scale:{width}.{digits}f}" if key in row else f"{'-':>{width}}"
            for key, _, width, digits, scale in columns
        ]
        lines.append(f"{name:22}" + "".join(cells))
    return "\n".join(lines) + "\n"


def plot(variants: dict[str, Rows], file: Path) -> None:
    """Per variant a column of panels: speed-up over exact, seconds forward and backward, gigabytes for the backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = all("update_s" in row for rows in variants.values() for row in rows.values())
    panels = [_speedups, _seconds, _gigabytes] if timed else [_speedups, _gigabytes]
    size = (4.2 * len(variants) + 1, 3.6 * len(panels))
    figure, axes = plt.subplots(
        len(panels), len(variants), figsize=size, sharex="row", sharey=True, squeeze=False
    )
    for column, (variant, rows) in enumerate(variants.items()):
        axes[0][column].set_title(variant.replace("_", ", "))
        for line, panel in enumerate(panels):
            panel(axes[line][column], rows)
            axes[line][column].set_yticks(range(len(rows)), list(rows))
    axes[0][0].invert_yaxis()
    for line in axes:
        line[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _speedups(axis: Any, rows: Rows) -> None:
    """By cost model, FLOPs and clock."""
    for k, (key, label) in enumerate(BARS.items()):
        if key in rows["exact"]:
            places = [i + 0.27 * (k - 1) for i in range(len(rows))]
            axis.barh(places, [row[key] for row in rows.values()], 0.25, label=label)
    axis.axvline(1, color="0.6", lw=0.8)
    axis.set_xlabel("update speed-up over exact")


def _seconds(axis: Any, rows: Rows) -> None:
    """The forward and the backward part of an update, one after the other."""
    forward = [row["forward_s"] for row in rows.values()]
    axis.barh(range(len(rows)), forward, 0.7, color="tab:cyan", label="forward")
    backward = [row["backward_s"] for row in rows.values()]
    axis.barh(range(len(rows)), backward, 0.7, left=forward, color="tab:purple", label="backward")
    axis.set_xlabel("seconds of an update")


def _gigabytes(axis: Any, rows: Rows) -> None:
    """Activations held for the backward at their most; on a GPU its peak memory too."""
    axis.barh(
        range(len(rows)),
        [row["saved_bytes"] / 1e9 for row in rows.values()],
        0.7,
        color="tab:gray",
        label="activations",
    )
    if "peak_bytes" in rows["exact"]:
        peaks = [row["peak_bytes"] / 1e9 for row in rows.values()]
        axis.plot(peaks, range(len(rows)), "k|", ms=12, mew=2, label="peak of the device")
    axis.set_xlabel("GB held for the backward, at most")
