"""Evaluations on disk: ``eval/step_000020.json`` (every score of every prompt) and the pictures beside it."""

import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jaggrl.evaluation import Evaluation
from jaggrl.infra.files import read_json, write_json
from jaggrl.infra.logging import plain, read_metrics
from jaggrl.infra.pictures import draw_before_after, draw_grid, save_pictures
from jaggrl.infra.plots import draw_curves, draw_timing
from jaggrl.infra.report import Gain, compare

log = logging.getLogger(__name__)


def evaluation_file(folder: Path, step: int) -> Path:
    """Where the evaluation of a step lies."""
    return folder / "eval" / f"step_{step:06d}.json"


def save_evaluation(folder: Path, step: int, evaluation: Evaluation, meta: dict[str, Any]) -> Path:
    """Write all scores, their means, and what they mean (``meta``: ``Evaluator.setting``, weights)."""
    file = evaluation_file(folder, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {name: [plain(v) for v in value.tolist()] for name, value in evaluation.values.items()}
    pictures = {"media": (evaluation.media * 255).round().byte(), "scores": dict(evaluation.pictured)}
    torch.save(pictures, file.with_suffix(".pt"))
    write_json(  # last: what it stands beside is whole
        file,
        {
            "step": step,
            **meta,
            "means": {name: plain(mean) for name, mean in evaluation.means().items()},
            "captions": list(evaluation.captions),
            "values": values,
        },
    )
    return file


def load_evaluation(folder: Path, step: int, setting: Mapping[str, Any] | None = None) -> Evaluation | None:
    """What ``save_evaluation`` wrote; None where there is nothing whole, or its ``meta`` differs from ``setting``."""
    file = evaluation_file(folder, step)
    stored = read_json(file)
    if stored is None or not file.with_suffix(".pt").exists():
        return None
    if any(stored.get(key) != value for key, value in (setting or {}).items()):
        return None
    values = {
        name: torch.tensor([float("nan") if v is None else v for v in value])
        for name, value in stored["values"].items()
    }
    pictures = torch.load(file.with_suffix(".pt"), weights_only=True)
    return Evaluation(values, pictures["scores"], pictures["media"].float() / 255, stored["captions"])


def take_baseline(source: Path, folder: Path, setting: Mapping[str, Any]) -> str | None:
    """Take over the evaluation of step 0 of another run, whole or not at all: what is wrong with it, or None."""
    found = load_evaluation(source, 0, setting)
    if found is None:
        return (
            f"evaluation.baseline={source} was measured with another model, other prompts, rewards or evaluation.*: "
            "give a run of the same settings, or null"
        )
    target = evaluation_file(folder, 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".pt", ".json"):  # the latter last: what it stands beside is whole
        shutil.copyfile(evaluation_file(source, 0).with_suffix(suffix), target.with_suffix(suffix))
    log.info("held-out before training taken over from %s", source)
    return None


def look_back(folder: Path, resumed: int, setting: Mapping[str, Any]) -> str | None:
    """Prepare a folder for a run that goes on at step ``resumed``: what is wrong with its evaluation of step 0.

    Evaluations of later steps are forgotten: the run will come to them again.
    """
    for file in (folder / "eval").glob("step_*.json"):
        if int(file.stem.removeprefix("step_")) > resumed:
            file.unlink()
    if not resumed or load_evaluation(folder, 0, setting):
        return None
    before = evaluation_file(folder, 0)
    if before.exists():
        return f"{before} was measured with other prompts, rewards or evaluation.*: put them back, or use resume=none"
    log.warning("%s is gone: there will be no comparison with before", before)
    return None


def save_samples(folder: Path, step: int, evaluation: Evaluation) -> list[Path]:
    """The first pictures, as files and as one grid with captions and scores."""
    samples = folder / "samples" / f"step_{step:06d}"
    files = save_pictures(samples, evaluation.media)
    draw_grid(samples.with_suffix(".png"), evaluation.media, evaluation.captions, score_lines(evaluation))
    return files


def score_lines(evaluation: Evaluation) -> list[str]:
    """Per picture of the grid, each reward's value on its own line."""
    rows = range(len(evaluation.media))
    return [
        "\n".join(f"{name} {float(value[i]):.4f}" for name, value in evaluation.pictured.items())
        for i in rows
    ]


def draw_run(folder: Path, before: Evaluation, after: Evaluation) -> None:
    """``curves.png``, ``timing.png`` and ``before_after.png`` from what the run folder holds."""
    runs = {folder.name: read_metrics(folder)}
    draw_curves(runs, folder / "curves.png")
    draw_timing(runs, folder / "timing.png")
    draw_before_after(
        folder / "before_after.png",
        before.media,
        after.media,
        after.captions,
        score_lines(before),
        score_lines(after),
    )


def compare_evaluations(
    before: Evaluation, after: Evaluation, trained: Collection[str], seed: int
) -> list[Gain]:
    """Gains of every reward with paired bootstrap intervals."""
    return compare(_arrays(before), _arrays(after), trained, seed)


def _arrays(evaluation: Evaluation) -> dict[str, npt.NDArray[np.float64]]:
    return {name: value.double().numpy() for name, value in evaluation.values.items()}
