"""Weights & Biases from rank 0: never asks, never waits long, never ends a run.

The mode is decided before anything is initialised, because a failed online start leaves the client unable to
go offline in the same process. ``metrics.jsonl`` stays the source of truth.
"""

import logging
import netrc
import os
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from jaggrl.errors import UserError, unknown
from jaggrl.infra.environment import git_commit
from jaggrl.infra.files import write_atomic
from jaggrl.infra.logging import plain

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")
INIT_SECONDS, FINISH_SECONDS, REACH_SECONDS = 60, 60, 5


def decide_mode(requested: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Choose ``online`` | ``offline`` | ``disabled`` without asking anybody.

    Args:
        requested: ``logger.wandb``. ``auto`` follows ``WANDB_MODE`` when set, else is online with a key
            and off without one. Whoever wants online but lacks the key or the server gets offline.
        environ: environment variables.

    Returns:
        The mode and the reason, one line for the log.
    """
    if requested not in MODES:
        raise unknown("logger.wandb", requested, MODES)
    wanted = requested
    if requested == "auto" and environ.get("WANDB_MODE") in MODES:
        wanted = environ["WANDB_MODE"]
    if wanted in ("offline", "disabled"):
        return wanted, f"asked for {wanted}"
    url = environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if not _has_key(url, environ):
        return ("disabled" if wanted == "auto" else "offline"), "there is no API key (WANDB_API_KEY or netrc)"
    if not _answers(url):
        return "offline", f"{url} does not answer"
    return "online", f"{url} answers"


class WandbRun:
    """One W&B run, or nothing: every method is safe to call whatever became of the server."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a rollout step, on our own step axis (points after a resume are kept)."""
        if self._run is not None:
            row = {key: plain(value) for key, value in metrics.items()}
            self._guard("log", lambda: self._run.log({"step": step, **row}), 10)

    def images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        """Send pictures under ``samples/...`` with their captions."""
        if self._run is None:
            return

        def send() -> None:
            import wandb

            pictures = [wandb.Image(str(f), caption=c) for f, c in zip(files, captions, strict=True)]
            self._run.log({"step": step, key: pictures})

        self._guard("images", send, 30)

    def finish(self, exit_code: int = 0) -> None:
        """End the run; what the server does not take within a minute stays in the run folder."""
        if self._run is not None:
            self._guard("finish", lambda: self._run.finish(exit_code=exit_code), FINISH_SECONDS)
            self._run = None

    def _guard(self, what: str, work: Callable[[], Any], seconds: float) -> None:
        try:
            _within(seconds, work)
        except Exception as error:  # noqa: BLE001 (any failure of the service is its own)
            log.warning("W&B %s failed and is off from here: %s", what, _line(error))
            self._run = None


def open_wandb(
    mode: str, project: str, entity: str | None, folder: Path, name: str, config: Mapping[str, Any]
) -> WandbRun:
    """Start, or on resume continue, the W&B run of a run folder (rank 0 only).

    Args:
        mode: ``logger.wandb``; see :func:`decide_mode`.
        project: W&B project.
        entity: W&B team; None for the key's own.
        folder: run folder; the run id is kept in its ``wandb_id.txt``.
        name: shown name.
        config: resolved config; the git commit is added.
    """
    decided, why = decide_mode(mode, os.environ)
    log.info("W&B: %s (%s)", decided, why)
    if decided == "disabled":
        return WandbRun()
    try:
        run = _within(INIT_SECONDS, lambda: _init(decided, project, entity, folder, name, config))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (any failure of the service is its own)
        log.warning("W&B did not start and is off: %s", _line(error))
        return WandbRun()
    if decided == "online":
        log.info("W&B run: %s", run.url)
    return WandbRun(run)


def _init(
    mode: str, project: str, entity: str | None, folder: Path, name: str, config: Mapping[str, Any]
) -> Any:
    import wandb

    note = folder / "wandb_id.txt"
    if not note.exists():
        write_atomic(note, uuid.uuid4().hex[:10] + "\n")
    run = wandb.init(
        mode=mode,  # type: ignore[arg-type]
        project=project,
        entity=entity,
        name=name,
        id=note.read_text().strip(),
        resume="allow",
        dir=folder,
        config={**config, "git": git_commit()},
        settings=wandb.Settings(init_timeout=INIT_SECONDS / 2, console="off", silent=True),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Result of ``work``, or its exception, or TimeoutError; the thread of late work is left behind."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _has_key(url: str, environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    file = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(file).authenticators(urlparse(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(url: str) -> bool:
    """Whether the server says anything at all; one that accepts and keeps silent does not."""
    try:
        urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
