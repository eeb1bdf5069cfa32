"""Kill the run, run the same command again: weights and metrics equal the uninterrupted run's (CPU, fp32)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jaggrl.build import check
from jaggrl.errors import EXIT_PREEMPTED, UserError
from jaggrl.infra.distributed import Ranks
from jaggrl.infra.signals import StopSignal
from jaggrl.session import Session
from tests.test_config import ROOT, composed
from tests.tiny_flux import tiny_flux_folder

SIZES = [
    "debug=smoke",
    "rollouts=4",
    "reward=shapes_verifier",
    "reward.eval=[shapes_verifier]",
    "algorithm.rollout.schedule.steps=5",
    "updates_per_rollout=2",
    "checkpoint.every=1",
    "check=off",
]


class StopWhen(StopSignal):
    """Asks for a stop as soon as ``when`` holds."""

    def __init__(self, when: Callable[[], bool]) -> None:
        super().__init__()
        self.when = when

    @property
    def requested(self) -> bool:
        if self.when():
            self._received = signal.SIGTERM
        return self._received is not None


def at_look(number: int) -> Callable[[], bool]:
    """The n-th time that the session looks."""
    looks = iter(range(1, number + 1))
    return lambda: next(looks) == number


def at_line(folder: Path, number: int) -> Callable[[], bool]:
    """The n-th rollout's line is written."""
    file = folder / "metrics.jsonl"
    return lambda: file.exists() and len(file.read_text().splitlines()) == number


def session(folder: Path, *overrides: str, stop: StopSignal | None = None) -> int | None:
    """One process's life in a run folder."""
    folder.mkdir(exist_ok=True)
    config = composed(*SIZES, f"model.path={tiny_flux_folder()}", *overrides)
    plan = check(config)
    return Session(config, plan, Ranks(0, 1, torch.device("cpu")), folder, stop or StopSignal()).run()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The run's lines without what clocks say."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights."""
    (file,) = (folder / "export").rglob("*.safetensors")
    return load_file(file)


def equal(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    one, other = exported(a), exported(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)
    one_result, other_result = (json.loads((f / "result.json").read_text()) for f in (a, b))
    assert one_result["rewards"] == other_result["rewards"]
    assert one_result["forward_equivalents"] == other_result["forward_equivalents"]


@pytest.mark.parametrize(
    "overrides",
    [[], ["lora={rank: 4, alpha: 8, targets: null}", "ema_decay=0.9", "backward=subset"]],
    ids=["full", "lora_ema_subset"],
)
def test_four_steps_equal_two_resume_two(tmp_path: Path, overrides: list[str]) -> None:
    assert session(tmp_path / "whole", *overrides) is None
    stop = StopWhen(at_line(tmp_path / "parts", 2))
    assert session(tmp_path / "parts", *overrides, stop=stop) == EXIT_PREEMPTED
    assert len(metrics(tmp_path / "parts")) == 2
    assert session(tmp_path / "parts", *overrides) is None
    equal(tmp_path / "whole", tmp_path / "parts")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert session(folder) is None
    return folder


@pytest.mark.parametrize(
    ("look", "lines"),
    [(2, 0), (21, 1), (27, 1), (54, 4)],
    ids=["before", "in_a_rollout", "in_an_update", "after"],
)
def test_stop_between_two_forwards_costs_nothing_but_time(
    tmp_path: Path, whole: Path, look: int, lines: int
) -> None:
    assert session(tmp_path / "parts", stop=StopWhen(at_look(look))) == EXIT_PREEMPTED
    assert len(metrics(tmp_path / "parts")) == lines
    assert session(tmp_path / "parts") is None
    equal(whole, tmp_path / "parts")


def test_stop_in_an_evaluation_on_the_way_keeps_the_step(tmp_path: Path, whole: Path) -> None:
    every = "evaluation.every=1"
    assert session(tmp_path / "parts", every, stop=StopWhen(at_look(4 + 11 + 2))) == EXIT_PREEMPTED
    assert metrics(tmp_path / "parts") == metrics(whole)[:1]
    assert session(tmp_path / "parts", every) is None
    rows = metrics(tmp_path / "parts")
    assert ["eval/shapes_verifier" in row for row in rows] == [False, True, True, False]


def test_other_evaluation_than_before_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    session(folder, stop=StopWhen(at_line(folder, 1)))
    with pytest.raises(UserError, match="put them back"):
        session(folder, "evaluation.prompts=5")


def test_run_folder_holds_what_people_look_at(tmp_path: Path) -> None:
    session(tmp_path / "run", "rollouts=1")
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["time/eval_s"] > 0  # the one before
    assert row["time/save_s"] == 0
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "result.json", "curves.png", "timing.png", "before_after.png"} <= names
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"before", "after", "gain", "ci_low", "ci_high", "n"} <= result["rewards"][
        "shapes_verifier"
    ].keys()
    assert result["optimizer_updates"] == 2
    with pytest.raises(UserError, match="less than one rollout"):
        session(tmp_path / "poor", "budget=10")
    spent = metrics(tmp_path / "run")[-1]["cost/forward_equivalents"]
    session(tmp_path / "next", f"budget={1.5 * spent}", f"evaluation.baseline={tmp_path / 'run'}")
    following = json.loads((tmp_path / "next" / "result.json").read_text())
    assert following["rewards"] == result["rewards"]
    with pytest.raises(UserError, match="evaluation.baseline"):
        session(tmp_path / "last", "rollouts=1", f"evaluation.baseline={tmp_path / 'nowhere'}")


def test_a_strategy_without_a_window_to_interpolate_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session(tmp_path / "run", "rollouts=1", "backward.window=9")
    assert (
        "no window is interpolated, all gradients are exact: trained steps fill no window of 9" in caplog.text
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_continues_by_the_same_command(tmp_path: Path, how: signal.Signals) -> None:
    def command(name: str) -> list[str]:
        overrides = [*SIZES, f"model.path={tiny_flux_folder()}", f"output={tmp_path / name}"]
        return [sys.executable, "-m", "jaggrl.train", *overrides]

    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole"), cwd=ROOT, env=env, check=True, capture_output=True)
    process = subprocess.Popen(
        command("parts"), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while not list((tmp_path / "parts").rglob("step_00000[12]/manifest.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    code = process.wait(120)
    assert code == (EXIT_PREEMPTED if how is signal.SIGTERM else -signal.SIGKILL)
    done = subprocess.run(command("parts"), cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing" in done.stdout
    folders = [next((tmp_path / name).rglob("metrics.jsonl")).parent for name in ("whole", "parts")]
    equal(*folders)
    again = subprocess.run(command("parts"), cwd=ROOT, env=env, capture_output=True, text=True)
    assert again.returncode == 0
    assert "finished" in again.stdout
