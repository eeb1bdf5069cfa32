"""Train every algorithm preset on the shapes world and compare them in one table.

    python scripts/compare_algorithms.py                       all presets, one seed (an hour on two cores)
    python scripts/compare_algorithms.py --presets shapes_nft shapes_art --seeds 0 1 2 --set rollouts=20

Each run is ``python -m jaggrl.train experiment=<preset> seed=<seed>`` in a fresh process, one at a time, in its
own folder: a finished run of the same config and code is not run again. Writes ``algorithms.md`` and
``algorithms.json``, and with ``--readme`` puts the table between the markers of that file.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaggrl.errors import EXIT_BAD_INPUT, UserError  # noqa: E402
from jaggrl.infra.files import write_json  # noqa: E402
from jaggrl.infra.report import RESULT, student  # noqa: E402
from scripts.claims.runs import put_into, train  # noqa: E402

SEEDS: dict[str, tuple[int, ...]] = {
    "shapes_dance": (0, 1, 2),
    "shapes_flow_grpo": (0,),
    "shapes_flow_grpo_fast": (0, 1, 2),
    "shapes_mixgrpo": (0,),
    "shapes_mixgrpo_flash": (0,),
    "shapes_grpo_guard": (0,),
    "shapes_nft": (0, 1, 2),
    "shapes_art": (0, 1, 2),
    "shapes_art_pairwise": (0,),
}
"""Preset -> seeds."""
VERIFIER = "shapes_verifier"
NAME = "compare_algorithms"


def result(preset: str, seed: int, root: Path, overrides: Sequence[str], only_read: bool) -> dict[str, Any]:
    """One run's ``result.json``."""
    folder = train(preset, seed, root / preset / f"seed{seed}", overrides, only_read)
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found


def interval(gains: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Mean gain and its 95 % interval: Student's over seeds, or the run's own over prompts when there is one."""
    if len(gains) == 1:
        return gains[0]["gain"], gains[0]["ci_low"], gains[0]["ci_high"]
    mean, half = student([g["gain"] for g in gains])
    return mean, mean - half, mean + half


def summary(preset: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row: gains of all rewards with intervals, and means of cost over the seeds."""
    names = list(results[0]["rewards"])
    gains = {name: interval([r["rewards"][name] for r in results]) for name in names}
    trained = next(name for name in names if results[0]["rewards"][name]["trained"])

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "preset": preset,
        "seeds": [r["seed"] for r in results],
        "trained": trained,
        "before": mean([r["rewards"][trained]["before"] for r in results]),
        "gains": {n: dict(zip(("gain", "low", "high"), g, strict=True)) for n, g in gains.items()},
        "optimizer_updates": mean([r["optimizer_updates"] for r in results]),
        "forward_equivalents": mean([r["forward_equivalents"] for r in results]),
        "seconds": mean([r["seconds"]["training"] for r in results]),
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table; intervals are 95 %."""
    others = [n for n in rows[0]["gains"] if n not in (rows[0]["trained"], VERIFIER)]
    head = [
        "preset",
        "seeds",
        f"{rows[0]['trained']} gain",
        "verifier change",
        *(f"{n} (untrained)" for n in others),
    ]
    head += ["updates", "forward-equivalents", "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["preset"].removeprefix("shapes_"), str(len(row["seeds"]))]
        for name in (row["trained"], VERIFIER, *others):
            g = row["gains"].get(name)
            cells.append("" if g is None else f"{g['gain']:+.4f} [{g['low']:+.4f}, {g['high']:+.4f}]")
        cells += [
            f"{row['optimizer_updates']:.0f}",
            f"{row['forward_equivalents']:,.0f}",
            f"{row['seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Brackets: 95 %, over seeds (Student) where there are several, else over prompts (bootstrap) of the one run.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, tabulate, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=list(SEEDS), help="experiments to run")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="the same seeds for all (default: 3 for the main four)"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/compare_algorithms")
    parser.add_argument(
        "--only-read",
        action="store_true",
        help="tabulate the newest finished runs below --out; train nothing",
    )
    parser.add_argument("--readme", type=Path, help="file whose marked table is replaced")
    arguments = parser.parse_args()
    rows = []
    try:
        for preset in arguments.presets:
            seeds = arguments.seeds or SEEDS.get(preset, (0,))
            results = [
                result(preset, seed, arguments.out, arguments.set, arguments.only_read) for seed in seeds
            ]
            rows.append(summary(preset, results))
            write_json(arguments.out / "algorithms.json", rows)
            (arguments.out / "algorithms.md").write_text(markdown(rows))
        print("\n" + markdown(rows))
        if arguments.readme:
            put_into(arguments.readme, NAME, markdown(rows))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
