"""The frame of every door: look at the command line first, run, leave with the right exit code.

Exit codes: 0 done, 1 our error (traceback), 2 bad input (one line), 75 stopped by a signal after a
checkpoint, 130 Ctrl-C.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from jaggrl.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, UserError
from jaggrl.infra.environment import REPOSITORY
from jaggrl.infra.launcher import main_program, register_launcher
from jaggrl.infra.precheck import precheck

CONF = REPOSITORY / "conf"
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID")

Task = Callable[[DictConfig], int | None]


def hydra_door(config_name: str, conf: Path = CONF) -> Callable[[Task], Callable[[], None]]:
    """Make a door of a task: ``python -m jaggrl.<name>`` with overrides, sweeps and one-line errors.

    The task gets the composed config and returns an exit code, or None for 0. A :class:`UserError`, from the
    check of the command line or from the task, becomes one line on stderr and exit code 2: from
    rank 0, and from every rank that meets it once the ranks are joined.

    Example::

        @hydra_door("train")
        def main(cfg: DictConfig) -> int | None:
            ...

        if __name__ == "__main__":
            main()
    """

    def decorate(task: Task) -> Callable[[], None]:
        code: list[int] = []

        @functools.wraps(task)
        def noted(cfg: DictConfig) -> int | None:
            try:
                result = task(cfg)
            except UserError as error:
                if HydraConfig.get().mode is RunMode.MULTIRUN:  # inside another launcher, which reports it
                    raise
                raise SystemExit(_fail(f"error: {error}", EXIT_BAD_INPUT, error.rank)) from None
            code.append(result or EXIT_OK)
            return result

        noted.__module__ = main_program().name if task.__module__ == "__main__" else task.__module__

        @functools.wraps(task)
        def door() -> None:
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # our errors keep their traceback
            register_launcher()
            try:
                precheck(sys.argv[1:], config_name, conf)
                hydra.main(version_base="1.3", config_path=str(conf), config_name=config_name)(noted)()
            except UserError as error:
                sys.exit(_fail(f"error: {error}", EXIT_BAD_INPUT))
            except KeyboardInterrupt:
                sys.exit(_fail("interrupted", EXIT_INTERRUPTED))
            sys.exit(max(code, default=EXIT_OK))

        return door

    return decorate


def task_overrides() -> list[str]:
    """What the command line overrode, without Hydra's own settings: ``["backward=jagg", "seed=1"]``."""
    return list(HydraConfig.get().overrides.task)


def experiment_name() -> str:
    """First level of the run folder: the chosen ``experiment``, or the door's name without one."""
    hydra_config = HydraConfig.get()
    return str(hydra_config.runtime.choices.get("experiment") or hydra_config.job.name)


def _fail(message: str, code: int, rank: int | None = None) -> int:
    own = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    if rank:
        message = f"[rank {rank}] {message}"
    if own == "0" or rank is not None:  # before the ranks meet, all of them see the same
        print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code
