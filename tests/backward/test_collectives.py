"""FSDP2 on two gloo ranks: the collectives of each graph mode, and gradients equal to one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = 5  # four blocks and the root, which stays gathered from its last forward on


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "results.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, "-m", "tests.backward.collectives_ranks", str(out)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["toy", "toy_checkpointing", "flux", "flux_checkpointing"])
def test_collectives_per_window(results, model):
    """Joint gathers each block twice, or once with units kept gathered; batched once by itself."""
    after = {
        g: results[f"{model}/{g}"]["gathers_after_forwards"] for g in ("joint_default", "joint", "batched")
    }
    assert after == {"joint_default": 2 * (UNITS - 1), "joint": UNITS - 1, "batched": UNITS - 1}
    scatters = {g: results[f"{model}/{g}"]["scatters"] for g in ("joint", "batched", "sequential", "exact")}
    assert scatters == {"joint": UNITS, "batched": UNITS, "sequential": 2 * UNITS, "exact": 4 * UNITS}
    gathers = {g: results[f"{model}/{g}"]["gathers"] for g in ("batched", "joint", "sequential", "exact")}
    assert gathers["batched"] < gathers["joint"] < gathers["sequential"] < gathers["exact"]


@pytest.mark.slow
def test_gradients_equal_one_process(results):
    """Two accumulated windows; fp32 sums in another order."""
    worst = {case: r["error"] for case, r in results.items() if r["error"] > 5e-6}
    assert not worst
