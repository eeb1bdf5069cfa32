"""W&B: the mode is decided before init, nothing prompts, nothing is fatal."""

import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaggrl.errors import UserError
from jaggrl.infra import wandb_run
from jaggrl.infra.wandb_run import WandbRun, decide_mode, open_wandb

KEY = {"WANDB_API_KEY": "x" * 40, "NETRC": "/nowhere"}
DEAD = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
NO_KEY = {"NETRC": "/nowhere"}


@pytest.fixture
def silent_server() -> Iterator[dict[str, str]]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}


@pytest.mark.parametrize(
    ("requested", "environ", "mode"),
    [
        ("disabled", KEY, "disabled"),
        ("offline", NO_KEY, "offline"),
        ("auto", NO_KEY, "disabled"),
        ("auto", NO_KEY | {"WANDB_MODE": "offline"}, "offline"),
        ("auto", KEY | {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", NO_KEY | {"WANDB_MODE": "online"}, "offline"),
        ("online", NO_KEY, "offline"),
        ("auto", KEY | DEAD, "offline"),
        ("online", KEY | DEAD, "offline"),
    ],
)
def test_decide_mode(requested: str, environ: dict[str, str], mode: str) -> None:
    assert decide_mode(requested, environ)[0] == mode


def test_silent_server_counts_as_absent(
    silent_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_run, "REACH_SECONDS", 0.2)
    assert decide_mode("online", KEY | silent_server)[0] == "offline"


def test_key_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_run, "_answers", lambda url: True)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert decide_mode("auto", {"NETRC": str(tmp_path / "netrc")})[0] == "online"


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'online'"):
        decide_mode("onlin", {})


def test_offline_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_run, "INIT_SECONDS", 400)  # the client starts slowly on a busy machine
    ids = []
    for _ in range(2):
        run = open_wandb("offline", "p", None, tmp_path, "name", {"seed": 0, "git": None})
        ids.append(run._run.id)
        run.log(1, {"reward/a/mean": 0.5, "bad": float("nan")})
        run.finish()
    assert ids[0] == ids[1] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) >= 1


def test_disabled_does_not_import_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = open_wandb("disabled", "p", None, tmp_path, "name", {})
    run.log(1, {"x": 1.0})
    run.images(1, "samples/eval", [], [])
    run.finish()
    assert list(tmp_path.iterdir()) == []


class Stuck:
    def log(self, row: dict[str, Any]) -> None:
        raise ConnectionError("gone\nand a long story")

    def finish(self, exit_code: int) -> None:
        time.sleep(30)


def test_failures_are_warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 0.1)
    run = WandbRun(Stuck())
    run.log(1, {"x": 1.0})
    run.log(2, {"x": 1.0})  # off from here
    WandbRun(Stuck()).finish()
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "W&B log failed and is off from here: gone",
        "W&B finish failed and is off from here: no answer within 0 s",
    ]


def test_failed_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=lambda **_: None))
    open_wandb("offline", "p", None, tmp_path, "name", {}).log(1, {"x": 1.0})
    assert "W&B did not start and is off: no" in caplog.text


def test_pictures_that_cannot_be_read_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = WandbRun(Stuck())
    run.images(1, "samples/eval", [Path("/nowhere.png")], ["a"])
    assert "W&B images failed and is off from here" in caplog.text
