"""One training job, from the composed config to an exit code: what the training door runs."""

import logging
from pathlib import Path

from omegaconf import DictConfig

from jaggrl.build import Config, check, resolve
from jaggrl.errors import UserError
from jaggrl.infra import distributed
from jaggrl.infra.cli import experiment_name, task_overrides
from jaggrl.infra.distributed import Ranks
from jaggrl.infra.environment import code_hash
from jaggrl.infra.logging import hold_messages, setup_logging
from jaggrl.infra.run_folder import Decision, decide
from jaggrl.infra.signals import StopSignal
from jaggrl.session import Session

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> int | None:
    """Check the config, join the ranks, find the folder, train."""
    config = resolve(cfg)
    hold_messages()
    plan = check(config)
    settings = config["distributed"]
    with distributed.joined(settings["device"], settings["timeout_s"]) as ranks:
        decision, folder, action, reason = _folder(config, ranks)
        setup_logging(ranks.rank, folder if action != "finished" else None)
        log.info("%s", reason)
        if action == "finished":
            return None
        status, detail = "failed", ""
        try:
            with StopSignal() as stop:
                code = Session(config, plan, ranks, folder, stop).run()
            status = "stopped" if code else "finished"
            return code
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"
            raise
        finally:
            if decision is not None:
                decision.close(status, detail)  # type: ignore[arg-type]


def _folder(config: Config, ranks: Ranks) -> tuple[Decision | None, Path, str, str]:
    """Rank 0 decides and locks the run folder; every rank learns where it is, or why there is none."""
    decision, problem = None, ""
    if ranks.main:
        try:
            decision = decide(
                Path(config["output"]),
                experiment_name(),
                task_overrides(),
                config,
                code_hash(),
                config["resume"],
            )
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"output={config['output']} cannot be written ({error}): give another folder"
    told = (decision.path, decision.action, decision.reason) if decision else problem
    told = distributed.broadcast(told)
    if isinstance(told, str):
        raise UserError(told)
    path, action, reason = told
    return decision, path, action, reason
