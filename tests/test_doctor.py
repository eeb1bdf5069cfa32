"""The doctor: one line per library and reward, and an exit code that means something."""

import sys

import pytest

from jaggrl import doctor
from jaggrl.errors import UserError

LIBRARIES = [("torch 2", ""), ("peft 1", "")]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """An empty hub cache and a launch directory without checkpoints."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_one_line_per_library_and_reward(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "libraries", lambda: iter(LIBRARIES))
    monkeypatch.setattr(
        doctor, "rewards", lambda scorers, overrides: iter([("hpsv2", f"get {scorers}"), ("v", "")])
    )
    assert doctor.run([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(LIBRARIES) + 2 * 3
    assert lines[4].split() == ["hpsv2", "missing:", "get", "shapes"]
    assert lines[5].split() == ["v", "ready"]
    assert "scorers=published (optional)" in lines[6]


def test_the_exit_code_is_about_what_was_asked(monkeypatch):
    monkeypatch.setattr(doctor, "libraries", lambda: iter(LIBRARIES))
    lacks = {"shapes": "", "published": "files"}
    monkeypatch.setattr(doctor, "rewards", lambda scorers, overrides: iter([("hpsv2", lacks[scorers])]))
    assert [doctor.run(a) for a in ([], ["shapes"], ["published"])] == [0, 0, 1]
    monkeypatch.setattr(doctor, "libraries", lambda: iter([("torch", "not installed")]))
    assert doctor.run(["shapes"]) == 1


def test_libraries_are_those_of_the_project(monkeypatch):
    found = dict(doctor.libraries())
    assert any(name.startswith("torch ") for name in found) and not any(found.values())
    monkeypatch.setattr(doctor, "version", lambda name: "0.1")
    assert dict(doctor.libraries())["torch 0.1"].startswith("too old: pip install 'torch>=")


def test_published_rewards_name_the_file_to_fetch(tmp_path):
    found = dict(doctor.rewards("published", ["dir=ckpts"]))
    assert list(found) == ["hpsv2", "clipscore", "pickscore"]
    assert f"hpsv2 needs {tmp_path}/ckpts/HPS_v2.1_compressed.pt" in found["hpsv2"]
    assert "hf download xswu/HPSv2 HPS_v2.1_compressed.pt --local-dir ckpts" in found["hpsv2"]
    assert "openai/clip-vit-large-patch14" in found["clipscore"]
    assert "yuvalkirstain/PickScore_v1 and laion/" in found["pickscore"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["publishd"], "unknown scorers 'publishd': did you mean 'published'"),
        (["published", "dri=x"], "dri=x: .*see conf/scorers/published.yaml"),
        (["published", "dir={"], "see conf/scorers/published.yaml"),
        (["dir=x"], "doctor takes one of shapes, published"),
        (["shapes", "published"], "doctor takes one of"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(UserError, match=says):
        doctor.run(arguments)


def test_the_door_exits_with_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", "nonsense"])
    with pytest.raises(SystemExit) as exit_:
        doctor.main()
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("error: unknown scorers 'nonsense'")
