"""route=auto: thresholds, hysteresis, budget, window lengths, and what training sees of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Linear
from jaggrl.backward.measure import Likeness
from jaggrl.backward.routing import Auto
from jaggrl.backward.strategy import Backward
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.errors import UserError
from jaggrl.rollout import Sampler
from tests.toys import toy_trainer

ROOT = Path(__file__).parents[2]


def seen(cosine):
    return Likeness(cosine, 1.0, 1.0)


def auto_trainer(ranks=None, policy=None, **settings):
    """Windows of 4 over 8 trained steps of a toy, routed by what is measured."""
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=0.1)
    sampler = Sampler(DanceSchedule(9, 3.0), Everywhere(), Euler(), DanceSDE(0.3))
    backward = {"route": "auto", "auto": Auto(**settings)}
    return toy_trainer(
        algorithm,
        sampler,
        Linear(),
        backward,
        micro_batch=1,
        updates_per_rollout=2,
        ranks=ranks,
        policy=policy,
    )


def test_first_measurement_decides_and_hysteresis_keeps():
    auto = Auto(threshold=0.5, hysteresis=0.1, memory=0.0)
    auto.begin()
    assert auto.wants(0.2)
    assert not auto.routed(0.2)
    auto.observe(0.2, seen(0.52))
    assert auto.routed(0.2)
    auto = Auto(threshold=0.5, hysteresis=0.1, memory=0.5)
    for cosine, routed in ((0.52, True), (0.34, True), (0.2, False), (0.8, False), (0.9, True)):
        auto.observe(0.2, seen(cosine))  # running means .52 .43 .315 .5575 .73
        assert auto.routed(0.2) == routed
    auto.observe(0.2, Likeness(0.0, 0.0, 0.0))  # all clipped
    assert auto.routed(0.2)


def test_budget_buys_the_measurement_longest_due():
    auto = Auto(overhead=0.1)
    auto.begin()
    for position in (0.0, 0.5):
        assert auto.wants(position)
        auto.observe(position, seen(0.9))
        auto.account(position, 10, 4)
    auto.begin()
    assert not auto.wants(0.0)
    auto.account(0.0, 100)  # worked 120, spent 8: room for one of 4
    auto.begin()
    assert [auto.wants(p) for p in (0.0, 0.5)] == [True, False]


def test_measurements_go_round_the_micro_batches():
    auto = Auto(overhead=1.0)
    turns = []
    for _ in range(4):
        auto.begin()
        for turn in range(3):
            if auto.wants(0.0):
                turns.append(turn)
                auto.observe(0.0, seen(0.9))
                auto.account(0.0, 1000, 1)
    assert turns == [0, 1, 2, 0]


def test_window_lengths_climb_while_the_update_stays_good():
    auto = Auto(windows=[4, 10, 20], climb=0.9, overhead=1.0)
    cosines = {4: 0.99, 10: 0.95, 20: 0.6}
    lengths = []
    for _ in range(12):
        auto.begin()
        lengths.append(auto.window)
        for position in (0.0, 0.5):
            if auto.wants(position):
                auto.observe(position, seen(cosines[auto.window]))
                auto.account(position, 100, 1)
            else:
                auto.account(position, 100)
    assert lengths == sorted(lengths[: lengths.index(20) + 1]) + [10] * (11 - lengths.index(20))


def test_a_length_that_no_window_has_is_left_for_good():
    """20 of 12 trained steps: nothing to route, so that nothing is ever measured there."""
    auto = Auto(windows=[4, 20], climb=0.9, overhead=1.0)
    lengths = []
    for _ in range(6):
        auto.begin()
        lengths.append(auto.window)
        if auto.window == 4 and auto.wants(0.0):
            auto.observe(0.0, seen(0.95))
            auto.account(0.0, 100, 1)
    assert lengths == [4, 4, 20, 4, 4, 4]


def test_bad_values_are_refused():
    for settings in ({"threshold": 1.5}, {"overhead": 0.0}, {"memory": 1.0}, {"windows": [10, 4]}):
        with pytest.raises(UserError, match="backward.auto"):
            Auto(**settings)
    with pytest.raises(UserError, match="backward.route"):
        Backward(Linear(), route="automatic")


def test_measuring_stays_within_its_share_and_is_logged():
    trainer = auto_trainer(overhead=0.1)
    for _ in range(14):
        metrics = trainer.step()
    assert metrics["backward/probe_share"] <= 0.1
    assert {"backward/cos/0.00", "backward/cos/0.50", "backward/cos"} <= metrics.keys()
    assert trainer.backward.auto._stats[0, :, 0].sum() > 4  # and went on measuring


@pytest.mark.parametrize(("threshold", "jagg_frac"), [(-0.99, 1.0), (0.9999, 0.0)])
def test_measuring_never_changes_the_update(threshold, jagg_frac):
    """The gradient is that of the routed windows, whether or not they were measured."""
    auto = auto_trainer(threshold=threshold)
    fixed = auto_trainer()
    fixed.backward.auto, fixed.backward.jagg_frac = None, jagg_frac
    for trainer in (auto, fixed):
        trainer.step()
    for ours, theirs in zip(auto.policy.parameters, fixed.policy.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_state_continues():
    one, other = auto_trainer(), auto_trainer()
    for _ in range(2):
        one.step()
    other.load_state_dict(one.state_dict())
    for ours, theirs in zip(other.policy.parameters, one.policy.parameters, strict=True):
        ours.data.copy_(theirs)
    for _ in range(2):
        assert one.step()["backward/cos/0.00"] == other.step()["backward/cos/0.00"]
    assert one.backward.auto._stats.equal(other.backward.auto._stats)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_route_alike_over_200_updates(tmp_path):
    """Different data per rank under FSDP2: no collective mismatch, the same decisions, the budget kept."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, "-m", "tests.backward.routing_ranks", str(tmp_path)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["decisions"] == ranks[1]["decisions"]
    assert ranks[0]["updates"] == 200
    assert ranks[0]["rewards"] != ranks[1]["rewards"]
    assert len(set(map(tuple, ranks[0]["decisions"]))) > 1  # routes changed on the way
    assert ranks[0]["share"] <= 0.05
