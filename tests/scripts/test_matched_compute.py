"""The arithmetic of the comparison at equal compute, and its files."""

import math
import random
import statistics

import pytest

from jaggrl.errors import UserError
from scripts.matched.plot import plot
from scripts.matched_compute import (
    ARMS,
    PAIRS,
    TITLES,
    TOGETHER,
    achieved,
    captions,
    differences,
    holm,
    interval,
    markdown,
    power,
    summary,
    verdict,
)


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
        run_of("jagg", s, 0.011 * s + 0.001) for s in range(3)
    ]
    exact, jagg = summary(runs)
    (pair,) = differences(runs, "hpsv2")
    assert (pair["one"], pair["other"], pair["seeds"]) == ("jagg", "exact", [0, 1, 2])
    assert pair["difference"] == (
        pytest.approx(0.002),
        pytest.approx(4.3027 * 0.001 / math.sqrt(3), rel=1e-3),
    )
    mean, half = jagg["gain"]["hpsv2"]
    assert mean == pytest.approx(0.012) and half == pytest.approx(4.3027 * 0.011 / math.sqrt(3), rel=1e-3)
    text = markdown([exact, jagg], [pair], "hpsv2")
    assert "| JAGG, W=4 | 3 | 4 | 20 | 2 | +0.0120 ± 0.0273 | +0.0120 ± 0.0273 |" in text
    assert "| JAGG, W=4 less exact, every step | 3 | +0.0020 ± 0.0025 | 0.074 | not told apart |" in text
    assert "deviation of the difference of two arms 0.0010 over seeds; 3 seeds see" in achieved(
        [pair], [exact, jagg], "hpsv2"
    )
    plot(runs, [exact, jagg], [pair], TITLES, "hpsv2", tmp_path / "matched.png")
    assert (tmp_path / "matched.png").stat().st_size > 1000


def test_arms_together_are_the_mean_of_each_seed():
    gains = {arm: [random.Random(f"{arm} {seed}").random() for seed in range(3)] for arm in ARMS}
    runs = [run_of(arm, seed, gains[arm][seed]) for seed in range(3) for arm in ARMS]
    first = differences(runs[:-1], "hpsv2")[0]  # the last seed's last arm is missing
    assert (first["one"], first["other"], first["seeds"]) == ("interpolated", "discarded", [0, 1])
    expected = [
        statistics.fmean(gains[arm][seed] for arm in ("jagg", "jagg_all", "long"))
        - statistics.fmean(gains[arm][seed] for arm in ("ablate", "subset", "subset_all"))
        for seed in (0, 1)
    ]
    assert first["difference"][0] == pytest.approx(statistics.fmean(expected))


def test_verdicts_are_corrected_for_the_number_of_pairs():
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    for p, mean, told in ((0.04, 1.0, "more"), (0.04, -1.0, "less"), (0.05, 1.0, "not told apart")):
        assert verdict({"p": p, "difference": (mean, 0.1)}) == told
    assert verdict({"p": math.nan, "difference": (1.0, None)}) == "not told apart"


def test_every_seed_has_captions_of_its_own(tmp_path):
    texts = [captions(seed, tmp_path).read_text().splitlines() for seed in range(10)]
    assert all(len(text) == 4 for text in texts) and len(set(sum(texts, []))) == 40
    with pytest.raises(UserError, match="used up"):
        captions(1000, tmp_path)


def test_one_seed_has_no_interval_and_power_is_told():
    assert interval([1.0]) == (1.0, None)
    assert "34% of the gain" in power(10)
    assert {name for pair in PAIRS for name in pair} == set(ARMS) | set(TOGETHER)
