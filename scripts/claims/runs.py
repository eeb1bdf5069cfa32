"""Training runs as fresh processes, one at a time, each in a folder that a second call finds again."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from jaggrl.errors import UserError
from jaggrl.infra.report import RESULT
from jaggrl.infra.run_folder import JOB_RECORD


def train(
    experiment: str, seed: int, output: Path, overrides: Sequence[str] = (), only_read: bool = False
) -> Path:
    """``python -m jaggrl.train experiment=... seed=...``; a finished run of the same config and code is kept.

    Args:
        experiment: of conf/experiment.
        seed: of the run.
        output: where the run lies, alone.
        overrides: further ones.
        only_read: take the newest finished run below ``output`` as it is.

    Returns:
        the run folder, which holds ``result.json`` and ``metrics.jsonl``.
    """
    if only_read:
        return newest(output)
    command = [sys.executable, "-m", "jaggrl.train", f"experiment={experiment}", f"seed={seed}"]
    command += [f"output={output}", "logger=none", *overrides]
    print("+", " ".join(command[1:]), flush=True)
    with TemporaryDirectory() as scratch:  # the newest run need not be this one: a finished one is kept
        record = Path(scratch) / "job.json"
        code = subprocess.run(command, check=False, env=os.environ | {JOB_RECORD: str(record)}).returncode
        if code:
            raise UserError(f"{experiment} seed {seed} ended with exit code {code}; its log is above")
        return Path(json.loads(record.read_text())["folder"])


def newest(output: Path) -> Path:
    """The folder of the newest finished run below ``output``."""
    results = sorted(output.rglob(RESULT), key=lambda file: file.stat().st_mtime)
    if not results:
        raise UserError(f"no finished run lies in {output}; train it first, without --only-read")
    return results[-1].parent


def put_into(readme: Path, name: str, text: str) -> None:
    """Replace what stands between a file's markers ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = readme.read_text()
    if begin not in old or end not in old:
        raise UserError(f"{readme} has no lines {begin} and {end}; add them where the table belongs")
    before, rest = old.split(begin, 1)
    readme.write_text(f"{before}{begin}\n{text}{end}{rest.split(end, 1)[1]}")
