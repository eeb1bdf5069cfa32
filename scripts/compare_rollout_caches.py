"""What a feature cache saves in rollouts and what it changes: cost, drift of the pictures, ratio to the network.

Each setting samples the same prompts from the same noise. The drift is the RMS difference of the final latents over
the standard deviation of the uncached ones. The log ratio is the policy gradient's at unchanged parameters: of the
network's log-probability to the cached policy's, over all transitions but the last.

    python scripts/compare_rollout_caches.py
    python scripts/compare_rollout_caches.py experiment=shapes_dance model=flux model.path=/data/FLUX.1-dev --steps 21
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "attention, 2": {"interval": 2},
    "attention, 3": {"interval": 3},
    "attention, 3, order 2": {"interval": 3, "warmup": 3, "order": 2},
    "lite, 2": {"interval": 2, "lite": True},
    "lite, 3": {"interval": 3, "lite": True},
    "lite, 2, order 0": {"interval": 2, "lite": True, "order": 0},
}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, compare, write rollout_caches.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as to python -m jaggrl.train")
    parser.add_argument("--steps", type=int, nargs="+", default=[6, 10], help="lengths of trajectories")
    parser.add_argument("--prompts", type=int, default=8, help="one sample each")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/rollout_caches")
    args = parser.parse_intermixed_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    sys.path.insert(0, str(ROOT))
    from jaggrl.errors import UserError
    from jaggrl.infra.distributed import joined
    from jaggrl.infra.files import write_json

    try:
        with joined() as ranks:
            rows = _compare(args, ranks)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "rollout_caches.json", {"overrides": args.overrides, "rows": rows})
    return 0


def _compare(args: argparse.Namespace, ranks: Any) -> list[dict[str, Any]]:
    """One row per length and setting."""
    from dataclasses import replace

    from jaggrl.build import build_policy, check
    from jaggrl.models.feature_cache import TaylorSeer
    from scripts.profiling.subject import composed

    rows: list[dict[str, Any]] = []
    for steps in args.steps:
        config = composed(
            ["experiment=shapes_dance", *args.overrides, f"algorithm.rollout.schedule.steps={steps}"]
        )
        plan = check(config)
        policy = build_policy(config, ranks)
        plain: Any = None
        for name in dict.fromkeys(["none", *args.settings]):
            options = SETTINGS[name]
            cache = None if options is None else TaylorSeer(**options)
            sampler = replace(plan.sampler, cache=cache)
            shares = policy.forward_shares(cache, steps)
            trajectory, seconds = _sample(policy, sampler, plan, args)
            plain = plain if plain is not None else trajectory
            rows.append(
                {
                    "steps": steps,
                    "cache": name,
                    "forwards": sum(shares),
                    "speedup_model": steps / sum(shares),
                    "seconds": seconds,
                    "speedup_clock": next((r["seconds"] for r in rows if r["steps"] == steps), seconds)
                    / seconds,
                    "drift": float((trajectory.x0_B - plain.x0_B).pow(2).mean().sqrt() / plain.x0_B.std()),
                    **_ratios(policy, sampler, trajectory),
                }
            )
    return rows


def _sample(policy: Any, sampler: Any, plan: Any, args: argparse.Namespace) -> tuple[Any, float]:
    """The trajectories, and the seconds of their second making (the first warms up)."""
    from jaggrl.rollout import Rollout
    from jaggrl.trajectory import layout

    now = time.process_time if args.clock == "cpu" else time.perf_counter
    prompts = plan.train_prompts.prompts[: args.prompts]
    samples = layout(len(prompts), 1, 1, 1, 0)
    rollout = Rollout(sampler, plan.loop.seed, plan.loop.micro_batch)
    for _ in range(2):
        begin = now()
        trajectory = rollout(policy, samples, prompts, 0, frozenset({"states", "velocities", "log_prob"}))
        float(trajectory.x0_B.sum())  # waits for a GPU
        seconds = now() - begin
    return trajectory, seconds


def _ratios(policy: Any, sampler: Any, trajectory: Any) -> dict[str, float]:
    """Statistics of the log ratio of the network to the policy that sampled."""
    import torch

    found = []
    with torch.no_grad():
        for i, noisy in enumerate(trajectory.noisy_S[:-1]):
            if not noisy:
                continue
            z, z_next = trajectory.recorded["states"][i : i + 2]
            t_B, sigma_B, next_B = (
                x.to(z.device).expand(len(z))
                for x in (trajectory.t_S[i], trajectory.sigma_S[i], trajectory.sigma_S[i + 1])
            )
            v = policy.model.guide(policy.velocity(z, t_B, trajectory.condition)).float()
            log_prob = sampler.kernel(v, z, sigma_B, next_B).log_prob(z_next)
            found.append(log_prob - trajectory.recorded["log_prob"][i])
    log_ratio = torch.stack(found)
    return {
        "log_ratio_abs": float(log_ratio.abs().mean()),
        "log_ratio_abs_max": float(log_ratio.abs().max()),
        "ratio_mean": float(log_ratio.exp().mean()),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns."""
    lines = [
        f"{'steps':>5}  {'cache':24}{'forwards':>9}{'model':>7}{'clock':>7}{'drift':>8}"
        f"{'|log r|':>10}{'max':>9}{'mean r':>9}"
    ]
    for r in rows:
        lines.append(
            f"{r['steps']:5d}  {r['cache']:24}{r['forwards']:9.2f}{r['speedup_model']:7.2f}"
            f"{r['speedup_clock']:7.2f}{r['drift']:8.3f}{r['log_ratio_abs']:10.1e}"
            f"{r['log_ratio_abs_max']:9.1e}{r['ratio_mean']:9.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
