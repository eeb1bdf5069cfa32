"""Checkpoints that are whole or not there, and that fit any number of ranks.

``torch.distributed.checkpoint`` writes the state (each rank its shards) into ``.tmp-step_000020``; rank 0
then lists every file with size and hash in ``manifest.json`` and renames the folder to ``step_000020``. A
kill at any point leaves the previous checkpoint in place. Reading starts from the newest folder whose files
match their manifest, and sets a broken one aside with a warning.

Every method is collective: all ranks call it, in the same order, and all raise together.
"""

import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from jaggrl.errors import UserError
from jaggrl.infra.distributed import broadcast
from jaggrl.infra.files import fsync_folder
from jaggrl.infra.manifest import find_problem, write_manifest

log = logging.getLogger(__name__)

TEMPORARY, BROKEN = ".tmp-", "broken-"
SLACK = 8 << 20  # bytes beside the tensors: metadata, manifest, file system blocks


class Checkpoints:
    """The checkpoints of one run, in ``folder/step_000020``; the newest ``keep`` stay.

    Example::

        checkpoints = Checkpoints(run / "checkpoints")
        state = {"model": ..., "optimizer": ..., "step": 0}          # nested dicts of tensors and objects
        if path := checkpoints.latest():
            checkpoints.load(path, state)                            # tensors and values change in place
        ...
        checkpoints.save(20, state)
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"checkpoints to keep is {keep}: keep at least 1")
        self.folder = folder
        self.keep = keep

    def check_space(self, state: dict[str, Any]) -> None:
        """Refuse, before the first step, a disk that cannot hold ``keep`` checkpoints and the next one.

        Raises UserError with the bytes needed and free.
        """
        size = _stored_bytes(state)
        _on_main(lambda: self._require(size * (self.keep + 1 - len(self._steps()))))

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write ``step_<step>``, then remove what is older than the newest ``keep``.

        Args:
            step: number of finished rollout steps.
            state: nested dicts of tensors, DTensors and picklable values, with the same keys on every rank.

        Raises:
            UserError: the disk is full or not writable; the previous checkpoint is untouched.
        """
        temporary = self.folder / f"{TEMPORARY}{_name(step)}"
        size = _stored_bytes(state)
        _on_main(lambda: self._prepare(temporary, size))
        try:
            with _quiet():
                dcp.save(state, checkpoint_id=temporary)
        except (CheckpointException, OSError, RuntimeError) as error:
            _on_main(lambda: shutil.rmtree(temporary, ignore_errors=True))
            if not _is_about_files(error):
                raise
            raise UserError(f"cannot write {self.folder / _name(step)}: {_cause(error)}") from error
        return _on_main(lambda: self._publish(temporary, step))

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None when there is none yet; removes leftovers of a killed save.

        Raises UserError when there are checkpoints but none is whole: starting anew must be asked for.
        """
        return _on_main(self._find)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        """Fill ``state`` in place from ``path``, at any number of ranks.

        Raises:
            UserError: keys or shapes of the checkpoint are not those of ``state``.
        """
        try:
            with _quiet():
                dcp.load(state, checkpoint_id=path)
        except CheckpointException as error:
            remedy = "it is another model's or another setup's; resume=none starts anew"
            raise UserError(f"checkpoint {path} does not fit: {_cause(error)}; {remedy}") from error

    def _steps(self) -> list[Path]:
        """Published checkpoints, oldest first."""
        found = self.folder.glob("step_*") if self.folder.is_dir() else ()
        return sorted((p for p in found if re.fullmatch(r"step_\d+", p.name)), key=step_of)

    def _require(self, size: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if size + SLACK > free:
            raise UserError(
                f"{self.folder} has {_gigabytes(free)} free, a checkpoint needs {_gigabytes(size + SLACK)}: "
                "free some space or put the outputs on another disk"
            )

    def _prepare(self, temporary: Path, size: int) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        self._require(size)
        temporary.mkdir(parents=True)

    def _publish(self, temporary: Path, step: int) -> Path:
        """Manifest, rename, and only then the rotation."""
        write_manifest(temporary, {"step": step, "ranks": _world(), "torch": torch.__version__})
        final = self.folder / _name(step)
        self._remove(final)  # an earlier visit to this step, before a fall back to an older checkpoint
        os.replace(temporary, final)
        fsync_folder(self.folder)
        others = [path for path in self._steps() if path != final]
        older = [path for path in others if step_of(path) < step]
        for path in others:
            if path not in older[max(0, len(older) - (self.keep - 1)) :]:
                self._remove(path)
        return final

    def _remove(self, path: Path) -> None:
        """Take the name away first, so that a kill never leaves half a checkpoint under a good name."""
        if path.exists():
            doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _find(self) -> Path | None:
        if not self.folder.is_dir():
            return None
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        steps = self._steps()
        for path in reversed(steps):
            problem = find_problem(path)
            if problem is None:
                return path
            aside = path.with_name(f"{BROKEN}{path.name}")
            log.warning("checkpoint %s is broken (%s): set aside as %s", path, problem, aside.name)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: use resume=none"
            )
        return None


def step_of(path: Path) -> int:
    """Step number of ``.../step_000020``."""
    return int(path.name.removeprefix("step_"))


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _stored_bytes(state: dict[str, Any]) -> int:
    """Bytes that all ranks together will write: every shard, and replicated tensors (HSDP's too) once."""
    shards = sum(t.to_local().nbytes // _copies(t) for t in _tensors(state) if isinstance(t, DTensor))
    whole = sum(t.nbytes for t in _tensors(state) if not isinstance(t, DTensor))
    return sum(_gather(shards)) + whole


def _copies(tensor: DTensor) -> int:
    """How many ranks hold the same shard."""
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, placed in enumerate(tensor.placements) if placed.is_replicate())


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _tensors(child)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    """``value`` of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_main(work: Callable[[], Any]) -> Any:
    """Run ``work`` on rank 0; its result, or its error as a UserError, on every rank."""
    outcome: tuple[Any, str | None] = (None, None)
    if _rank() == 0:
        try:
            outcome = (work(), None)
        except (UserError, OSError) as error:
            outcome = (None, str(error))
    result, problem = broadcast(outcome)
    if problem is not None:
        raise UserError(problem)
    return result


def _quiet() -> AbstractContextManager[Any]:
    """Without the library's remark that a single process is a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _first(error: BaseException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _is_about_files(error: BaseException) -> bool:
    """Whether the disk is to blame, not our code; torch's own writer reports a full one as a RuntimeError."""
    return isinstance(_first(error), OSError) or "writ" in str(_first(error))


def _cause(error: BaseException) -> str:
    """What went wrong, in one line."""
    return (str(_first(error)) or type(_first(error)).__name__).strip().splitlines()[0]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
