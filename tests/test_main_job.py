"""The main job's claim, three seeds: the trained reward rises on held-out prompts and nothing else is sold for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.test_config import ROOT

MARGIN = 0.25
"""Stated beforehand: verifier and untrained scorers may fall by at most this share of their deviation over prompts."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_main_job_raises_the_trained_reward(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-m", "jaggrl.train", "experiment=shapes_dance", "logger=none"]
    command += [f"seed={seed}", f"output={tmp_path}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    (file,) = tmp_path.rglob("result.json")
    rewards = json.loads(file.read_text())["rewards"]
    before = json.loads((file.parent / "eval" / "step_000000.json").read_text())["values"]
    assert rewards["hpsv2"]["trained"]
    assert rewards["hpsv2"]["n"] >= 200
    assert rewards["hpsv2"]["ci_low"] > 0
    for name in ("clipscore", "pickscore", "shapes_verifier"):
        assert rewards[name]["gain"] >= -MARGIN * float(np.nanstd(np.array(before[name], float))), name
