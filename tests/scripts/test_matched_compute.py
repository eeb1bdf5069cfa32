"""The arithmetic of the comparison at equal compute, and its files."""

import math

import pytest

from scripts.matched_compute import ARMS, interval, markdown, plot, power, summary


def run_of(arm, seed, gain):
    scores = {"gain": gain, "ci_low": 0.0, "ci_high": 0.0, "before": 0.5, "trained": True}
    return {
        "arm": arm,
        "seed": seed,
        "rewards": {"hpsv2": scores, "shapes_verifier": scores | {"trained": False}},
        "updates": 4,
        "cost": [10.0, 20.0],
        "seconds": [1.0, 2.0],
        "curve": [0.5, 0.6],
    }


def test_differences_are_paired_by_seed(tmp_path):
    runs = [run_of("exact", s, 0.01 * s) for s in range(3)] + [
        run_of("jagg", s, 0.01 * s + 0.002) for s in range(3)
    ]
    exact, jagg = summary(runs)
    assert exact["minus_exact"] is None
    assert jagg["minus_exact"] == (pytest.approx(0.002), pytest.approx(0.0, abs=1e-12))
    assert jagg["gain"][0] == pytest.approx(0.012) and jagg["gain"][1] == pytest.approx(
        4.3027 * 0.01 / math.sqrt(3), rel=1e-3
    )
    text = markdown([exact, jagg])
    assert "| JAGG, W=4 | 3 | 4 | 20 | 2 | +0.0120 ± 0.0248 | +0.0020 ± 0.0000 |" in text
    plot(runs, [exact, jagg], tmp_path / "matched.png")
    assert (tmp_path / "matched.png").stat().st_size > 1000


def test_one_seed_has_no_interval_and_power_is_told():
    assert interval([1.0]) == (1.0, None)
    assert "35% of the gain" in power(5)
    assert {"exact", "jagg", "ablate", "subset"} <= set(ARMS)
