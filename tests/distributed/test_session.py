"""Whole runs under torchrun: what two ranks train, export and resume is what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.test_resume import SIZES
from tests.tiny_flux import tiny_flux_folder

ROOT = Path(__file__).parents[2]


def train(output: Path, world: int, *overrides: str) -> "subprocess.CompletedProcess[str]":
    """``python -m jaggrl.train`` at ``world`` ranks, by SGD: AdamW would hide a wrong scale."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else []
    )
    sizes = [*SIZES, f"model.path={tiny_flux_folder()}", "optim=sgd", "optim.lr=1.0", "rollouts=2"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "jaggrl.train", *sizes, *overrides, f"output={output}"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip


def result(output: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Exported weights and metrics."""
    folder = next(output.rglob("result.json")).parent
    (file,) = (folder / "export").rglob("*.safetensors")
    return load_file(file), [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "overrides",
    [["ema_decay=0.5"], ["lora={rank: 4, alpha: 8}", "ema_decay=0.5"]],
    ids=["full", "lora"],
)
def test_two_ranks_train_export_and_resume_like_one(tmp_path: Path, overrides: list[str]) -> None:
    for name, world, more in (("one", 1, []), ("two", 2, []), ("parts", 2, ["rollouts=1", "resume=none"])):
        done = train(tmp_path / name, world, *overrides, *more)
        assert done.returncode == 0, done.stderr[-3000:]
    first = next((tmp_path / "parts").rglob("result.json")).parent
    done = train(tmp_path / "parts", 1, *overrides, f'resume="{first}"')  # at another number of ranks
    assert done.returncode == 0, done.stderr[-3000:]
    one, two, parts = (result(tmp_path / name) for name in ("one", "two", "parts"))
    for other in (two, parts):
        assert other[0].keys() == one[0].keys()
        for name, weight in one[0].items():
            torch.testing.assert_close(other[0][name], weight, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(other[1], one[1], strict=True):
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
    config = next((tmp_path / "two").rglob("export/transformer/config.json"), None)
    if config is not None:
        assert json.loads(config.read_text())["_class_name"] == "FluxTransformer2DModel"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_unusable_resume_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = train(tmp_path, 2, "resume=/nowhere")
    assert done.returncode != 0
    assert "error: resume=/nowhere is no run folder" in done.stderr
    assert "DistNetworkError" not in done.stderr
    assert "Connection closed" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mixed_precision_with_recomputed_blocks_trains(tmp_path: Path) -> None:
    done = train(
        tmp_path, 2, "precision=bf16", "checkpointing=true", "lora={rank: 4, alpha: 8}", "optim.lr=1e-3"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, rows = result(tmp_path)
    assert all(row["train/skipped_updates"] == 0 and row["train/grad_norm"] > 0 for row in rows)
    assert rows[0]["train/ratio_deviation_max"] >= 0
