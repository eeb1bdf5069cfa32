"""Overlay the curves and stage times of runs: ``python scripts/plot_curves.py outputs/a/x outputs/a/y``."""

import argparse
import sys
from pathlib import Path

from jaggrl.errors import EXIT_BAD_INPUT, UserError
from jaggrl.infra.logging import METRICS, read_metrics
from jaggrl.infra.plots import draw_curves, draw_timing


def labels(folders: list[Path]) -> list[str]:
    """Shortest names that tell the folders apart: the last part, or more parts where that is shared."""
    paths = [folder.resolve() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


def plot(folders: list[Path], out: Path | None) -> list[Path]:
    """Draw ``curves.png`` and ``timing.png`` into ``out``; for a single run by default beside its metrics."""
    for folder in folders:
        if not read_metrics(folder):
            raise UserError(f"{folder} has no {METRICS} with a line in it: give folders of runs")
    if out is None and len(folders) > 1:
        raise UserError("several runs: say where to put the pictures with --out <folder>")
    target = out or folders[0]
    target.mkdir(parents=True, exist_ok=True)
    runs = dict(zip(labels(folders), map(read_metrics, folders), strict=True))
    files = [target / "curves.png", target / "timing.png"]
    draw_curves(runs, files[0])
    draw_timing(runs, files[1])
    return files


def main() -> None:
    """Read the command line, draw, name the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders (with metrics.jsonl)")
    parser.add_argument("--out", type=Path, help="folder for curves.png and timing.png")
    arguments = parser.parse_args()
    try:
        for file in plot(arguments.runs, arguments.out):
            print(file)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
