"""Time, FLOPs and memory of the backward strategies on a FLUX with random weights, beside the cost model.

Every strategy pulls back the same policy-gradient window of W steps; strategies take turns within each
repeat, so that a busy machine slows all of them alike; medians are reported. Runs on one CPU, on a GPU (peak
memory too), and sharded under torchrun (collectives too):

    python scripts/bench_backward.py
    python scripts/bench_backward.py --width 3072 --double 6 --single 12 --image-tokens 1024 --precision bf16
    torchrun --nproc-per-node 2 scripts/bench_backward.py --repeats 3
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("full", "full_checkpointing", "lora", "lora_checkpointing")
STRATEGIES = (
    "exact",
    "jagg joint",
    "jagg batched",
    "jagg sequential",
    "jagg served",
    "jagg served batched",
    "ablate",
    "quadratic served",
    "subset",
)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure every variant, write bench.json and bench.png."""
    args = _arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    sys.path.insert(0, str(ROOT))
    from jaggrl.infra.distributed import start, stop
    from jaggrl.infra.files import write_json
    from scripts.bench.report import plot, table

    ranks = start(args.device)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    results: dict[str, Any] = {"settings": settings, "variants": {}}
    results["settings"] |= {"world": ranks.world, "device": str(ranks.device)}
    try:
        for variant in args.variants:
            told = _measure(variant, args, ranks)
            results["variants"][variant] = told
            if ranks.main:
                print(table(variant, told), flush=True)
                args.out.mkdir(parents=True, exist_ok=True)
                write_json(args.out / "bench.json", results)
        if ranks.main:
            plot(results["variants"], args.out / "bench.png")
            print(f"written to {args.out}/bench.json and bench.png")
    finally:
        stop()
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--width", type=int, default=512, help="hidden width, a multiple of 64")
    parser.add_argument("--double", type=int, default=4, help="double-stream blocks")
    parser.add_argument("--single", type=int, default=8, help="single-stream blocks")
    parser.add_argument("--image-tokens", type=int, default=256)
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank")
    parser.add_argument("--window", type=int, default=4, help="W, steps per window")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds after a warm-up; 0: FLOPs only")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench", help="folder of the results")
    args = parser.parse_args(arguments)
    side = int(args.image_tokens**0.5)
    if args.width % 64 or args.width < 64:
        parser.error(f"--width {args.width} is not a multiple of 64; use {max(64, args.width // 64 * 64)}")
    if args.window < 4:
        parser.error(f"--window {args.window} is shorter than 4, where quadratic saves nothing")
    if side * side != args.image_tokens:
        parser.error(f"--image-tokens {args.image_tokens} is no square; use {side * side}")
    if "exact" not in args.strategies:
        parser.error("--strategies must hold exact, which the others are compared with")
    return args


def _strategy(name: str, window: int) -> Any:
    """A strategy by name; ``served`` ones stand for the first update after a rollout."""
    from jaggrl.backward.interpolants import Ends, Exact, Interpolant, Lagrange, Linear, Subset
    from jaggrl.backward.strategy import Backward

    first, *rest = name.split()
    rules: dict[str, Interpolant] = {
        "exact": Exact(),
        "jagg": Linear(),
        "ablate": Ends(),
        "quadratic": Lagrange(3),
        "subset": Subset(2),
    }
    graph = next((g for g in rest if g in ("joint", "batched", "sequential")), "joint")
    return Backward(rules[first], window, graph, served="fresh" if "served" in rest else "off")


def _measure(variant: str, args: argparse.Namespace, ranks: Any) -> dict[str, dict[str, Any]]:
    """Every strategy on one variant: counted, then timed in turns."""
    import torch

    from jaggrl.backward.cost import backward_units
    from jaggrl.infra.distributed import shard
    from jaggrl.infra.stopwatch import Stopwatch
    from scripts.bench.report import ratios
    from scripts.bench.subject import Size, Subject, make_network

    lora, checkpointing = variant.startswith("lora"), variant.endswith("checkpointing")
    size = Size(**{name: getattr(args, name) for name in Size.__dataclass_fields__})
    torch.manual_seed(0)
    network = make_network(size, lora, checkpointing).to(ranks.device)
    if ranks.world > 1:
        shard(
            network, [*network.transformer_blocks, *network.single_transformer_blocks], ranks, args.precision
        )
    subject = Subject(network, size, ranks.device, args.precision == "bf16")
    strategies = {name: _strategy(name, args.window) for name in args.strategies}
    for strategy in strategies.values():
        strategy.attach(network, Stopwatch(ranks.device))
    told = {
        name: _count(strategy, subject, backward_units(lora, checkpointing))
        for name, strategy in strategies.items()
    }
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in strategies}
    for repeat in range(args.repeats + 1 if args.repeats else 0):
        for name, strategy in strategies.items():
            taken = _time(strategy, subject)
            if repeat:
                seconds[name].append(taken)
    for name, rounds in seconds.items():
        for stage in rounds[0] if rounds else ():
            told[name][stage] = statistics.median(r[stage] for r in rounds)
    ratios(told)
    told["exact"]["parameters"] = sum(p.numel() for p in network.parameters())
    return told


def _count(strategy: Any, subject: Any, backward: float) -> dict[str, Any]:
    """FLOPs, units of the cost model, passes, bytes saved for the backward, peak memory, collectives."""
    import torch

    from jaggrl.backward.sharded import counted_collectives
    from scripts.bench.meters import SavedBytes, flops

    window = subject.window(fresh=strategy.served == "fresh")
    reports: list[Any] = []
    told: dict[str, Any] = {"flops": flops(lambda: reports.append(strategy(window)))}
    passes = reports[0].passes
    told |= {"units": passes.units(backward)} | {
        name: getattr(passes, name)
        for name in ("grad_forwards", "nograd_forwards", "backwards", "forward_calls")
    }
    subject.network.zero_grad(set_to_none=True)
    cuda = subject.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with counted_collectives() as collectives:
        strategy(window)
    if cuda:
        told["peak_bytes"] = torch.cuda.max_memory_allocated()
    told |= {name: count for name, count in collectives.items() if count}
    meter = SavedBytes(subject.network.parameters())
    with meter:
        strategy(window)
    told["saved_bytes"] = meter.most
    subject.network.zero_grad(set_to_none=True)
    strategy.stopwatch.collect()
    return told


def _time(strategy: Any, subject: Any) -> dict[str, float]:
    """Seconds of one window: forward part, backward part, all."""
    import torch

    window = subject.window(fresh=strategy.served == "fresh")
    subject.network.zero_grad(set_to_none=True)
    if subject.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    strategy(window)
    stages = strategy.stopwatch.collect()  # waits for the device
    return {
        "forward_s": stages["update_fwd"],
        "backward_s": stages["update_bwd"],
        "update_s": time.perf_counter() - begin,
    }


if __name__ == "__main__":
    sys.exit(main())
