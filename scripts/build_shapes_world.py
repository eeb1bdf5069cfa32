"""Rebuild every shipped weight of the shapes world from nothing, on a CPU.

Stages run in the order given; each reads what earlier ones left in the work folder:

- `vae`: the autoencoder; `flux`: transformer and both text encoders, together with the pipeline folder;
- `clipscore`, `pickscore`, `hpsv2`: three scorers of different make;
- `evaluate`: pass rates of the verifier on the pipeline's pictures, written into its card, and a sample grid.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("vae", "flux", "clipscore", "pickscore", "hpsv2", "evaluate")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run the stages. Returns the exit code: 2 on a bad argument."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help=", ".join(STAGES)
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "jaggrl/shapes/weights", help="folder that gets the weights"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "outputs/shapes_world", help="folder for caches and pictures"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--flux-steps", type=int, default=2600, help="most training steps of the flux stage")
    parser.add_argument("--flux-minutes", type=float, default=55.0, help="most minutes of its training")
    args = parser.parse_args(arguments)
    # Threads are fixed before torch is imported: OpenMP reads this once.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sys.path.insert(0, str(ROOT))
    from scripts.shapes_world.common import Build

    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    build = Build(args.out, args.work, args.seed, args.threads, args.flux_steps, args.flux_minutes)
    for stage in args.stages:
        print(f"[{stage}] starts", flush=True)
        _stage(stage)(build)
    return 0


def _stage(name: str) -> Callable[..., None]:
    """The function of a stage; imports are late, so that a scorer's stage does not load diffusers."""
    if name == "vae":
        from scripts.shapes_world.vae import train_vae

        return train_vae
    if name == "flux":
        from scripts.shapes_world.flux import train_flux

        return train_flux
    if name == "evaluate":
        from scripts.shapes_world.evaluate import evaluate

        return evaluate
    if name == "hpsv2":
        from scripts.shapes_world.openclip import train_hpsv2

        return train_hpsv2
    from scripts.shapes_world.clip import train_clipscore, train_pickscore

    return train_clipscore if name == "clipscore" else train_pickscore


if __name__ == "__main__":
    raise SystemExit(main())
