"""The command line: one line and exit code 2 for what the user can mend; sweeps go on after a failure."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaggrl.errors import UserError
from jaggrl.infra import cli
from jaggrl.infra.precheck import precheck

REPOSITORY = Path(__file__).parents[2]
TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's config with the real Hydra settings."""
    folder = tmp_path_factory.mktemp("toy") / "conf"
    shutil.copytree(TOY / "conf", folder)
    shutil.copytree(REPOSITORY / "conf" / "hydra", folder / "hydra")
    return folder


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sed=1"], "unknown config key 'sed': did you mean 'seed'?"),
        (["lr=1"], "unknown config key 'lr': did you mean 'optim.lr'?"),
        (["optim.lrr=1"], "unknown config key 'optim.lrr': did you mean 'optim.lr'?"),
        (["optim.zzz=1"], "unknown config key 'optim.zzz': choose one of: betas, lr"),
        (["steps.x=1"], "unknown config key 'steps.x': did you mean 'steps'?"),
        (["~sed"], "unknown config key 'sed': did you mean 'seed'?"),
        (["bakward=jagg"], "unknown config key 'bakward': did you mean 'backward'?"),
        (["backward=jag"], "unknown backward 'jag': did you mean 'jagg'?"),
        (["experiment=dem"], "unknown experiment 'dem': did you mean 'demo'?"),
        (["hydra/launcher=sequentiel"], "unknown hydra/launcher 'sequentiel': did you mean 'sequential'?"),
        (["-m", "backward=jagg,exakt"], "unknown backward 'exakt': did you mean 'exact'?"),
        (["-m", "seed=1,2", "stebs=3"], "unknown config key 'stebs': did you mean 'steps'?"),
        (["-m", "backward=glob(x*)"], "'backward=glob(x*)' matches nothing"),
        (["backward=jagg,exact"], "'backward=jagg,exact' has several values: add -m for one run each, or"),
        (["seed=range(0,3)"], "'seed=range(0,3)' has several values: add -m"),
        (["steps=many"], "steps=many: must be a number (the default is 4)"),
        (["shuffle=maybe"], "shuffle=maybe: must be true or false (the default is False)"),
        (["optim.lr=fast"], "optim.lr=fast: must be a number"),
        (["steps"], "cannot read 'steps': write key=value, or group=choice"),
        (["note=a{"], "cannot read 'note=a{'"),
        (["steps=???"], "config key 'steps' has no value: give steps=..."),
        (["doubled=${nope}"], "config key 'doubled': Interpolation key 'nope' not found"),
        (["--config-name=trian"], "unknown config 'trian': did you mean 'train'?"),
        (["--config-path=/nowhere"], "config folder /nowhere is missing"),
        (["+seed=1"], "Could not append to config. An item is already at 'seed'"),
    ],
)
def test_bad_command_line_is_one_line_with_the_remedy(conf: Path, argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        precheck(argv, "train", conf)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["seed=1", "backward=exact", "experiment=demo"],
        ["++steps=3", "++size.width=2"],
        ["steps=null", "note=7", "size.width=wide", "steps=${seed}"],
        ["-m", "backward=exact,jagg", "seed=range(0,3)", "hydra.launcher.nproc=2"],
        ["-m", "backward=glob(*)"],
        ["--help", "whatever=1"],
        ["--cfg", "job", "seed=2"],
        ["hydra/launcher=submitit_local"],
        ["note='a,b={c}'", "optim.betas=[0.5,0.6]"],
    ],
)
def test_good_command_line_passes(conf: Path, argv: list[str]) -> None:
    precheck(argv, "train", conf)


def test_broken_config_file_is_one_line(conf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "conf"
    shutil.copytree(conf, copy)
    (copy / "backward" / "exact.yaml").write_text("window: [1\n")
    with pytest.raises(UserError, match="exact.yaml") as error:
        precheck(["backward=exact"], "train", copy)
    assert "\n" not in str(error.value)


def test_sweep_under_torchrun_is_refused(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="nproc="):
        precheck(["-m", "seed=1,2"], "train", conf)


class Toy:
    """Runs the toy door in its own folder."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"TOY_CONF": str(conf), "PYTHONPATH": str(REPOSITORY)}

    def start(self, *argv: str, **extra: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.infra.toy.toy", *argv],
            cwd=self.folder,
            env=self.environment | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **extra: str) -> tuple[int, str, str]:
        process = self.start(*argv, **extra)
        out, err = process.communicate(timeout=400)
        return process.returncode, out, err

    def stop(self, number: signal.Signals, *argv: str) -> tuple[int, str, str]:
        """Start, wait until the task is in its folder, send a signal."""
        process = self.start(*argv)
        assert process.stdout is not None
        read = ""
        while " in " not in read and process.poll() is None:
            read += process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(number)
        out, err = process.communicate(timeout=400)
        return process.returncode, read + out, err


@pytest.fixture
def toy(tmp_path: Path, conf: Path) -> Toy:
    return Toy(tmp_path, conf)


def summary(toy: Toy) -> dict[str, object]:
    return json.loads(next(toy.folder.glob("outputs/sweeps/*/summary.json")).read_text())


def test_run_leaves_only_its_folder(toy: Toy) -> None:
    code, out, err = toy.run("seed=1")
    assert (code, err) == (0, "")
    assert "runs ['seed=1']" in out
    assert [path.name for path in toy.folder.iterdir()] == ["outputs"]
    assert [path.name for path in (toy.folder / "outputs").iterdir()] == ["toy"]
    code, out, _ = toy.run("seed=1")
    assert code == 0
    assert "finished: nothing to do" in out


def test_user_errors_are_one_line_from_rank_0(toy: Toy) -> None:
    assert toy.run("sed=1") == (2, "", "error: unknown config key 'sed': did you mean 'seed'?\n")
    code, _, err = toy.run("fail=user")
    assert (code, err) == (2, "error: this value cannot work: use another\n")
    assert toy.run("sed=1", RANK="1", WORLD_SIZE="2") == (2, "", "")


def test_command_line_is_looked_at_before_torch_is_imported() -> None:
    look = "import sys, jaggrl.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=REPOSITORY).returncode == 0


def test_bug_keeps_its_traceback(toy: Toy) -> None:
    code, _, err = toy.run("fail=bug")
    assert code == 1
    assert "RuntimeError: boom" in err
    assert "in main" in err


def test_show_config_and_help(toy: Toy) -> None:
    code, out, err = toy.run("--cfg", "job", "backward=exact")
    assert (code, err) == (0, "")
    assert "window: 1" in out
    code, out, err = toy.run("--help")
    assert (code, err) == (0, "")
    assert "backward: ablate, exact, jagg" in out


def test_sweep_goes_on_after_a_failure_in_fresh_processes(toy: Toy) -> None:
    code, out, _ = toy.run("-m", "fail=null,bug,user", "seed=1")
    assert code == 1
    assert "1 of 3 jobs done; failed: 2, 3" in out
    jobs = summary(toy)["jobs"]
    assert isinstance(jobs, list)
    assert [job["exit_code"] for job in jobs] == [0, 1, 2]
    assert Path(jobs[0]["folder"]).name == "fail=null,seed=1"
    assert len({line.split("pid ")[1].split()[0] for line in out.splitlines() if " pid " in line}) == 3
    logs = sorted(toy.folder.glob("outputs/sweeps/*/*.log"))
    assert [path.name for path in logs] == ["001.log", "002.log", "003.log"]
    assert "RuntimeError: boom" in logs[1].read_text()


def test_sweep_can_stop_at_the_first_failure(toy: Toy) -> None:
    code, out, _ = toy.run("-m", "fail=bug,null", "hydra.launcher.on_error=stop")
    assert code == 1
    assert "0 of 2 jobs done; failed: 1; not started: 1" in out


def test_sweep_with_impossible_settings_is_one_line(toy: Toy) -> None:
    code, _, err = toy.run("-m", "hydra.launcher.on_error=halt")
    assert (code, err) == (
        2,
        "error: unknown hydra.launcher.on_error 'halt': choose one of: continue, stop\n",
    )
    code, _, err = toy.run("-m", "hydra.launcher.nproc=0")
    assert (code, err) == (2, "error: hydra.launcher.nproc=0: give at least 1 rank per job\n")


def test_sweep_shows_the_gain_of_trained_rewards(toy: Toy) -> None:
    toy.run("seed=1")
    reward = {"gain": 0.012, "ci_low": 0.01, "ci_high": 0.014}
    rewards = {"hpsv2": reward | {"trained": True}, "ocr": reward | {"trained": False}}
    (toy.folder / "outputs" / "toy" / "seed=1" / "result.json").write_text(json.dumps({"rewards": rewards}))
    code, out, _ = toy.run("-m", "seed=1")
    assert code == 0
    assert "hpsv2 +0.0120 [+0.0100, +0.0140]  outputs/toy/seed=1" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_stops_run_and_sweep(toy: Toy, number: signal.Signals, code: int) -> None:
    assert toy.stop(number, "sleep=60")[0] == code
    returned, out, _ = toy.stop(number, "-m", "sleep=60", "seed=1,2")
    assert returned == code
    assert "0 of 2 jobs done; stopped: 1; not started: 1" in out
    status = json.loads((toy.folder / "outputs" / "toy" / "seed=1,sleep=60" / "status.json").read_text())
    assert status["status"] == "stopped"


@pytest.mark.slow
def test_sweep_with_two_ranks_per_job(toy: Toy) -> None:
    code, out, _ = toy.run("-m", "seed=1,2", "hydra.launcher.nproc=2")
    assert code == 0
    for told in ("rank 0 runs ['seed=1']", "rank 1 runs ['seed=1']", "rank 1 runs ['seed=2']"):
        assert told in out
    assert sorted(path.name for path in (toy.folder / "outputs" / "toy").iterdir()) == ["seed=1", "seed=2"]


@pytest.mark.slow
def test_submitit_stays_usable(toy: Toy) -> None:
    code, _, err = toy.run("-m", "seed=1,2", "hydra/launcher=submitit_local")
    assert code == 0, err
    assert sorted(path.name for path in (toy.folder / "outputs" / "toy").iterdir()) == ["seed=1", "seed=2"]


def test_error_of_one_rank_alone_is_told_by_that_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli._fail("error: misspelt", 2) == 2
    assert capsys.readouterr().err == ""
    assert cli._fail("error: out of memory", 2, rank=1) == 2
    assert capsys.readouterr().err == "[rank 1] error: out of memory\n"
