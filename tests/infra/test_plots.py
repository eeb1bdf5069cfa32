"""Pictures are drawn from metrics.jsonl alone; grids show every picture, enlarged without smoothing."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from jaggrl.errors import UserError
from jaggrl.infra.pictures import TILE, draw_before_after, draw_grid, save_pictures, to_images
from jaggrl.infra.plots import draw_curves, draw_timing
from scripts.plot_curves import labels, main, plot


def rows(count: int) -> list[dict[str, Any]]:
    """Lines as training writes them, with gaps and a null."""
    lines: list[dict[str, Any]] = [{"step": 0, "eval/hpsv2": 0.25, "eval/ocr": 0.5}]
    for step in range(1, count + 1):
        times = {"time/rollout_s": 2.0, "time/update_s": 3.0, "time/step_s": 5.5}
        train = {
            "train/grad_norm": 1.0 + step,
            "train/clip_high": 0.1,
            "train/clip_low": 0.0,
            "train/kl": 0.01,
        }
        lines.append({"step": step, "reward/hpsv2/mean": 0.25 + 0.01 * step, **train, **times})
    lines[-1]["train/grad_norm"] = None
    return lines


@pytest.mark.parametrize("runs", [{"a": rows(3)}, {"a": rows(30), "b": rows(3)}, {"a": []}, {"a": rows(1)}])
def test_pictures_of_any_number_of_runs(tmp_path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    draw_curves(runs, tmp_path / "curves.png")
    draw_timing(runs, tmp_path / "timing.png")
    for name in ("curves.png", "timing.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width > 300


def write_run(folder: Path, count: int = 3) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return folder


def test_script_draws_one_run_beside_its_metrics_and_several_elsewhere(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a" / "x"), write_run(tmp_path / "b" / "x")
    plot([first], None)
    assert (first / "curves.png").exists()
    assert plot([first, second], tmp_path / "both")[1] == tmp_path / "both" / "timing.png"
    assert labels([first, second]) == ["a/x", "b/x"]
    with pytest.raises(UserError, match="--out"):
        plot([first, second], None)


def test_script_refuses_a_folder_without_metrics_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_curves.py", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_images_are_exact_and_safe() -> None:
    picture = torch.tensor([0.0, 1.0, 2.0, -1.0, math.nan, 0.5]).expand(1, 3, 2, 6)
    assert [to_images(picture)[0].getpixel((x, 0)) for x in range(6)] == [
        (v, v, v) for v in (0, 255, 255, 0, 0, 128)
    ]


def test_small_pictures_are_stored_exactly_and_large_ones_as_jpeg(tmp_path: Path) -> None:
    small = torch.rand(2, 3, 64, 64)
    files = save_pictures(tmp_path, small)
    assert [file.name for file in files] == ["000.png", "001.png"]
    with Image.open(files[1]) as image:
        assert image.tobytes() == to_images(small)[1].tobytes()
    assert save_pictures(tmp_path, torch.rand(1, 3, 300, 300))[0].name == "000.jpg"


def test_grid_enlarges_by_whole_pixels(tmp_path: Path) -> None:
    pictures = torch.zeros(5, 3, 64, 64)
    pictures[:, 0, :, ::2] = 1.0  # columns of red and black
    captions = ["", "a red circle", "Ω " * 500, "x" * 300, "two\nlines"]
    draw_grid(tmp_path / "grid.png", pictures, captions, ["hpsv2 0.25\nocr 1"] * 5)
    with Image.open(tmp_path / "grid.png") as sheet:
        colours = [sheet.getpixel((8 + x, 8)) for x in range(TILE)]
    assert set(colours) == {(255, 0, 0), (0, 0, 0)}
    assert colours[:6] == [(255, 0, 0)] * 3 + [(0, 0, 0)] * 3


def test_before_after_and_large_pictures(tmp_path: Path) -> None:
    before, after = torch.zeros(2, 3, 512, 1024), torch.ones(2, 3, 512, 1024)
    draw_before_after(tmp_path / "pairs.jpg", before, after, ["a", "b"], ["0.1", "0.2"], ["0.3", "0.4"])
    with Image.open(tmp_path / "pairs.jpg") as sheet:
        left, right = sheet.getpixel((20, 20)), sheet.getpixel((8 + 2 * TILE + 20, 20))
    assert max(left) < 10
    assert min(right) > 245
