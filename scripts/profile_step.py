"""Where one training step goes: a table and profile.json of every stage's time, host reads, casts and operations.

The step is the door's: give Hydra overrides as to ``python -m jaggrl.train``. ``--benchmark`` puts a FLUX of 71M random
weights on 256 picture tokens in place of the model (the benchmark's of scripts/bench_backward.py), with 2 samples.
Stages exclude the stages inside them, so that shares add up to one. ``host reads`` are values that the host asked for
(``.item()``, ``float()``, masks as indices), of CPU tensors too; on a GPU ``waits`` counts the device synchronisations.

    python scripts/profile_step.py
    python scripts/profile_step.py experiment=shapes_dance backward=exact
    python scripts/profile_step.py --benchmark --steps 1
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "experiment=shapes_dance"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, profile, write profile.json."""
    args = _arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    sys.path.insert(0, str(ROOT))
    from jaggrl.errors import UserError
    from jaggrl.infra.distributed import joined
    from jaggrl.infra.files import write_json
    from scripts.profiling.report import table

    try:
        with joined(args.device) as ranks:
            told = _profile(args, ranks)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if ranks.main:
        print(table(told["rows"]))
        print(
            f"{told['step_s']:.3f} s per step of {told['samples']} samples, "
            f"{told['parameters'] / 1e6:.1f}M parameters, {told['device']}"
        )
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "profile.json", told)
        print(f"written to {args.out / 'profile.json'}")
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "overrides", nargs="*", help=f"Hydra overrides; {DEFAULT} unless an experiment is given"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--benchmark", action="store_true", help="the benchmark's random FLUX as the model")
    parser.add_argument("--width", type=int, default=512, help="of the benchmark model, a multiple of 64")
    parser.add_argument("--double", type=int, default=4, help="its double-stream blocks")
    parser.add_argument("--single", type=int, default=8, help="its single-stream blocks")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/profile", help="folder of profile.json")
    args = parser.parse_intermixed_args(arguments)
    if args.steps < 1 or args.warmup < 0:
        parser.error(f"--steps {args.steps} --warmup {args.warmup}: time at least one step")
    if args.width % 64 or args.width < 64:
        parser.error(f"--width {args.width} is not a multiple of 64; use {max(64, args.width // 64 * 64)}")
    return args


def _profile(args: argparse.Namespace, ranks: Any) -> dict[str, Any]:
    """Warm up, time, and count one more step under torch.profiler."""
    from jaggrl.infra.logging import MetricsLog
    from scripts.profiling.ledger import Ledger, counted
    from scripts.profiling.report import rows
    from scripts.profiling.subject import BENCHMARK, build, composed, instrument

    given = args.overrides
    experiment = [] if any(o.startswith("experiment=") for o in given) else [DEFAULT]
    config = composed([*experiment, *(BENCHMARK if args.benchmark else ()), *given])
    trainer = build(config, ranks, args.width if args.benchmark else None, args.double, args.single)
    now = time.process_time if args.clock == "cpu" else time.perf_counter
    ledger = Ledger(ranks.device, now)
    with tempfile.TemporaryDirectory() as folder, instrument(trainer, ledger):
        log = MetricsLog(Path(folder))

        def step() -> None:
            metrics = trainer.step()
            with ledger("log: metrics.jsonl"):
                log.write(trainer.steps_done, metrics)

        for _ in range(args.warmup):
            step()
        ledger.clear()
        begin = now()
        for _ in range(args.steps):
            step()
        whole = now() - begin
        seconds, calls = dict(ledger.seconds), dict(ledger.calls)
        ledger.waits = False
        counts = counted(step, ranks.device)
        log.close()
    return {
        "overrides": given,
        "benchmark": args.benchmark,
        "device": str(ranks.device),
        "threads": args.threads,
        "clock": args.clock,
        "world": ranks.world,
        "samples": trainer.loop.prompts_per_rollout * trainer.loop.group_size,
        "parameters": sum(p.numel() for p in trainer.policy.model.network.parameters()),
        "step_s": whole / args.steps,
        "rows": rows(seconds, calls, counts, args.steps, whole),
    }


if __name__ == "__main__":
    sys.exit(main())
