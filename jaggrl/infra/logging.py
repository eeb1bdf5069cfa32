"""What a run tells while it runs: ``metrics.jsonl`` (the source of truth), ``log.txt`` and a live line.

Keys are ``group/name``: ``train/*``, ``reward/<name>/{mean,std,group_std,failed}``, ``adv/*``,
``eval/<name>``, ``time/<stage>_s``, ``perf/*``, ``jagg/*``. A line's ``time/eval_s`` and ``time/save_s`` are those of
the evaluations and checkpoints since the line before; ``time/step_s`` counts neither. Only rank 0 builds anything here
but :func:`setup_logging`.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaggrl.infra.files import write_atomic

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


def setup_logging(rank: int, folder: Path | None = None) -> None:
    """Rank 0: our INFO to stdout and, once the folder is known, to its ``log.txt``; others: warnings.

    Libraries are heard from WARNING on. May be called again: the handlers are replaced.
    """
    root = logging.getLogger()
    held: list[logging.LogRecord] = []
    for handler in root.handlers[:]:
        if isinstance(handler, MemoryHandler):
            held += handler.buffer
            handler.buffer.clear()
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.WARNING)
    for ours in ("jaggrl", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank == 0:
        _add(_Console(), "[%(asctime)s] %(mark)s%(message)s", "%H:%M:%S")
        if folder is not None:
            file = logging.FileHandler(folder / "log.txt", encoding="utf-8")
            _add(file, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    else:
        _add(logging.StreamHandler(), f"[rank {rank}] %(levelname)s %(message)s")
    logging.captureWarnings(True)
    for record in held if rank == 0 else ():
        root.handle(record)


def hold_messages() -> None:
    """Keep warnings given before the run folder is known; ``setup_logging`` tells them then, in ``log.txt`` too.

    A process that ends before tells them on stderr.
    """
    stderr = logging.StreamHandler()
    stderr.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger().handlers[:] = [MemoryHandler(1000, logging.CRITICAL + 1, stderr)]


def _add(handler: logging.Handler, text: str, date: str | None = None) -> None:
    handler.setFormatter(logging.Formatter(text, date))
    logging.getLogger().addHandler(handler)


class _Console(logging.Handler):
    """Stdout, above the live bar; on a terminal the bar itself tells the progress."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "progress", False) and sys.stdout.isatty():
            return
        record.mark = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class MetricsLog:
    """``metrics.jsonl``: one JSON object per rollout step, flushed at once.

    Write the line of a step before its checkpoint: after a resume from step k the file ends with line k.
    """

    def __init__(self, folder: Path, resumed_from: int | None = None) -> None:
        """Open the file; keep the lines up to ``resumed_from``, or none when the run begins anew."""
        self.path = folder / METRICS
        kept = [
            row for row in read_metrics(folder) if resumed_from is not None and row["step"] <= resumed_from
        ]
        write_atomic(self.path, "".join(_encode(row) for row in kept))
        self._last = kept[-1]["step"] if kept else -1
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of ``step``; numbers, 0-d tensors, strings; what is not finite is stored as null.

        Raises ValueError when ``step`` does not grow: a step has one line.
        """
        if step <= self._last:
            raise ValueError(f"step {step} was already written (last is {self._last})")
        self._last = step
        self._file.write(_encode({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``, oldest first; a line cut short by a kill is dropped."""
    path = folder / METRICS
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            log.warning("%s: line %d is no JSON and is dropped", path, number)
    return rows


def plain(value: Any) -> Any:
    """A JSON value: 0-d tensors and numpy scalars as numbers, non-finite numbers as None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _encode(row: Mapping[str, Any]) -> str:
    return json.dumps({key: plain(value) for key, value in row.items()}, ensure_ascii=False) + "\n"


class Progress:
    """The live line: a bar on a terminal, elsewhere one line per step; always in ``log.txt``."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total = total
        self._seconds: list[float] = []
        self._bar = tqdm(
            total=total,
            initial=done,
            file=sys.stdout,
            disable=None,  # off where stdout is no terminal
            leave=False,
            dynamic_ncols=True,
            mininterval=0,  # a step takes seconds: draw each one
            bar_format="{n_fmt}/{total_fmt} |{bar:20}| {desc}",
        )

    def step(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Tell that ``step`` took ``seconds``; ``values`` (reward first) are shown with four digits."""
        self._seconds.append(seconds)
        told = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        line = f"{told}  {seconds:.1f} s/step  {self._left(step)} left"
        self._bar.set_description_str(line, refresh=False)
        self._bar.update(step - self._bar.n)
        log.info("step %d/%d  %s", step, self.total, line, extra={"progress": True})

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def _left(self, step: int) -> str:
        """Time left at the mean pace; the first step, which warms up, counts only while it is alone."""
        paces = self._seconds[1:] or self._seconds
        minutes, seconds = divmod(round((self.total - step) * sum(paces) / len(paces)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
