"""metrics.jsonl is the source of truth: whole lines, finite numbers, cut back on resume."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from jaggrl.infra.logging import MetricsLog, Progress, hold_messages, read_metrics, setup_logging


@pytest.fixture
def clean_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_one_line_per_step(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    metrics.write(0, {"eval/hpsv2": 0.25})
    metrics.write(1, {"reward/hpsv2/mean": torch.tensor(0.5), "train/lr": np.float32(0.5), "note": "π"})
    assert read_metrics(tmp_path) == [  # flushed, not only closed
        {"step": 0, "eval/hpsv2": 0.25},
        {"step": 1, "reward/hpsv2/mean": 0.5, "train/lr": 0.5, "note": "π"},
    ]
    with pytest.raises(ValueError, match="step 1 was already written"):
        metrics.write(1, {})


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    MetricsLog(tmp_path).write(1, {"a": float("nan"), "b": torch.tensor(float("inf")), "c": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None, "c": 1.0}


@pytest.mark.parametrize(("resumed_from", "kept"), [(None, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resume_cuts_back(tmp_path: Path, resumed_from: int | None, kept: list[int]) -> None:
    first = MetricsLog(tmp_path)
    for step in range(4):
        first.write(step, {"x": step})
    first.close()
    again = MetricsLog(tmp_path, resumed_from)
    assert [row["step"] for row in read_metrics(tmp_path)] == kept
    again.write(10, {"x": 10})
    assert [row["step"] for row in read_metrics(tmp_path)] == [*kept, 10]


def test_what_is_said_before_the_folder_is_known_reaches_its_log(tmp_path: Path, clean_logging: None) -> None:
    hold_messages()
    logging.getLogger("jaggrl.build").warning("said early")
    for _ in range(2):
        setup_logging(0, tmp_path)
    assert (tmp_path / "log.txt").read_text().count("WARNING jaggrl.build: said early") == 1


def test_what_is_said_before_a_refusal_reaches_stderr(
    capsys: pytest.CaptureFixture[str], clean_logging: None
) -> None:
    hold_messages()
    logging.getLogger("jaggrl.build").warning("said early")
    assert not capsys.readouterr().err
    logging.getLogger().handlers[0].close()  # as at the end of a process
    assert capsys.readouterr().err == "WARNING said early\n"


def test_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x')
    MetricsLog(tmp_path, resumed_from=1).write(2, {"x": 2})
    assert read_metrics(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}]
    assert "line 2 is no JSON" in caplog.text


def test_main_rank_talks_and_keeps_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clean_logging: None
) -> None:
    setup_logging(0, tmp_path)
    logging.getLogger("jaggrl.x").info("hello")
    logging.getLogger("jaggrl.x").warning("careful")
    logging.getLogger("elsewhere").info("chatter")
    out = capsys.readouterr().out
    assert "] hello\n" in out
    assert "] WARNING: careful\n" in out
    assert "chatter" not in out
    assert "INFO jaggrl.x: hello" in (tmp_path / "log.txt").read_text()


def test_other_ranks_only_warn(capsys: pytest.CaptureFixture[str], clean_logging: None) -> None:
    setup_logging(1)
    logging.getLogger("jaggrl.x").info("hello")
    logging.getLogger("jaggrl.x").warning("careful")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "[rank 1] WARNING careful\n"


def test_progress_is_one_plain_line_per_step_without_a_terminal(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from jaggrl.infra.logging import Progress, setup_logging\n"
        f"setup_logging(0, Path({str(tmp_path)!r})); bar = Progress(4, done=1)\n"
        "[bar.step(s, t, {'reward': 0.28471, 'grad': 3.0}) for s, t in ((2, 90.0), (3, 30.0), (4, 30.0))]\n"
        "bar.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = [line.split("] ", 1)[1] for line in done.stdout.splitlines()]
    assert lines == [
        "step 2/4  reward 0.2847  grad 3  90.0 s/step  0:03:00 left",
        "step 3/4  reward 0.2847  grad 3  30.0 s/step  0:00:30 left",  # the first step does not count
        "step 4/4  reward 0.2847  grad 3  30.0 s/step  0:00:00 left",
    ]
    assert (tmp_path / "log.txt").read_text().count("s/step") == 3


def test_progress_pace() -> None:
    bar = Progress(100)
    bar.step(1, 1000.0, {})
    bar.step(2, 2.0, {})
    assert bar._left(2) == "0:03:16"
    assert bar._left(100) == "0:00:00"
