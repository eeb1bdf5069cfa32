"""The scripts' own arithmetic: curves to verdicts, forces of a second update, the comparison's table."""

import math

import pytest

from jaggrl.algorithms.diffusion_art import DiffusionART
from jaggrl.diffusion.kernels import FlowSDE
from jaggrl.errors import UserError
from scripts.claims.forces import _forces
from scripts.claims.plots import draw
from scripts.claims.runs import put_into
from scripts.claims.verdicts import SPAN, first_reach, late_average, shape, smooth, sparkline
from scripts.compare_algorithms import interval, markdown, summary
from scripts.reproduce_claims import collapse_claims, report, speed
from tests.algorithms.presets import ode
from tests.toys import gradients, toy_trainer

UP = [min(1.0, 0.03 * i) for i in range(60)]
COLLAPSE = [min(1.0, 0.05 * i) if i < 30 else max(-1.0, 1 - 0.1 * (i - 30)) for i in range(60)]
FLAT = [0.0] * 60


def curve(arm, rewards, seed=0, cost=1.0):
    costs = [cost * (i + 1) for i in range(len(rewards))]
    return {
        "arm": arm,
        "seed": seed,
        "rewards": rewards,
        "spread": 0.4,
        "cost": costs,
        "grad_norm": [1.0] * 60,
    }


def test_shapes():
    assert [(s.rose, s.collapsed) for s in (shape(r, 0.4) for r in (UP, COLLAPSE, FLAT))] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    falling = shape([-0.02 * i for i in range(60)], 0.4)
    assert not falling.rose and falling.collapsed
    assert "rose and collapsed" in str(shape(COLLAPSE, 0.4))


def test_smoothing_has_its_half_life_and_no_start_bias():
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    step = smooth([0.0] * 400 + [1.0] * SPAN)
    assert step[-1] == pytest.approx(0.5)


def test_levels_and_costs():
    assert late_average(UP) == pytest.approx(sum(UP[-20:]) / 20)
    assert first_reach(UP, list(range(60)), 0.0) == 0
    assert first_reach(UP, list(range(60)), 2.0) is None
    rising = [1 - math.exp(-i / 15) for i in range(60)]
    curves = [curve("art", rising, cost=1.0), curve("nft", rising, cost=3.0)]
    assert speed(curves, "art", "nft", "cost") == pytest.approx([3.0])
    assert speed(curves, "art", "flow_grpo_fast", "cost") == []
    assert speed([curve("art", FLAT), curve("nft", UP)], "art", "nft", "cost") == [None]
    assert len(sparkline(UP)) == 60 and sparkline(UP)[0] < sparkline(UP)[-1]


def test_verdicts_say_what_they_saw():
    curves = [
        curve("nft_on_policy", COLLAPSE),
        curve("art", COLLAPSE),
        curve("nft", UP),
        curve("nft", COLLAPSE, 1),
    ]
    said = {arm: holds for _, arm, holds in collapse_claims(curves)}
    assert said == {"nft_on_policy": [True], "art": [False], "nft": [True, False]}
    text = report(curves, [])
    assert "AGREES (1 of 1 seeds): on-policy NFT" in text
    assert "DISAGREES (0 of 1 seeds): ART rises" in text and "MIXED (1 of 2 seeds)" in text
    forces = [
        {"guiding_output": 4.0, "restoring_output": 1.0, "guiding_gradient": 1.0, "restoring_gradient": 0.5}
    ]
    assert "here 4.00x" in report(curves, forces) and "DISAGREES: at update 2 its parameter" in report(
        curves, forces
    )


def test_forces_add_up_to_the_second_update():
    algorithm = DiffusionART(FlowSDE(0.7), mask_threshold=1e9)
    trainer = toy_trainer(algorithm, ode(), updates_per_rollout=2, micro_batch=4, lr=0.5)
    first, second = algorithm.credit(trainer.score(trainer.sample())).split(2)
    groups = algorithm.groups(first.trajectory, 0, 4, 0)

    def pull(part):
        for micro in part.micro_batches(4):
            for window in algorithm.windows(micro, trainer.policy, groups):
                trainer.backward(window)

    assert _forces(trainer, first).restoring_output < 1e-6  # nothing has drifted yet
    pull(first)
    trainer.optimize()
    forces = _forces(trainer, second)
    assert forces.guiding_output == pytest.approx(1, abs=1e-3) and forces.restoring_output > 0
    pull(second)
    whole = float(gradients(trainer.policy.model.network).norm()) * 7 * 32 / 2
    assert abs(forces.guiding_gradient - forces.restoring_gradient) <= whole * (1 + 1e-4)
    assert whole <= (forces.guiding_gradient + forces.restoring_gradient) * (1 + 1e-4)


def result(seed, gain):
    rewards = {
        "hpsv2": {"trained": True, "before": 0.3, "gain": gain, "ci_low": gain - 1, "ci_high": gain + 1},
        "shapes_verifier": {"trained": False, "before": 0.4, "gain": 0.0, "ci_low": -0.1, "ci_high": 0.1},
    }
    cost = {"optimizer_updates": 60, "forward_equivalents": 1e4, "seconds": {"training": 100.0 + seed}}
    return {"seed": seed, "rewards": rewards, **cost}


def test_intervals_are_over_seeds_or_over_prompts():
    one = [{"gain": 0.1, "ci_low": 0.0, "ci_high": 0.2}]
    assert interval(one) == (0.1, 0.0, 0.2)
    mean, low, high = interval([{"gain": g} for g in (1.0, 2.0, 3.0)])
    assert mean == pytest.approx(2) and high - mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-3)
    assert mean - low == pytest.approx(high - mean)


def test_table_and_readme(tmp_path):
    rows = [
        summary("shapes_dance", [result(0, 0.1), result(1, 0.3)]),
        summary("shapes_nft", [result(0, 0.2)]),
    ]
    text = markdown(rows)
    assert "| dance | 2 | +0.2000 [" in text and "| nft | 1 | +0.2000 [-0.8000, +1.2000]" in text
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n")
    put_into(readme, "x", text)
    assert readme.read_text() == f"a\n<!-- x: begin -->\n{text}<!-- x: end -->\nb\n"
    readme.write_text("no markers")
    with pytest.raises(UserError, match="has no lines"):
        put_into(readme, "x", text)


def test_every_curve_is_drawn(tmp_path):
    draw(
        [curve("nft", UP), curve("art", FLAT), curve("shapes_art", UP)],
        ["shapes_art"],
        tmp_path / "claims.png",
    )
    assert (tmp_path / "claims.png").stat().st_size > 1000
