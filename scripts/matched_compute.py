"""Backward strategies at equal compute: train each on the same forward-equivalents and compare what was learned.

    python scripts/matched_compute.py                              84 runs: three and a half hours
    python scripts/matched_compute.py --seeds 0 --arms exact jagg long --set budget=6000
    OMP_NUM_THREADS=1 python scripts/matched_compute.py --seeds 0 2 4 6 8 10 &   halves beside each other: two hours
    OMP_NUM_THREADS=1 python scripts/matched_compute.py --seeds 1 3 5 7 9 11 &   on two cores; then read all of them:
    python scripts/matched_compute.py --only-read --readme README.md

DanceGRPO on the shapes world (9 steps, 8 of them trained; 2 prompts x 16 pictures; one update per rollout). Every
seed has four captions of its own, the same for all arms; the gain is measured on them, with fresh noise. A policy
gradient over all captions is so noisy that minutes of training separate nothing; over four captions, they do. Says
first what it could detect. Writes ``matched.md``, ``matched.json`` and ``matched.png``.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "jaggrl/shapes/prompts/train.txt"
sys.path.insert(0, str(ROOT))

from jaggrl.errors import EXIT_BAD_INPUT, UserError  # noqa: E402
from jaggrl.infra.files import write_json  # noqa: E402
from jaggrl.infra.logging import read_metrics  # noqa: E402
from jaggrl.infra.report import RESULT, student  # noqa: E402
from scripts.claims.runs import put_into, train  # noqa: E402
from scripts.matched.plot import plot  # noqa: E402

CAPTIONS = 4
"""Of a seed. The categories of the training file take turns: no seed has one category alone."""
TRIED = 16
"""Captions at the top of the training file that the trial runs used; no seed has them."""
BUDGET = 18_000
"""Forward-equivalents of a run: 17 exact updates."""
BASE = [
    f"budget={BUDGET}",
    "rollouts=1000",
    "prompts=files",
    "prompts_per_rollout=2",
    "micro_batch=32",
    "optim.lr=8e-5",
    "algorithm.rollout.schedule.steps=9",
    f"evaluation.prompts={CAPTIONS}",
    "evaluation.samples=72",
    "evaluation.grid=8",
]
EVERY, SHORT, LONG = "ema_decay=0.76", "ema_decay=0.85", "ema_decay=0.89"
"""The evaluated average of the weights spans a quarter of the updates whatever their number (17, 26, 37): one decay
for all would keep most of a long run's drift and half of a short one's."""
ARMS: dict[str, tuple[str, list[str]]] = {
    "exact": ("exact, every step", ["backward=exact", EVERY]),
    "jagg": ("JAGG, W=4", ["backward=jagg", "backward.window=4", SHORT]),
    "ablate": ("ablate, W=4", ["backward=ablate", "backward.window=4", SHORT]),
    "subset": ("subset, 2 of 4", ["backward=subset", "backward.window=4", SHORT]),
    "jagg_all": ("JAGG, W=8 (all)", ["backward=jagg", "backward.window=0", LONG]),
    "subset_all": ("subset, 2 of 8", ["backward=subset", "backward.window=0", LONG]),
    "long": ("long: 2 Chebyshev anchors, W=8", ["backward=long", "backward.window=0", LONG]),
}
"""Arm -> (title, overrides)."""
TOGETHER: dict[str, tuple[str, list[str]]] = {
    "interpolated": ("JAGG W=4, JAGG W=8 and long together", ["jagg", "jagg_all", "long"]),
    "discarded": ("ablate and both subsets together", ["ablate", "subset", "subset_all"]),
}
"""Means of arms that answer one question: what do the discarded steps' cotangents give? -> (title, arms)."""
TITLES = {name: title for name, (title, _) in [*ARMS.items(), *TOGETHER.items()]}
PAIRS = [("interpolated", "discarded"), ("interpolated", "exact")]
PAIRS += [("jagg", "exact"), ("jagg", "ablate"), ("jagg", "subset"), ("jagg_all", "subset_all")]
PAIRS += [
    ("jagg_all", "exact"),
    ("jagg_all", "jagg"),
    ("long", "exact"),
    ("long", "jagg_all"),
    ("long", "subset_all"),
]
"""Differences that are told, paired by seed; p-values are Holm's over all of them."""
NAME = "matched_compute"
SPREAD, GAIN = 0.0136, 0.04
"""Measured over twelve seeds: deviation over seeds of a paired difference, and gain (EXPERIMENTS.md)."""

Run = Mapping[str, Any]


def power(seeds: int) -> str:
    """What difference of mean gains, paired by seed, a t-test would see; said before any run."""
    if seeds < 2:
        return "One seed tells no differences."
    seen = detectable(SPREAD, seeds)
    return (
        f"Expected: a gain near {GAIN:g} and a deviation of {SPREAD:g} over seeds of the difference of two arms. "
        f"{seeds} seeds see a difference of {seen:.4f} ({seen / GAIN:.0%} of the gain) in four of five tries; a "
        f"fifth of the gain is {GAIN / 5:g}."
    )


def detectable(spread: float, seeds: int) -> float:
    """The paired difference that a t-test at 5 % sees in four of five tries."""
    freedom = seeds - 1
    return float(stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * spread / math.sqrt(seeds)


def achieved(pairs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], trained: str) -> str:
    """What could have been seen, by the deviations that the runs had."""
    spreads = [p["spread"] for p in pairs if p["spread"] is not None and {p["one"], p["other"]} <= set(ARMS)]
    if not spreads:
        return ""
    seeds = min(len(pair["seeds"]) for pair in pairs)
    spread = math.sqrt(statistics.fmean(s * s for s in spreads))
    gain = statistics.fmean(row["gain"][trained][0] for row in rows)
    seen = detectable(spread, seeds)
    return (
        f"Measured: mean gain {gain:.4f}, deviation of the difference of two arms {spread:.4f} over seeds; {seeds} "
        f"seeds see {seen:.4f} ({seen / gain:.0%} of the gain) in four of five tries.\n"
    )


def captions(seed: int, root: Path) -> Path:
    """The file of a seed's captions: four neighbours in the shipped training file."""
    lines = TRAIN.read_text().splitlines()
    first = TRIED + CAPTIONS * seed
    if first + CAPTIONS > len(lines):
        raise UserError(
            f"--seeds {seed}: the captions are used up; take seeds below {(len(lines) - TRIED) // CAPTIONS}"
        )
    file = root / f"captions{seed}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines[first : first + CAPTIONS]) + "\n")
    return file


def run(
    arm: str, seed: int, root: Path, more: Sequence[str], only_read: bool, baseline: Path | None
) -> tuple[dict[str, Any], Path]:
    """Train one arm: its result with its curve, and its folder."""
    file = captions(seed, root).absolute()
    overrides = [*BASE, *ARMS[arm][1], f"prompts.train={file}", f"prompts.heldout={file}", *more]
    if baseline is not None:
        overrides.append(f"evaluation.baseline='{baseline}'")
    folder = train("shapes_dance", seed, root / arm / f"seed{seed}", overrides, only_read)
    result = json.loads((folder / RESULT).read_text())
    rows = [row for row in read_metrics(folder) if "reward/total/mean" in row]
    return {
        "arm": arm,
        "seed": seed,
        "rewards": result["rewards"],
        "updates": result["optimizer_updates"],
        "cost": [row["cost/forward_equivalents"] for row in rows],
        "seconds": np.cumsum([row["time/step_s"] for row in rows]).tolist(),
        "curve": [row["reward/total/mean"] for row in rows],
    }, folder


def run_seed(arms: Sequence[str], seed: int, root: Path, more: Sequence[str], only_read: bool) -> list[Run]:
    """All arms of a seed; the untrained model is measured in the first one."""
    runs: list[Run] = []
    baseline = None
    for arm in arms:
        result, folder = run(arm, seed, root, more, only_read, baseline)
        baseline = baseline or folder
        runs.append(result)
    return runs


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half of Student's 95 % interval; no interval from one value."""
    mean, half = student(values)
    return mean, half if math.isfinite(half) else None


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per arm: cost, gain of the trained reward, changes of the others."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in runs):
        mine = [r for r in runs if r["arm"] == arm]
        row: dict[str, Any] = {
            "arm": arm,
            "seeds": [r["seed"] for r in mine],
            "updates": statistics.fmean(r["updates"] for r in mine),
            "forward_equivalents": statistics.fmean(r["cost"][-1] for r in mine),
            "seconds": statistics.fmean(r["seconds"][-1] for r in mine),
        }
        row["gain"] = {
            name: interval([r["rewards"][name]["gain"] for r in mine]) for name in mine[0]["rewards"]
        }
        rows.append(row)
    return rows


def differences(runs: Sequence[Run], trained: str) -> list[dict[str, Any]]:
    """Gain of one arm less another's, paired by seed, for the pairs that were both run; p of a t-test, by Holm."""
    gains = {(r["arm"], r["seed"]): r["rewards"][trained]["gain"] for r in runs}
    for name, (_, arms) in TOGETHER.items():
        for seed in {s for _, s in gains}:
            if all((arm, seed) in gains for arm in arms):
                gains[name, seed] = statistics.fmean(gains[arm, seed] for arm in arms)
    told, raw = [], []
    for one, other in PAIRS:
        both = [s for a, s in gains if a == one and (other, s) in gains]
        if both:
            values = [gains[one, s] - gains[other, s] for s in both]
            spread = statistics.stdev(values) if len(both) > 1 else None
            told.append(
                {"one": one, "other": other, "seeds": both, "difference": interval(values), "spread": spread}
            )
            raw.append(float(stats.ttest_1samp(values, 0.0).pvalue) if len(both) > 1 else math.nan)
    return [pair | {"p": p} for pair, p in zip(told, holm(raw), strict=True)]


def holm(raw: Sequence[float]) -> list[float]:
    """Holm's step-down p-values: the k-th smallest of m times (m - k + 1), never falling, at most 1."""
    adjusted, least = [math.nan] * len(raw), 0.0
    for k, i in enumerate(sorted(range(len(raw)), key=lambda i: raw[i])):
        least = max(least, min(1.0, raw[i] * (len(raw) - k)))
        adjusted[i] = least
    return adjusted


def told(value: tuple[float, float | None] | None) -> str:
    """``+.0123 ± .0045``."""
    return "" if value is None else f"{value[0]:+.4f}" + ("" if value[1] is None else f" ± {value[1]:.4f}")


def markdown(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], trained: str) -> str:
    """Both tables; intervals are 95 % over seeds."""
    others = [name for name in rows[0]["gain"] if name != trained]
    head = ["strategy", "seeds", "updates", "forward-equivalents", "seconds", f"**{trained}** gain", *others]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [ARMS[row["arm"]][0], str(len(row["seeds"])), f"{row['updates']:.0f}"]
        cells += [f"{row['forward_equivalents']:,.0f}", f"{row['seconds']:.0f}"]
        cells += [told(row["gain"][name]) for name in (trained, *others)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| difference of the gain, paired by seed | seeds | | p (Holm) | verdict |",
        "|---|---|---|---|---|",
    ]
    for pair in pairs:
        title = f"{TITLES[pair['one']]} less {TITLES[pair['other']]}"
        cells = [title, str(len(pair["seeds"])), told(pair["difference"]), f"{pair['p']:.2g}", verdict(pair)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(pair: Mapping[str, Any]) -> str:
    """More, less, or not told apart at 5 % by Holm."""
    if not pair["p"] < 0.05:
        return "not told apart"
    return "more" if pair["difference"][0] > 0 else "less"


def main() -> None:
    """State, train, tabulate, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(12)))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/matched_compute")
    parser.add_argument(
        "--only-read", action="store_true", help="tabulate the newest finished runs; train nothing"
    )
    parser.add_argument("--readme", type=Path, help="file whose marked table is replaced")
    arguments = parser.parse_args()
    print(power(len(arguments.seeds)), flush=True)
    try:
        runs = [
            result
            for seed in arguments.seeds
            for result in run_seed(arguments.arms, seed, arguments.out, arguments.set, arguments.only_read)
        ]
        runs.sort(key=lambda r: (arguments.arms.index(r["arm"]), r["seed"]))
        trained = next(name for name, reward in runs[0]["rewards"].items() if reward["trained"])
        rows, pairs = summary(runs), differences(runs, trained)
        text = markdown(rows, pairs, trained) + "\n" + achieved(pairs, rows, trained)
        stored = {"power": power(len(arguments.seeds)), "rows": rows, "differences": pairs, "runs": runs}
        write_json(arguments.out / "matched.json", stored)
        (arguments.out / "matched.md").write_text(text)
        plot(runs, rows, pairs, TITLES, trained, arguments.out / "matched.png")
        print("\n" + text)
        if arguments.readme:
            put_into(arguments.readme, NAME, text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
