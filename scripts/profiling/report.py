"""The profile as rows and as a table."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from scripts.profiling.subject import NAMES

COUNTS = ("host_reads", "device_waits", "casts", "operations")
ORDER = ("rollout", "reward", "credit", "update", "optimizer", "log", "unaccounted")


def rows(
    seconds: Mapping[str, float],
    calls: Mapping[str, int],
    counts: Mapping[str, Counter[str]],
    steps: int,
    whole: float,
) -> list[dict[str, Any]]:
    """One row per stage: calls, milliseconds and share of a step, and what the profiler counted in one step.

    Args:
        seconds: of each stage over all steps, inner stages excluded.
        calls: of each stage over all steps.
        counts: of each stage in one step.
        steps: that were timed.
        whole: seconds of all steps.
    """
    known = dict(seconds) | {"": whole - sum(seconds.values())}
    found = [
        {
            "stage": NAMES.get(stage, stage),
            "calls": calls.get(stage, 0) / steps,
            "ms": 1000 * known.get(stage, 0.0) / steps,
            "share": known.get(stage, 0.0) / whole,
            **{kind: counts.get(stage, Counter())[kind] for kind in COUNTS},
        }
        for stage in dict.fromkeys([*known, *counts])
    ]
    return sorted(found, key=lambda row: (ORDER.index(row["stage"].split(":")[0]), -row["ms"]))


def table(found: list[dict[str, Any]]) -> str:
    """Aligned columns and a last line of sums."""
    total = {"stage": "step"} | {key: sum(r[key] for r in found) for key in ("calls", "ms", "share", *COUNTS)}
    lines = [f"{'':32}{'calls':>7}{'ms':>10}{'share':>8}{'host reads':>12}{'waits':>7}{'casts':>7}{'ops':>8}"]
    for row in [*found, total]:
        lines.append(
            f"{row['stage']:32}{row['calls']:7g}{row['ms']:10.1f}{row['share']:8.1%}"
            f"{row['host_reads']:12d}{row['device_waits']:7d}{row['casts']:7d}{row['operations']:8d}"
        )
    return "\n".join(lines)
