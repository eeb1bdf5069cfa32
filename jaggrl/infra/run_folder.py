"""The folder of a run: its name, who owns it, and whether the run in it goes on.

``outputs/<experiment>/<overrides>/`` is named by what was overridden, not by a timestamp, so the name says
what changed and the same command finds its run again. Rank 0 alone calls :func:`decide` and tells the others.

A folder belongs to the process that holds the lock on its ``.lock`` file (the kernel drops it when that
process dies, however it dies); two launches in the same second therefore land in two folders.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from omegaconf import OmegaConf

from jaggrl.errors import UserError
from jaggrl.infra.environment import describe_environment
from jaggrl.infra.files import read_json, write_atomic, write_json

Action = Literal["new", "resume", "finished"]

NAME_LIMIT = 100  # characters of a folder name; file systems allow 255 bytes
# What says where, how to log or what is already known, not what to compute: not in the folder's name or hash.
BYSTANDERS = ("hydra", "logger", "output", "resume", "evaluation.baseline")
JOB_RECORD = "JAGGRL_JOB_RECORD"  # a sweep asks its jobs to write down their folder in this file


@dataclass
class Decision:
    """Where this run lives and whether it is new there, goes on, or is already done.

    Attributes:
        path: the run folder, absolute.
        action: ``new`` | ``resume`` (unfinished, same config and code) | ``finished`` (nothing left to do).
        reason: one line for the log.
    """

    path: Path
    action: Action
    reason: str
    _lock: IO[str] | None = field(default=None, repr=False)

    def close(self, status: Literal["finished", "failed", "stopped"], detail: str = "") -> None:
        """Write the outcome to ``status.json`` and let the folder go; only ``finished`` is never resumed."""
        if self._lock is None:
            return
        content = read_json(self.path / "status.json") or {}
        content |= {"status": status, "detail": detail, "ended": _now()}
        write_json(self.path / "status.json", content)
        self._lock.close()
        self._lock = None


def decide(
    root: Path,
    experiment: str,
    overrides: Sequence[str],
    config: dict[str, Any],
    code_hash: str,
    resume: str = "auto",
) -> Decision:
    """Choose the run folder, take its lock and write down what this run is (rank 0 only).

    Args:
        root: parent of all runs, usually ``outputs``.
        experiment: first level below it.
        overrides: command-line overrides, ``["backward=jagg", "seed=1"]``; they name the second level.
        config: the resolved config as plain containers.
        code_hash: :func:`jaggrl.infra.environment.code_hash`.
        resume: ``auto`` | ``none`` | path of a run folder. ``auto`` continues the newest unfinished run
            of the same config and code, reports a finished one, and starts beside (numbered suffix) anything
            else, including a folder that a live process holds. ``none`` always starts a new folder. A path
            continues that run even if config or code changed since, and says what changed.

    Raises:
        UserError: ``resume`` names no run folder, or one that a live process holds.
    """
    identity = {"config_hash": config_hash(config), "code_hash": code_hash}
    if resume in ("auto", "none"):
        base = root.resolve() / _safe(experiment) / folder_name(overrides)
        decision = (_continue(base, identity) if resume == "auto" else None) or _start(base)
    else:
        decision = _continue_at(Path(resume), config, identity)
    if decision.action != "finished":
        _write_identity(decision.path, config, overrides, identity, decision.action)
    if record := os.environ.get(JOB_RECORD):
        write_json(Path(record), {"folder": str(decision.path), "action": decision.action})
    return decision


def folder_name(overrides: Sequence[str]) -> str:
    """Bounded file name that says what was overridden; hashed where characters or length had to go.

    >>> folder_name(["seed=1", "backward=jagg", "logger=none", "experiment=shapes"])
    'backward=jagg,seed=1'
    """
    told = sorted(o for o in overrides if not _is_bystander(o))
    exact = ",".join(told)
    name = _safe(exact)
    if name == exact and len(name) <= NAME_LIMIT:
        return name or "default"
    digest = hashlib.sha256(exact.encode()).hexdigest()[:8]
    return f"{name[: NAME_LIMIT - 9]}-{digest}"


def config_hash(config: dict[str, Any]) -> str:
    """Hash of what is computed: the config without the bystanders."""
    told = {key: value for key, value in _flat(config) if not _is_bystander(key)}
    canonical = json.dumps(told, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _is_bystander(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0].replace("/", ".")
    return any(key == name or key.startswith(name + ".") for name in (*BYSTANDERS, "experiment"))


def _safe(name: str) -> str:
    """Replace everything that is awkward in a file name; never empty dots that would leave the folder."""
    return re.sub(r"[^A-Za-z0-9=._,+~-]", "_", name).lstrip(".")


def _candidates(base: Path) -> Iterator[Path]:
    """``base``, ``base-2``, ``base-3``, ... without end."""
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def _continue(base: Path, identity: dict[str, str]) -> Decision | None:
    """The newest existing run of this identity that nobody holds; None when there is none."""
    existing = []
    for path in _candidates(base):
        if not path.exists():
            break
        existing.append(path)
    for path in reversed(existing):
        status = read_json(path / "status.json")
        if status is None or any(status.get(key) != value for key, value in identity.items()):
            continue
        if status["status"] == "finished":
            return Decision(path, "finished", f"{path} is finished: nothing to do (resume=none starts anew)")
        lock = _try_lock(path)
        if lock is None:
            continue  # a live process is in there
        if (read_json(path / "status.json") or status)[
            "status"
        ] == "finished":  # just now, before the lock was ours
            lock.close()
            return Decision(path, "finished", f"{path} is finished: nothing to do")
        return Decision(path, "resume", f"continuing the unfinished run in {path}", lock)
    return None


def _start(base: Path) -> Decision:
    """A folder that holds no run yet, created and locked by this process; names an unfinished run beside it."""
    beside = ""
    for path in _candidates(base):
        path.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
        if lock is None:
            continue  # a live process is in there
        if not (path / "status.json").exists():  # fresh, or its process died before it began
            return Decision(path, "new", f"new run in {path}{beside}", lock)
        if (read_json(path / "status.json") or {}).get("status") != "finished":
            beside = f"; {path} is not finished: resume={path} goes on with it"
        lock.close()
    raise AssertionError("unreachable: the candidates have no end")


def _continue_at(path: Path, config: dict[str, Any], identity: dict[str, str]) -> Decision:
    """Continue the run in a folder that the user names, whatever changed since; say what did."""
    path = path.resolve()
    status = read_json(path / "status.json")
    if status is None:
        raise UserError(
            f"resume={path} is no run folder (it has no status.json): give the folder of a run, or auto"
        )
    lock = _try_lock(path)
    if lock is None:
        holder = (path / ".lock").read_text().strip()
        raise UserError(f"resume={path} is in use by {holder}: stop that process first")
    same_config = status.get("config_hash") == identity["config_hash"]
    if status["status"] == "finished" and same_config:
        lock.close()
        return Decision(path, "finished", f"{path} is finished: nothing to do")
    changes = [] if same_config else _differences(path, config)
    if status.get("code_hash") != identity["code_hash"]:
        changes.append("the code")
    told = f"; changed since: {', '.join(changes)}" if changes else ""
    return Decision(path, "resume", f"continuing {path}{told}", lock)


def _differences(path: Path, config: dict[str, Any]) -> list[str]:
    """Dotted keys whose value differs from the config stored in the folder."""
    try:
        stored = OmegaConf.to_container(OmegaConf.load(path / "config.resolved.yaml"))
    except (OSError, ValueError):
        return ["config (the stored one cannot be read)"]
    old, new = dict(_flat(stored)), dict(_flat(config))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [key for key in keys if not _is_bystander(key)]


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"a": {"b": 1}}`` -> ``("a.b", 1)``."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _try_lock(path: Path) -> IO[str] | None:
    """Hold the folder for the life of this process; None when a live process already does."""
    lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (held open on purpose)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _write_identity(
    path: Path, config: dict[str, Any], overrides: Sequence[str], identity: dict[str, str], action: Action
) -> None:
    """Config, overrides and environment; last, as the sign of a begun run, ``status.json``."""
    (path / ".hydra").mkdir(exist_ok=True)
    resolved = OmegaConf.to_yaml(OmegaConf.create(config))
    write_atomic(path / ".hydra" / "config.yaml", resolved)
    write_atomic(path / ".hydra" / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(list(overrides))))
    write_atomic(path / "config.resolved.yaml", resolved)
    write_atomic(path / "env.txt", describe_environment())
    earlier = read_json(path / "status.json") or {}
    begun = earlier.get("begun") if action == "resume" else None
    status = {"status": "running", "begun": begun or _now(), "attempts": earlier.get("attempts", 0) + 1}
    write_json(path / "status.json", status | identity | {"overrides": list(overrides), "pid": os.getpid()})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
