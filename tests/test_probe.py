"""The probe door on a tiny FLUX: it prints, writes, and training takes what it wrote."""

import json
import os
import subprocess
import sys

import pytest

from jaggrl.build import check
from jaggrl.errors import UserError
from jaggrl.probe import _strategies
from tests.test_config import ROOT, composed
from tests.tiny_flux import tiny_flux_folder

SIZES = [
    "reward=hpsv2",
    "reward.eval=[hpsv2]",
    "prompts_per_rollout=1",
    "group_size=2",
    "micro_batch=2",
    "algorithm.rollout.schedule.steps=9",
    "probe.rollouts=1",
    "probe.name=tiny",
]


def door(*overrides):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jaggrl.probe", *SIZES, f"model.path={tiny_flux_folder()}", *overrides]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_config_builds_every_strategy():
    config = composed(name="probe")
    assert config["strategies"]["jagg_10"]["window"] == 10
    assert {node["_target_"] for node in config["strategies"].values()} == {
        "jaggrl.backward.strategy.Backward"
    }
    check(config)


def test_keys_of_a_strategy_that_was_deleted_are_told():
    with pytest.raises(
        UserError, match="strategies.jagg_10 has keys but no strategy: choose one, or ~strategies.jagg_10"
    ):
        _strategies(composed("~backward@strategies.jagg_10", name="probe"))


@pytest.mark.slow
def test_door_measures_and_training_takes_the_presets(tmp_path):
    done = door(f"probe.output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "recommended: jagg with jagg_frac=" in done.stdout
    stored = json.loads((tmp_path / "tiny/probe.json").read_text())
    assert {"jagg", "quadratic_all", "subset"} <= stored["strategies"].keys()
    for preset in ("probed", "frontier"):
        config = composed(f"hydra.searchpath=[file://{tmp_path}/tiny]", f"backward={preset}")
        check(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["probe.recommend=jag"],
        ["probe.rollouts=0"],
        ["probe.after_updates=3"],
        ["strategies.jagg.route=auto"],
        ["reward=shapes_verifier", "reward.eval=[shapes_verifier]"],  # 0 for every picture: no gradient
    ],
)
def test_bad_values_are_one_line(overrides):
    done = door(*overrides)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert overrides[0].split("=")[0].split(".")[-1] in done.stderr
