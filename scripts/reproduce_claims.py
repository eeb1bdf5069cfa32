"""The papers' claims on stability and cost of DiffusionNFT and DiffusionART, tried on the shapes world.

    python scripts/reproduce_claims.py                                  hours on two cores
    python scripts/reproduce_claims.py --rollouts 40 --seeds 0 --arms nft nft_on_policy art --preset-seeds

States length, seeds and criteria first; then trains every arm (a finished run of the same config and code is
kept) and prints each verdict with its curve, whatever it is. Writes ``claims.json``, ``.md`` and ``.png``.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaggrl.errors import EXIT_BAD_INPUT, UserError  # noqa: E402
from jaggrl.infra.files import write_json  # noqa: E402
from jaggrl.infra.logging import read_metrics  # noqa: E402
from scripts.claims.forces import measure  # noqa: E402
from scripts.claims.plots import draw  # noqa: E402
from scripts.claims.runs import train  # noqa: E402
from scripts.claims.verdicts import CRITERIA, Shape, first_reach, late_average, shape, smooth, sparkline  # noqa: E402

RATE, ART_RATE = ["optim.lr=2e-4", "ema_decay=null"], ["optim.lr=6e-5", "ema_decay=null"]
"""Three times the presets' own rates, without an average: what takes hundreds of rollouts fits into tens."""
SMALL = [
    "prompts_per_rollout=2",
    "group_size=16",
    "micro_batch=32",
    "evaluation.prompts=12",
    "evaluation.samples=1",
]
NFT = ["backward=exact", "algorithm.noise=per_step", "algorithm.kl_coef=0", *RATE, *SMALL]
ON_POLICY = [*NFT, "algorithm.decay=none"]
ARMS: dict[str, tuple[str, list[str]]] = {
    "nft": ("shapes_nft", [*NFT, "algorithm.decay=0.9"]),
    "nft_on_policy": ("shapes_nft", ON_POLICY),
    "nft_unanchored": ("shapes_nft", [*NFT, "algorithm.decay=0.9", "algorithm.anchor=current"]),
    "nft_positive": ("shapes_nft", [*ON_POLICY, "algorithm.branches=positive"]),
    "nft_negative": ("shapes_nft", [*ON_POLICY, "algorithm.branches=negative"]),
    "nft_two_updates": ("shapes_nft", [*ON_POLICY, "updates_per_rollout=2", "micro_batch=16"]),
    "art": ("shapes_art", ["backward=exact", *ART_RATE, *SMALL, "micro_batch=16"]),
    "art_at_nft_rate": ("shapes_art", ["backward=exact", *RATE, *SMALL, "micro_batch=16"]),
}
"""Arm of the claims on stability -> (preset, overrides)."""
UNTRAINED = {
    "shapes_nft": ("nft_untrained", [*ON_POLICY, "backward=ablate", "optim.lr=0"]),
    "shapes_art": ("art_untrained", ["backward=ablate", *ART_RATE, *SMALL, "optim.lr=0"]),
}
"""Preset -> the run whose rewards are subtracted: the same prompts and noise, nothing learned. Prompts differ in
difficulty by more than training moves the reward."""
PRESETS = ("shapes_nft", "shapes_art", "shapes_flow_grpo_fast")
"""Of the claims on cost: at their own rates, in full, as compare_algorithms.py trains them."""

Curve = Mapping[str, Any]


def run(
    arm: str, seed: int, rollouts: int, out: Path, more: Sequence[str], only_read: bool
) -> dict[str, Any]:
    """Train one arm of the claims on stability; its rewards are told against the untrained model's."""
    experiment, overrides = ARMS[arm]
    rest, untrained = UNTRAINED[experiment]

    def of(name: str, own: Sequence[str]) -> dict[str, Any]:
        everything = [f"rollouts={rollouts}", *own, *more]
        return curve(name, seed, train(experiment, seed, out / name / f"seed{seed}", everything, only_read))

    found, still = of(arm, overrides), of(rest, untrained)
    if min(len(found["rewards"]), len(still["rewards"])) < rollouts:
        raise UserError(f"the runs of {arm} or {rest} have fewer than {rollouts} rollouts: lower --rollouts")
    pairs = zip(found["rewards"][:rollouts], still["rewards"][:rollouts], strict=True)
    return found | {"rewards": [ours - theirs for ours, theirs in pairs]}


def curve(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """What the verdicts look at: reward, cost so far and gradient norm of every rollout."""
    rows = [row for row in read_metrics(folder) if "reward/total/mean" in row]
    return {
        "arm": arm,
        "seed": seed,
        "folder": str(folder),
        "rewards": [row["reward/total/mean"] for row in rows],
        "spread": rows[0]["reward/total/std"],
        "cost": [row["cost/forward_equivalents"] for row in rows],
        "grad_norm": [row["train/grad_norm"] for row in rows],
    }


def shapes(curves: Sequence[Curve], arm: str) -> list[Shape]:
    """The shapes of an arm's seeds."""
    return [shape(c["rewards"], c["spread"]) for c in curves if c["arm"] == arm]


def collapse_claims(curves: Sequence[Curve]) -> list[tuple[str, str, list[bool]]]:
    """(claim, arm, what each seed says) for every claim that is about one arm's shape."""
    expected = {
        "nft_on_policy": ("on-policy NFT (decay 0) rises and then collapses", True),
        "nft_unanchored": ("EMA sampling without the lagged anchor still collapses", True),
        "nft_positive": ("the positive branch alone collapses", True),
        "nft_negative": ("the negative branch alone collapses", True),
        "nft_two_updates": ("two updates per rollout without EMA avoid the collapse", False),
        "nft": ("NFT with its lagged policy does not collapse", False),
        "art": ("ART rises and does not collapse, without a schedule", False),
        "art_at_nft_rate": ("ART rises and does not collapse at NFT's rate either", False),
    }
    found = []
    for arm, (claim, collapses) in expected.items():
        seen = shapes(curves, arm)
        must_rise = arm in ("nft_on_policy", "art", "art_at_nft_rate")
        holds = [s.collapsed == collapses and (s.rose or not must_rise) for s in seen]
        if seen:
            found.append((claim, arm, holds))
    return found


def speed(curves: Sequence[Curve], fast: str, slow: str, axis: str) -> list[float | None]:
    """Per seed: what ``slow`` spent to reach its own late average, over what ``fast`` spent to reach the same level."""
    ratios: list[float | None] = []
    by_seed = {(c["arm"], c["seed"]): c for c in curves}
    for seed in sorted({c["seed"] for c in curves}):
        a, b = by_seed.get((fast, seed)), by_seed.get((slow, seed))
        if a is None or b is None:
            continue
        level = late_average(b["rewards"])
        spent = [
            first_reach(c["rewards"], c[axis] if axis != "rollouts" else _count(c), level) for c in (a, b)
        ]
        ratios.append(spent[1] / spent[0] if spent[0] and spent[1] else None)
    return ratios


def _count(curve: Curve) -> list[float]:
    return [float(i + 1) for i in range(len(curve["rewards"]))]


def told(ratios: Sequence[float | None]) -> str:
    """``3.1x, never`` per seed."""
    return ", ".join("never" if r is None else f"{r:.2f}x" for r in ratios) or "not run"


def verdict(holds: Sequence[bool]) -> str:
    """Over seeds."""
    return "AGREES" if all(holds) else "MIXED" if any(holds) else "DISAGREES"


def report(curves: Sequence[Curve], forces: Sequence[Mapping[str, float]]) -> str:
    """All verdicts, each with its curves."""
    lines = []
    for claim, arm, holds in collapse_claims(curves):
        lines.append(f"{verdict(holds)} ({sum(holds)} of {len(holds)} seeds): {claim}")
        for curve in (c for c in curves if c["arm"] == arm):
            seen = shape(curve["rewards"], curve["spread"])
            norms = curve["grad_norm"]
            lines.append(f"    seed {curve['seed']} {sparkline(smooth(curve['rewards']))} {seen}")
            lines.append(
                f"           gradient norm: first 5 {sum(norms[:5]) / 5:.3g}, largest {max(norms):.3g}"
            )
    pairs = (
        (
            "nft_on_policy",
            "nft_two_updates",
            "rollouts",
            "two updates are slower than one (paper: 15.2x in steps)",
        ),
        (
            "shapes_art",
            "shapes_nft",
            "cost",
            "ART reaches NFT's late average reward with less compute (paper: 12.02x, 13B video)",
        ),
        (
            "shapes_art",
            "shapes_flow_grpo_fast",
            "cost",
            "ART reaches Flow-GRPO-Fast's late average with less compute (paper: 11.72x)",
        ),
    )
    for fast, slow, axis, claim in pairs:
        ratios = speed(curves, fast, slow, axis)
        holds = [r is not None and r > 1 for r in ratios]
        word = verdict(holds) if ratios else "NOT RUN"
        lines.append(f"{word}: {claim}; here {told(ratios)}")
    lines += _force_lines(forces)
    return "\n".join(lines)


def _force_lines(forces: Sequence[Mapping[str, float]]) -> list[str]:
    if not forces:
        return []

    def mean(key: str) -> float:
        return sum(f[key] for f in forces) / len(forces)

    output = mean("guiding_output") / mean("restoring_output")
    gradient = mean("restoring_gradient") / mean("guiding_gradient")
    claims = (
        (
            output,
            "at update 2 the restoring force is smaller than the guiding one in output space (paper: 9.4x)",
        ),
        (gradient, "at update 2 its parameter gradient is larger than the guiding one's (paper: 4.9x)"),
    )
    return [f"{'AGREES' if r > 1 else 'DISAGREES'}: {claim}; here {r:.2f}x" for r, claim in claims]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=60, help="of the claims on stability")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of the claims on stability")
    parser.add_argument(
        "--preset-seeds", nargs="*", type=int, default=[0, 1, 2], help="of the claims on cost"
    )
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument(
        "--force-rollouts", type=int, default=10, help="rollouts whose second update is taken apart"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/claims")
    parser.add_argument(
        "--presets",
        type=Path,
        default=ROOT / "outputs/compare_algorithms",
        help="where compare_algorithms.py keeps its runs; what is missing there is trained",
    )
    parser.add_argument(
        "--only-read", action="store_true", help="judge the newest finished runs; train nothing"
    )
    return parser.parse_args()


def main() -> None:
    """State, run, print."""
    arguments = options()
    stated = (
        f"Stability: {arguments.rollouts} rollouts of 32 pictures, exact backward, {' '.join(RATE)} "
        f"(ART: {ART_RATE[0]}); seeds {arguments.seeds}; arms {', '.join(arguments.arms)}.\n"
        f"Cost: {', '.join(PRESETS)} as they are; seeds {arguments.preset_seeds}.\n"
        f"{CRITERIA}\nForces: mean over {arguments.force_rollouts} rollouts, seed {arguments.seeds[0]}."
    )
    print(stated, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves: list[dict[str, Any]] = []
    try:
        for seed in arguments.seeds:
            for arm in arguments.arms:
                curves.append(
                    run(arm, seed, arguments.rollouts, arguments.out, arguments.set, arguments.only_read)
                )
        for seed in arguments.preset_seeds:
            for preset in PRESETS:
                output = arguments.presets / preset / f"seed{seed}"
                curves.append(curve(preset, seed, train(preset, seed, output, (), arguments.only_read)))
        forces = []
        if arguments.force_rollouts:
            overrides = ["backward=exact", *SMALL, "micro_batch=16", *arguments.set]
            taken = measure("shapes_art", arguments.seeds[0], arguments.force_rollouts, overrides)
            forces = [asdict(f) for f in taken]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    text = report(curves, forces)
    print("\n" + text)
    (arguments.out / "claims.md").write_text(f"{stated}\n\n```\n{text}\n```\n")
    write_json(
        arguments.out / "claims.json",
        {"stated": stated, "curves": curves, "forces": forces, "verdicts": text},
    )
    draw(curves, PRESETS, arguments.out / "claims.png")


if __name__ == "__main__":
    main()
