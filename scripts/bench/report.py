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
    """Speed-up over exact per strategy: cost model, FLOPs, clock; one panel per variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4.2 * len(variants), 4.2)
    figure, axes = plt.subplots(1, len(variants), figsize=size, sharey=True, squeeze=False)
    for axis, (variant, rows) in zip(axes[0], variants.items(), strict=True):
        names = list(rows)
        for k, (key, label) in enumerate(BARS.items()):
            if key in rows["exact"]:
                places = [i + 0.27 * (k - 1) for i in range(len(names))]
                axis.barh(places, [rows[n][key] for n in names], 0.25, label=label)
        axis.set_yticks(range(len(names)), names)
        axis.axvline(1, color="0.6", lw=0.8)
        axis.set_xlabel("update speed-up over exact")
        axis.set_title(variant.replace("_", ", "))
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
