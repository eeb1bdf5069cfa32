"""A checkpoint is whole or not there: round trips, truncation, kills, full disks, other numbers of ranks."""

import logging
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from jaggrl.errors import UserError
from jaggrl.infra.checkpoint import Checkpoints, step_of
from jaggrl.infra.manifest import MANIFEST, find_problem

RANKS = Path(__file__).with_name("checkpoint_ranks.py")


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"a.weight": torch.randn(3, 4, generator=generator), "a.bias": torch.zeros(4) + seed},
        "optimizer": {
            "state": {"a.weight": {"step": torch.tensor(float(seed))}},
            "groups": [{"lr": 0.1 * seed}],
        },
        "empty": {},
        "step": seed,
        "prompts": {"epoch": seed, "order": list(range(seed))},
    }


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def loaded(checkpoints: Checkpoints) -> dict[str, Any]:
    path = checkpoints.latest()
    assert path is not None
    target = state(0)
    checkpoints.load(path, target)
    return target


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_round_trip_in_place(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(7, state(7))
    target = state(0)
    weight = target["model"]["a.weight"]
    checkpoints.load(path, target)
    assert weight is target["model"]["a.weight"]
    assert torch.equal(weight, state(7)["model"]["a.weight"])
    assert str(target) == str(state(7))
    assert step_of(path) == 7


def test_nothing_there_yet(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (9, 10, 1000000):
        checkpoints.save(step, state(1))
    assert names(checkpoints) == ["step_000010", "step_1000000"][-keep:]


@pytest.mark.parametrize("keep", [3, 5])
def test_rotation_keeps_all_while_there_are_few(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for step in range(1, 8):
        checkpoints.save(step, {"step": step})
        assert len(names(checkpoints)) == min(step, keep)


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        Checkpoints(tmp_path, 0)


def test_old_is_removed_only_after_new_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaggrl.infra.checkpoint.write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, state(2))
    assert names(checkpoints) == [".tmp-step_000002", "step_000001"]
    assert loaded(checkpoints)["step"] == 1
    assert names(checkpoints) == ["step_000001"]  # and what the kill left is gone


def damage_truncate(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size // 2)


def damage_flip(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def damage_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def damage_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("{")


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_metadata, damage_manifest])
def test_broken_newest_falls_back_with_a_warning(
    checkpoints: Checkpoints, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save(1, state(1))
    damage(checkpoints.save(2, state(2)))
    with caplog.at_level(logging.WARNING):
        assert loaded(checkpoints)["step"] == 1
    assert "step_000002 is broken" in caplog.text
    checkpoints.save(2, state(2))  # the run comes by again
    assert loaded(checkpoints)["step"] == 2
    assert "broken-step_000002" in names(checkpoints)


def test_only_broken_ones_is_an_error_not_a_restart(checkpoints: Checkpoints) -> None:
    damage_truncate(checkpoints.save(1, state(1)))
    with pytest.raises(UserError, match="resume=none"):
        checkpoints.latest()


def test_only_a_temporary_one_is_none(checkpoints: Checkpoints) -> None:
    os.makedirs(checkpoints.folder / ".tmp-step_000003")
    assert checkpoints.latest() is None
    assert names(checkpoints) == []


@pytest.mark.parametrize("change", ["shape", "key"])
def test_another_models_checkpoint_is_refused(checkpoints: Checkpoints, change: str) -> None:
    path = checkpoints.save(1, state(1))
    target = state(0)
    target["model"]["a.weight" if change == "shape" else "b.weight"] = torch.zeros(5, 4)
    with pytest.raises(UserError, match=r"does not fit: .*[ab]\.weight.*; it is another") as error:
        checkpoints.load(path, target)
    assert "\n" not in str(error.value)


def test_full_disk_is_refused_before_and_during(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(1, state(1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    for attempt in (lambda: checkpoints.check_space(state(2)), lambda: checkpoints.save(2, state(2))):
        with pytest.raises(UserError, match=r"0\.00 GB free, a checkpoint needs 0\.01 GB"):
            attempt()
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left"):
        checkpoints.save(2, state(2))
    monkeypatch.undo()
    assert names(checkpoints) == ["step_000001"]
    assert loaded(checkpoints)["step"] == 1


def test_check_space_counts_what_will_be_kept(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"model": torch.zeros(10 << 20, dtype=torch.uint8)}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 30 << 20))  # three of them, and no slack
    with pytest.raises(UserError, match="free some space"):
        checkpoints.check_space(big)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 40 << 20))
    checkpoints.check_space(big)


def test_find_problem_names_the_file(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, state(1))
    assert find_problem(path) is None
    damage_truncate(path)
    assert "bytes instead of" in str(find_problem(path))


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    """FSDP2 over two gloo ranks writes sharded weights and AdamW state; one process reads them whole."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = ""
    for arguments in ([*torchrun, str(RANKS), "save"], [str(RANKS), "load"]):
        done = subprocess.run(
            [sys.executable, *arguments, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        output = done.stdout
    assert "same weights, same optimizer, same next step" in output
