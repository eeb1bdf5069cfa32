"""Two ranks under FSDP2, stopped and resumed on the way, against one process that ran through (fp32, SGD).

The same samples, gradients, norms and weight changes, for every algorithm x strategy, full and LoRA. One pair of
processes trains all cells of a test in a row.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from jaggrl.infra.distributed import Ranks
from tests.distributed.ranks_script import results
from tests.distributed.setups import STRATEGIES, Cell, diagonal, every_cell
from tests.toys import CPU

ROOT = Path(__file__).parents[2]


def two_ranks(out: Path, cells: Sequence[Cell]) -> dict[str, Any]:
    """The script's results."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["-m", "tests.distributed.ranks_script", str(out), *(":".join(cell) for cell in cells)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One vector."""
    return torch.cat([t.flatten() for t in tensors])


def difference(two: dict[str, Any], one: dict[str, Any]) -> str:
    """What differs: gradients of every update beyond 1e-5, weight changes after four updates beyond 1e-4."""
    if not len(one["norms"]) == len(two["norms"]) == 4 or not one["norms"][0] > 0:
        return f"norms {one['norms']} and {two['norms']}"
    pairs = zip(two["gradients"], one["gradients"], strict=True)
    gradients = [relative(flat(a), flat(b)) for a, b in pairs]
    changes = relative(flat(two["changes"]), flat(one["changes"]))
    rewards = [
        abs(a["reward/total/mean"] / b["reward/total/mean"] - 1)
        for a, b in zip(two["metrics"], one["metrics"], strict=True)
    ]
    norms = [abs(a - b) <= 1e-5 * abs(b) for a, b in zip(two["norms"], one["norms"], strict=True)]
    if max(gradients) < 1e-5 and changes < 1e-4 and max(rewards) < 1e-5 and all(norms):
        return ""
    return f"gradients {gradients}, changes {changes}, rewards {rewards}, norms {one['norms']} {two['norms']}"


def compare(tmp_path: Path, cells: Sequence[Cell]) -> None:
    """All cells of the two ranks against those of this process."""
    found = two_ranks(tmp_path / "two.pt", cells)
    differences = {}
    for cell in cells:
        if told := difference(found[":".join(cell)], results(cell, Ranks(0, 1, CPU), folder=None)):
            differences[":".join(cell)] = told
    assert not differences, "\n".join(f"{name}: {told}" for name, told in differences.items())


@pytest.mark.timeout(1300)
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    compare(tmp_path, diagonal())


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_two_ranks_equal_one_process_in_every_cell(tmp_path: Path) -> None:
    done = set(diagonal())
    compare(tmp_path, [cell for cell in every_cell() if cell not in done])


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_two_ranks_equal_one_process_flux(tmp_path: Path) -> None:
    compare(tmp_path, [Cell(model, "dance", s) for model in ("flux", "flux_lora") for s in STRATEGIES])
