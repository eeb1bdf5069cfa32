"""The run folder rule: same command goes on, anything else starts beside, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaggrl.errors import UserError
from jaggrl.infra.run_folder import JOB_RECORD, NAME_LIMIT, Decision, config_hash, decide, folder_name

CONFIG = {"trainer": {"steps": 4}, "seed": 0, "logger": {"wandb": "auto"}, "resume": "auto"}


def begin(root: Path, resume: str = "auto", config: dict | None = None, code: str = "c0de") -> Decision:
    return decide(root, "shapes", ["seed=0"], config or CONFIG, code, resume)


def test_new_folder_holds_config_overrides_environment_and_status(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert run.action == "new"
    assert run.path == tmp_path / "shapes" / "seed=0"
    assert (run.path / ".hydra" / "overrides.yaml").read_text() == "- seed=0\n"
    assert "steps: 4" in (run.path / ".hydra" / "config.yaml").read_text()
    assert "steps: 4" in (run.path / "config.resolved.yaml").read_text()
    assert "torch: " in (run.path / "env.txt").read_text()
    assert json.loads((run.path / "status.json").read_text())["status"] == "running"


def test_unfinished_run_goes_on_and_finished_one_is_reported(tmp_path: Path) -> None:
    first = begin(tmp_path)
    first.close("stopped")
    again = begin(tmp_path)
    assert (again.action, again.path) == ("resume", first.path)
    again.close("finished")
    status = json.loads((first.path / "status.json").read_text())
    assert (status["status"], status["attempts"]) == ("finished", 2)
    assert begin(tmp_path).action == "finished"
    assert begin(tmp_path).path == first.path


@pytest.mark.parametrize("change", ["config", "code"])
def test_other_config_or_code_starts_beside(tmp_path: Path, change: str) -> None:
    first = begin(tmp_path)
    first.close("stopped")
    other = (
        begin(tmp_path, config=CONFIG | {"seed": 1}) if change == "config" else begin(tmp_path, code="0ther")
    )
    assert (other.action, other.path.name) == ("new", "seed=0-2")
    assert f"resume={first.path}" in other.reason
    other.close("stopped")
    assert begin(tmp_path).path == first.path  # and the first is still found


def test_logger_and_resume_are_not_part_of_what_is_computed(tmp_path: Path) -> None:
    begin(tmp_path).close("stopped")
    assert begin(tmp_path, config=CONFIG | {"logger": {"wandb": "offline"}}).action == "resume"
    assert config_hash(CONFIG) == config_hash(CONFIG | {"resume": "none", "output": "/elsewhere"})
    assert config_hash(CONFIG) == config_hash(CONFIG | {"evaluation": {"baseline": "a/run"}})
    assert config_hash(CONFIG) != config_hash(CONFIG | {"evaluation": {"steps": 3}})


def test_a_held_folder_is_left_alone(tmp_path: Path) -> None:
    first = begin(tmp_path)
    second = begin(tmp_path)
    assert (second.action, second.path.name) == ("new", "seed=0-2")
    first.close("stopped")
    second.close("stopped")
    assert begin(tmp_path).path == second.path  # the newest unfinished one


def test_resume_none_always_starts_anew(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        run = begin(tmp_path, resume="none")
        assert run.action == "new"
        names.append(run.path.name)
        run.close("finished")
    assert names == ["seed=0", "seed=0-2", "seed=0-3"]


def test_resume_path_continues_whatever_changed(tmp_path: Path) -> None:
    first = begin(tmp_path)
    first.close("finished")
    assert begin(tmp_path, resume=str(first.path)).action == "finished"
    longer = begin(tmp_path, resume=str(first.path), config=CONFIG | {"trainer": {"steps": 8}}, code="0ther")
    assert (longer.action, longer.path) == ("resume", first.path)
    assert "trainer.steps, the code" in longer.reason
    with pytest.raises(UserError, match="in use by process"):
        begin(tmp_path, resume=str(first.path))
    with pytest.raises(UserError, match="no run folder"):
        begin(tmp_path, resume=str(tmp_path / "nowhere"))


def test_folder_without_status_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "shapes" / "seed=0").mkdir(parents=True)  # killed between mkdir and the first write
    assert begin(tmp_path).path.name == "seed=0"


def test_broken_status_is_left_alone(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.close("stopped")
    (run.path / "status.json").write_text("{")
    assert begin(tmp_path).path.name == "seed=0-2"


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from jaggrl.infra.run_folder import decide\n"
        f"run = decide(Path({str(tmp_path)!r}), 'shapes', ['seed=0'], {CONFIG!r}, 'c0de')\n"
        "print(run.path.name, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "seed=0"
    beside = begin(tmp_path)
    assert beside.path.name == "seed=0-2"
    beside.close("finished")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    killed = begin(tmp_path, resume=str(tmp_path / "shapes" / "seed=0"))
    assert killed.action == "resume"


def test_sweep_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_RECORD, str(tmp_path / "record.json"))
    run = begin(tmp_path)
    assert json.loads((tmp_path / "record.json").read_text()) == {"folder": str(run.path), "action": "new"}


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default"),
        (
            ["experiment=x", "resume=none", "hydra.x=2", "hydra/launcher=basic", "logger=none"],
            "default",
        ),
        (["seed=1", "backward=jagg"], "backward=jagg,seed=1"),
        (["backward=jagg", "seed=1"], "backward=jagg,seed=1"),
        (["+x.y=1", "~z"], "+x.y=1,~z"),
    ],
)
def test_folder_name(overrides: list[str], name: str) -> None:
    assert folder_name(overrides) == name


def test_folder_name_is_bounded_safe_and_distinct() -> None:
    names = [folder_name([f"prompts.file=/data/{'a' * n}/π {c}"]) for n in (5, 300) for c in "{}|"]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name) <= NAME_LIMIT
        assert not set(name) & set("/{}| π")
    assert not folder_name(["x=../../etc"]).startswith(".")
