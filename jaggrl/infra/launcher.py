"""Sweeps (``-m``): one fresh process per job, one at a time, going on after a failure, with a summary.

Hydra's own launcher runs all jobs in one process (memory and state leak from one to the next) and shows only
the first failure; submitit's local one starts all at once. Ours is the default; the others stay available as
``hydra/launcher=basic`` and ``hydra/launcher=submitit_local|submitit_slurm``.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from jaggrl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError, unknown
from jaggrl.infra.files import read_json, write_json
from jaggrl.infra.run_folder import JOB_RECORD
from jaggrl.infra.signals import WATCHED
from jaggrl.infra.table import table

PLUGIN = "hydra_plugins.jaggrl"  # the module name that conf/hydra/launcher/sequential.yaml gives


class Program(NamedTuple):
    """How this process was started: ``jaggrl.train`` and the arguments after the interpreter."""

    name: str
    arguments: list[str]


def main_program() -> Program:
    """``python -m jaggrl.train`` or ``python script.py``, whichever it was."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return Program(spec.name, ["-m", spec.name])
    return Program(Path(sys.argv[0]).stem, [os.path.abspath(sys.argv[0])])


@dataclass
class Job:
    """One line of a sweep's summary."""

    number: int
    overrides: list[str]
    exit_code: int
    seconds: float
    folder: str

    def stopped(self) -> bool:
        """Whether it left after a checkpoint when asked to; torchrun says 1 then, so that the run's status is asked."""
        status = (read_json(Path(self.folder) / "status.json") or {}).get("status") if self.folder else None
        return self.exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED) or (
            self.exit_code != 0 and status == "stopped"
        )

    def result(self) -> str:
        """Gain of the trained rewards in the run's ``result.json``: ``hpsv2 +0.0120 [+0.0101, +0.0140]``."""
        rewards = (read_json(Path(self.folder) / "result.json") or {}).get("rewards", {})
        told = [
            f"{name} {r['gain']:+.4f} [{r['ci_low']:+.4f}, {r['ci_high']:+.4f}]"
            for name, r in rewards.items()
            if r.get("trained")
        ]
        return "; ".join(told) or "-"


class SequentialLauncher(Launcher):
    """Hydra launcher: each job is ``python -m <door> <overrides>``, or torchrun when ``nproc`` > 1.

    Args:
        nproc: ranks per job.
        on_error: ``continue`` with the next job after a failed one, or ``stop``.
    """

    def __init__(self, nproc: int = 1, on_error: str = "continue") -> None:
        self.nproc = nproc
        self.on_error = on_error
        self.folder = Path()
        self._stop: signal.Signals | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the settings and take the sweep's folder; Hydra calls this once.

        Raises UserError for a setting that cannot work (here, because Hydra wraps what a constructor raises).
        """
        if self.nproc < 1:
            raise UserError(f"hydra.launcher.nproc={self.nproc}: give at least 1 rank per job")
        if self.on_error not in ("continue", "stop"):
            raise unknown("hydra.launcher.on_error", self.on_error, ("continue", "stop"))
        self.folder = Path(config.hydra.sweep.dir).absolute()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs, print and store the summary, and leave with a non-zero code if any failed."""
        jobs: list[Job] = []
        for index, overrides in enumerate(job_overrides, start=1):
            told = " ".join(overrides) or "(defaults)"
            print(f"\n=== job {index} of {len(job_overrides)}: {told}", flush=True)
            jobs.append(self._run(initial_job_idx + index, list(overrides)))
            if self._stop or (jobs[-1].exit_code and self.on_error == "stop"):
                break
        left = len(job_overrides) - len(jobs)
        self._summarise(jobs, left)
        if self._stop:
            raise SystemExit(EXIT_INTERRUPTED if self._stop is signal.SIGINT else EXIT_PREEMPTED)
        if any(job.exit_code for job in jobs):
            raise SystemExit(1)
        return [JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED) for job in jobs]

    def _run(self, number: int, overrides: list[str]) -> Job:
        """One job: its output goes to the terminal and to ``<number>.log``."""
        record = self.folder / f"{number:03d}.json"
        environment = os.environ | {JOB_RECORD: str(record), "PYTHONUNBUFFERED": "1"}
        begun = time.monotonic()
        with open(self.folder / f"{number:03d}.log", "wb") as file:
            # Its own session: a Ctrl-C reaches us alone and is handed on exactly once.
            process = subprocess.Popen(
                self._command(overrides),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            previous = {n: signal.signal(n, lambda n, _: self._pass_on(n, process)) for n in WATCHED}
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
                code = process.wait()
            finally:
                for watched, handler in previous.items():
                    signal.signal(watched, handler)
        folder = (read_json(record) or {}).get("folder", "")
        code = code if code >= 0 else 128 - code  # killed by a signal, in the shell's notation
        return Job(number, overrides, code, round(time.monotonic() - begun, 1), folder)

    def _command(self, overrides: Sequence[str]) -> list[str]:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.nproc}"]
        arguments = get_args_parser().parse_args(sys.argv[1:])
        flags = {"config-name": arguments.config_name, "config-dir": arguments.config_dir}
        flags["config-path"] = arguments.config_path and os.path.abspath(arguments.config_path)
        passed = [f"--{flag}={value}" for flag, value in flags.items() if value]
        program = main_program().arguments
        return [sys.executable, *(ranks if self.nproc > 1 else []), *program, *passed, *overrides]

    def _pass_on(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        self._stop = signal.Signals(number)
        process.send_signal(signal.SIGINT if self._stop is signal.SIGINT else signal.SIGTERM)

    def _summarise(self, jobs: Sequence[Job], left: int) -> None:
        write_json(self.folder / "summary.json", {"jobs": [asdict(job) for job in jobs], "not_started": left})
        shown = [_shown(job.folder) for job in jobs]
        rows = [
            (job.number, " ".join(job.overrides), job.exit_code, f"{job.seconds:.1f}", job.result(), folder)
            for job, folder in zip(jobs, shown, strict=True)
        ]
        stopped = [job.number for job in jobs if job.stopped()]
        failed = [job.number for job in jobs if job.exit_code and job.number not in stopped]
        print(
            "\n" + table(["job", "overrides", "exit", "seconds", "gain of trained rewards", "folder"], rows)
        )
        told = f"{len(jobs) - len(failed) - len(stopped)} of {len(jobs) + left} jobs done"
        for word, numbers in (("failed", failed), ("stopped", stopped)):
            told += f"; {word}: {', '.join(map(str, numbers))}" if numbers else ""
        told += f"; not started: {left}" if left else ""
        print(f"{told}; logs in {_shown(str(self.folder))}", flush=True)


def register_launcher() -> None:
    """Make the launcher known to Hydra, which takes launchers from its ``hydra_plugins`` namespace only."""
    SequentialLauncher.__module__ = PLUGIN
    sys.modules[PLUGIN] = sys.modules[__name__]
    Plugins.instance().register(SequentialLauncher)


def _shown(folder: str) -> str:
    """The path relative to here when it lies below, else as it is."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if folder and path.is_relative_to(Path.cwd()) else folder or "-"
