"""Evaluation: the same prompts and noise, the same numbers offline, and comparisons of like with like only."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from jaggrl.errors import UserError
from jaggrl.evaluate import compare_with_run
from jaggrl.evaluation import Evaluation, Evaluator
from jaggrl.infra.distributed import Ranks
from jaggrl.prompts import Prompt
from jaggrl.results import (
    evaluation_file,
    load_evaluation,
    look_back,
    save_evaluation,
    save_samples,
    take_baseline,
)
from tests.test_config import ROOT, composed
from tests.test_resume import SIZES
from tests.tiny_flux import tiny_flux_folder
from tests.toys import CPU, Brightness, toy_policy


def evaluator(grid: int = 2, reward: Brightness | None = None) -> Evaluator:
    """Five prompts on a toy."""
    prompts = [Prompt(i, "x" * (i + 1)) for i in range(5)]
    scorers = {"brightness": reward or Brightness()}
    return Evaluator(Ranks(0, 1, CPU), toy_policy(), scorers, prompts, 3, 0, 2, 16, grid)


class Failing(Brightness):
    """Never finds a number."""

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B,) of NaN."""
        return torch.full((len(prompts),), float("nan"))


def test_no_pictures_is_a_grid_too(tmp_path: Path) -> None:
    evaluation = evaluator(grid=0)()
    assert evaluation.media.shape[0] == 0
    assert torch.equal(evaluation.values["brightness"], evaluator()().values["brightness"])
    save_evaluation(tmp_path, 0, evaluation, {})
    save_samples(tmp_path, 0, evaluation)


def test_reward_that_always_fails_is_stored(tmp_path: Path) -> None:
    save_evaluation(tmp_path, 0, evaluator(reward=Failing())(), {})
    stored = json.loads(evaluation_file(tmp_path, 0).read_text())
    assert stored["means"] == {"brightness": None}
    again = load_evaluation(tmp_path, 0)
    assert again is not None
    assert all(math.isnan(v) for v in again.values["brightness"])


def test_evaluations_of_another_setting_are_not_known(tmp_path: Path) -> None:
    ours = evaluator()
    save_evaluation(tmp_path, 0, ours(), ours.setting)
    assert isinstance(load_evaluation(tmp_path, 0, ours.setting), Evaluation)
    assert load_evaluation(tmp_path, 0, evaluator(grid=3).setting) is None
    ours.setting["cards"]["brightness"]["sha256"] = "another file of weights"
    assert load_evaluation(tmp_path, 0, ours.setting) is None


def test_baseline_of_another_run_is_taken_over_or_refused(tmp_path: Path) -> None:
    ours = evaluator()
    first = ours()
    save_evaluation(tmp_path / "a", 0, first, ours.setting)
    assert take_baseline(tmp_path / "a", tmp_path / "b", ours.setting) is None
    taken = load_evaluation(tmp_path / "b", 0, ours.setting)
    assert taken is not None and torch.equal(taken.values["brightness"], first.values["brightness"])
    assert "another model" in str(take_baseline(tmp_path / "a", tmp_path / "c", evaluator(grid=3).setting))
    assert not (tmp_path / "c").exists()


def test_resumed_run_forgets_later_evaluations_and_keeps_its_before(tmp_path: Path) -> None:
    ours = evaluator()
    for step in (0, 2, 4):
        save_evaluation(tmp_path, step, ours(), ours.setting)
    assert look_back(tmp_path, 2, ours.setting) is None
    assert [evaluation_file(tmp_path, s).exists() for s in (0, 2, 4)] == [True, True, False]
    assert "put them back" in str(look_back(tmp_path, 2, evaluator(grid=3).setting))
    evaluation_file(tmp_path, 0).unlink()
    assert look_back(tmp_path, 2, ours.setting) is None


def test_weights_go_with_the_model_they_were_trained_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = composed("evaluation.steps=4")
    OmegaConf.save(OmegaConf.create(run), tmp_path / "config.resolved.yaml")
    compare_with_run(composed(name="evaluate"), tmp_path / "export")
    assert "steps=20 (there 4)" in caplog.text
    with pytest.raises(UserError, match="model.path=package://"):
        compare_with_run(composed("model.path=/elsewhere", name="evaluate"), tmp_path / "export")


@pytest.mark.slow
def test_offline_evaluation_is_that_of_the_run(tmp_path: Path) -> None:
    model = f"model.path={tiny_flux_folder()}"
    shared = ["reward.eval=[shapes_verifier]", "reward.batch_size=16", model]
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
        )

    done = run("jaggrl.train", *SIZES, *shared, "optim.lr=1e-2", f"output={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    folder = next((tmp_path / "runs").rglob("result.json")).parent
    sizes = ["evaluation.prompts=4", "evaluation.steps=4", "evaluation.grid=4", "evaluation.micro_batch=4"]
    done = run("jaggrl.evaluate", f'weights="{folder}"', *sizes, *shared, f"output={tmp_path / 'offline'}")
    assert done.returncode == 0, done.stderr
    offline = json.loads(next((tmp_path / "offline").rglob("step_000000.json")).read_text())
    inside = json.loads((folder / "eval" / "step_000004.json").read_text())
    assert offline["values"] == inside["values"]
    before = torch.load(folder / "eval" / "step_000000.pt")["media"]
    after = torch.load(folder / "eval" / "step_000004.pt")["media"]
    again = torch.load(next((tmp_path / "offline").rglob("step_000000.pt")))["media"]
    assert torch.equal(after, again)
    assert not torch.equal(before, after)


def test_samples_of_a_prompt_are_averaged() -> None:
    """Three pictures per prompt: the mean of their scores; the grid shows the first with its own score."""
    one = evaluator()()
    settings = evaluator()
    settings.samples = 3
    three = settings()
    assert torch.equal(three.media, one.media)
    assert torch.equal(three.pictured["brightness"], one.values["brightness"][:2])
    assert not torch.equal(three.values["brightness"], one.values["brightness"])
    assert three.values["brightness"].std() > 0
