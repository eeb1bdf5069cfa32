"""Which steps are stochastic: goldens of the window rules, and their limits."""

import math

import pytest

from jaggrl.diffusion.exploration import Everywhere, FixedWindow, Nowhere, RandomWindow, SlidingWindow
from jaggrl.diffusion.grouping import cut, eligible
from jaggrl.errors import UserError


def starts(rule, count, steps=25):
    return [rule(r, steps, 0).start for r in range(count)]


def test_everywhere_nowhere_fixed():
    assert Everywhere()(0, 10, 0) == range(10)
    assert len(Nowhere()(0, 10, 0)) == 0
    assert FixedWindow(4, 12)(3, 21, 0) == range(4, 12)
    with pytest.raises(UserError, match="does not lie in 0-10"):
        FixedWindow(4, 12)(0, 10, 0)


def test_random_window_covers_both_ends_and_is_the_same_on_all_ranks():
    rule = RandomWindow(3, 0, 5)
    drawn = starts(rule, 60, 10)
    assert set(drawn) == {0, 1, 2} and drawn == starts(rule, 60, 10)
    assert len(set(starts(RandomWindow(3, 0, 3), 10, 6))) == 1  # flow_grpo's FLUX setting never moves
    with pytest.raises(UserError, match="does not fit 4 steps"):
        RandomWindow(3, 0, 5)(0, 4, 0)


def test_progressive_window_moves_and_rolls_back():
    rule = SlidingWindow(4, iters=2, stride=3, roll_back=True)
    assert starts(rule, 10, 9) == [0, 0, 3, 3, 6, 6, 0, 0, 3, 3]
    assert rule(4, 9, 0) == range(6, 7)  # never beyond S - 2
    assert starts(SlidingWindow(4, 2, 3, roll_back=False), 10, 9) == [0, 0, 3, 3, 6, 6, 6, 6, 6, 6]
    assert set(starts(SlidingWindow(4, 2, stride=0), 10, 9)) == {0}  # the frozen window of MixGRPO-Flash*


def test_decaying_windows_stay_shorter_and_shorter():
    assert starts(SlidingWindow(4, iters=3, strategy="decay"), 8) == [0, 0, 0, 1, 1, 2, 3, 4]
    exp = SlidingWindow(4, iters=5, strategy="exp_decay", roll_back=False)
    drawn = starts(exp, 120)
    stays = [drawn.count(s) for s in range(22)]
    want = [math.ceil(5 * math.exp(-0.1 * max(0, s - 13))) for s in range(22)]
    assert stays == want


def test_random_strategy_holds_its_start():
    drawn = starts(SlidingWindow(4, iters=5, strategy="random"), 100)
    assert all(len(set(drawn[i : i + 5])) == 1 for i in range(0, 100, 5)) and len(set(drawn)) > 5


@pytest.mark.parametrize("bad", [{"strategy": "zigzag"}, {"size": 0}, {"iters": 0}, {"stride": -1}])
def test_bad_values_are_one_line(bad):
    with pytest.raises(UserError, match="exploration"):
        SlidingWindow(**bad)


def test_windows_keep_order_and_route_the_remainder_apart():
    assert [g.steps for g in cut(range(10), 4)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [g.position for g in cut(range(10), 4)] == [0.0, 0.5, 1.0]
    assert [len(g.steps) for g in cut(range(9), [2, 3])] == [2, 3, 2, 2]
    assert [g.position for g in cut(range(20), 4)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_eligible_counts():
    assert [eligible(15, 0.6), eligible(19, 0.6), eligible(20, 0.6), eligible(5, 0.6)] == [9, 11, 12, 3]
    for bad in (0.0, 1.5):
        with pytest.raises(UserError, match="outside"):
            eligible(10, bad)
    with pytest.raises(UserError, match="trains none"):
        eligible(1, 0.5)
