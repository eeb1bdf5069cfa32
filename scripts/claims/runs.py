"""Training runs as fresh processes, one at a time, each in a folder that a second call finds again."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaggrl.errors import UserError
from jaggrl.infra.report import RESULT


def train(experiment: str, seed: int, output: Path, overrides: Sequence[str] = ()) -> Path:
    """``python -m jaggrl.train experiment=... seed=...``; a finished run of the same config and code is kept.

    Returns:
        the run folder, which holds ``result.json`` and ``metrics.jsonl``.
    """
    command = [sys.executable, "-m", "jaggrl.train", f"experiment={experiment}", f"seed={seed}"]
    command += [f"output={output}", "logger=none", *overrides]
    print("+", " ".join(command[1:]), flush=True)
    code = subprocess.run(command, check=False).returncode
    results = sorted(output.rglob(RESULT), key=lambda file: file.stat().st_mtime)
    if code or not results:
        raise UserError(f"{experiment} seed {seed} ended with exit code {code}; its log is above")
    return results[-1].parent
