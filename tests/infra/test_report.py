"""Gains with paired intervals, the table, result.json and seconds per stage."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaggrl.infra.report import compare, gains_table, paired_bootstrap, stage_seconds, write_result


def test_bootstrap_of_a_constant_gain_is_that_gain() -> None:
    before = np.linspace(0.2, 0.3, 50)
    assert paired_bootstrap(before, before + 0.5) == pytest.approx((0.5, 0.5, 0.5))
    assert paired_bootstrap([0.25], [0.5]) == (0.25, 0.25, 0.25)
    assert all(math.isnan(x) for x in paired_bootstrap([], []))


def test_bootstrap_agrees_with_the_normal_interval() -> None:
    rng = np.random.default_rng(0)
    difference = rng.normal(0.01, 0.05, 2000)
    gain, low, high = paired_bootstrap(np.zeros(2000), difference)
    assert gain == pytest.approx(difference.mean())
    half = 1.96 * difference.std() / math.sqrt(2000)
    assert (gain - low, high - gain) == (pytest.approx(half, rel=0.06), pytest.approx(half, rel=0.06))
    assert paired_bootstrap(np.zeros(2000), difference) == (gain, low, high)  # the same draw every time


def test_bootstrap_is_paired() -> None:
    """A spread over prompts that both sides share does not widen the interval."""
    rng = np.random.default_rng(0)
    prompts = rng.normal(0, 10, 200)
    _, low, high = paired_bootstrap(prompts, prompts + rng.normal(0.1, 0.01, 200))
    assert 0.09 < low < high < 0.11


def test_compare_masks_what_could_not_be_scored_and_puts_trained_first() -> None:
    before = {"clipscore": [0.2, math.nan, 0.2, 0.2], "hpsv2": [0.25, 0.25, 0.25, 0.25]}
    after = {"clipscore": [0.3, 0.9, math.inf, 0.3], "hpsv2": [0.26, 0.26, 0.26, 0.26]}
    hpsv2, clipscore = compare(before, after, {"hpsv2"})
    assert (hpsv2.name, hpsv2.trained, hpsv2.n, hpsv2.gain) == ("hpsv2", True, 4, pytest.approx(0.01))
    assert (clipscore.trained, clipscore.n) == (False, 2)
    assert (clipscore.before, clipscore.after) == (pytest.approx(0.2), pytest.approx(0.3))


def test_table_and_result_file(tmp_path: Path) -> None:
    gains = compare(
        {"hpsv2": [0.25, 0.25], "ocr": [math.nan] * 2}, {"hpsv2": [0.26] * 2, "ocr": [1, 1]}, {"hpsv2"}
    )
    lines = gains_table(gains).splitlines()
    assert lines[0].split() == ["reward", "before", "after", "gain", "95", "%", "interval", "n"]
    assert lines[2].split() == [
        "hpsv2",
        "0.2500",
        "0.2600",
        "+0.0100",
        "[+0.0100,",
        "+0.0100]",
        "2",
        "trained",
    ]
    write_result(tmp_path, gains, {"seed": 3, "optimizer_updates": 80})
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["rewards"]["hpsv2"]["ci_low"] == pytest.approx(0.01)
    assert stored["rewards"]["hpsv2"]["trained"] is True
    assert stored["rewards"]["ocr"] == {
        "trained": False,
        "before": None,
        "after": None,
        "gain": None,
        "ci_low": None,
        "ci_high": None,
        "n": 0,
    }
    assert (stored["seed"], stored["optimizer_updates"]) == (3, 80)
    assert "torch" in stored["versions"]


def test_stage_seconds_leave_the_first_step_out_of_the_mean() -> None:
    rows = [
        {"step": 0, "eval/x": 1.0},
        {"step": 1, "time/step_s": 100.0, "time/rollout_s": 90.0},
        {"step": 2, "time/step_s": 4.0, "time/rollout_s": 1.0, "time/eval_s": 2.0},
        {"step": 3, "time/step_s": 2.0, "time/rollout_s": 2.0},
    ]
    seconds = stage_seconds(rows)
    assert seconds["step"] == {"total": 106.0, "per_step": 3.0}
    assert seconds["rollout"] == {"total": 93.0, "per_step": 1.5}
    assert seconds["eval"] == {"total": 2.0, "per_step": 1.0}
    assert stage_seconds(rows[:2])["step"] == {"total": 100.0, "per_step": 100.0}
    assert stage_seconds([]) == {}
