"""Two ranks against one process: the same samples, gradients, norms and weight changes (fp32, SGD)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = "tests.distributed.ranks_script"
ROOT = Path(__file__).parents[2]


def run(out: Path, world: int, *arguments: str) -> dict[str, Any]:
    """The script's results at ``world`` ranks."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", SCRIPT]
    if world > 1:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={world}",
            "-m",
            SCRIPT,
        ]
    done = subprocess.run(
        [*command, str(out), *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One vector."""
    return torch.cat([t.flatten() for t in tensors])


def compare(tmp_path: Path, model: str, algorithm: str, strategy: str) -> None:
    """Gradients of every update to 1e-5, weight changes after four updates to 1e-4."""
    one = run(tmp_path / "one.pt", 1, model, algorithm, strategy)
    two = run(tmp_path / "two.pt", 2, model, algorithm, strategy)
    assert len(one["norms"]) == len(two["norms"]) == 4
    for a, b in zip(two["gradients"], one["gradients"], strict=True):
        assert relative(flat(a), flat(b)) < 1e-5
    assert torch.allclose(torch.tensor(two["norms"]), torch.tensor(one["norms"]), rtol=1e-5)
    assert relative(flat(two["changes"]), flat(one["changes"])) < 1e-4
    for a, b in zip(two["metrics"], one["metrics"], strict=True):
        assert a["reward/total/mean"] == pytest.approx(b["reward/total/mean"], rel=1e-5)


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    compare(tmp_path, "toy", "dance", "jagg")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["exact", "jagg", "jagg_batched", "jagg_sequential", "ablate"])
@pytest.mark.parametrize("model", ["flux", "flux_lora"])
def test_two_ranks_equal_one_process_flux(tmp_path: Path, model: str, strategy: str) -> None:
    compare(tmp_path, model, "dance", strategy)
