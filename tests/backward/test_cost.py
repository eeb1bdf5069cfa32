"""The cost model: the papers' arithmetic, and equality with the passes that real windows count."""

import pytest

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.cost import predict
from jaggrl.backward.interpolants import Debiased, Ends, Exact, Fitted, Lagrange, Linear, Subset
from jaggrl.backward.strategy import Backward
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.grouping import cut
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.rollout import Sampler
from tests.toys import toy_trainer


def sizes(steps, window=4):
    return [(len(g.steps), g.position) for g in cut(range(steps), window)]


def cost(interpolant, groups, updates=100, checkpointing=True, lora=False, references=0, **backward):
    return predict(Backward(interpolant, **backward), groups, updates, checkpointing, lora, references, 21)


@pytest.mark.parametrize(
    ("steps", "jagg_frac", "reference", "saving"),
    [
        (20, 0.6, False, 18 / 101),  # FLUX DanceGRPO: 3 of 5 windows; reported 18.3 %
        (12, 0.6, False, 12 / 69),  # Qwen-Image DanceGRPO: 2 of 3; reported 17.2 %
    ],
)
def test_the_papers_step_savings(steps, jagg_frac, reference, saving):
    told = cost(Linear(), sizes(steps), references=int(reference), jagg_frac=jagg_frac, served="off")
    assert told.step_saving == pytest.approx(saving)


def test_the_papers_update_saving_with_reference_forwards():
    """Flow-GRPO-Fast's update stage with a KL: 30 % when every window is interpolated."""
    assert cost(Linear(), sizes(12), references=1, served="off").update_saving == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("lora", "checkpointing", "jagg", "served"),
    [(False, False, 1.5, 2.0), (False, True, 1.6, 2.0), (True, False, 8 / 6, 2.0), (True, True, 1.5, 2.0)],
)
def test_speed_ups_at_w_4(lora, checkpointing, jagg, served):
    for mode, expected in (("off", jagg), ("fresh", served)):
        told = cost(Linear(), sizes(4), 1, checkpointing, lora, served=mode)
        assert told.exact_units / told.units == pytest.approx(expected)


def test_samples_that_are_not_trained_cost_only_their_rollout():
    whole, third = (
        cost(Linear(), sizes(20))
        if share is None
        else predict(Backward(Linear()), sizes(20), 100, True, False, 0, 21, share=share)
        for share in (None, 1 / 3)
    )
    assert third.units == pytest.approx(whole.units / 3)
    assert third.update_saving == pytest.approx(whole.update_saving)
    assert third.rollout_units == whole.rollout_units


def test_describe_is_one_line():
    told = cost(Linear(), sizes(20), updates=2).describe()
    assert "\n" not in told
    assert "5 of 5 windows" in told
    assert "10 backwards" in told
    assert "predicted saving" in told


STRATEGIES = {
    "exact": (Exact(), {}),
    "jagg": (Linear(), {}),
    "jagg off": (Linear(), {"served": "off"}),
    "jagg batched": (Linear(), {"graph": "batched"}),
    "jagg corrected": (Linear(), {"served": "corrected"}),
    "jagg sequential corrected": (Linear(), {"served": "corrected", "graph": "sequential"}),
    "jagg always": (Linear(), {"served": "always"}),
    "half": (Linear(), {"jagg_frac": 0.5}),
    "ablate": (Ends(), {}),
    "quadratic": (Lagrange(3), {}),
    "subset": (Subset(2), {}),
    "debiased": (Debiased(1.0), {}),
    "fitted": (Fitted(), {}),
    "fitted sequential": (Fitted(), {"graph": "sequential"}),
    "unequal": (Linear(), {"window": [5, 3]}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_predicted_passes_are_the_counted_ones(name):
    """Over a real rollout of two updates; ten trained steps leave a remainder of two at W = 4."""
    interpolant, settings = STRATEGIES[name]
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=0.1)
    sampler = Sampler(DanceSchedule(11, 3.0), Everywhere(), Euler(), DanceSDE(0.3))
    trainer = toy_trainer(algorithm, sampler, interpolant, settings, updates_per_rollout=2, micro_batch=2)
    counted = trainer.step()
    groups = sizes(10, trainer.backward.window)
    told = predict(trainer.backward, groups, 2, False, False, False, 11)
    micro_batches = 4  # eight samples in micro-batches of two
    for field in ("grad_forwards", "nograd_forwards", "served", "backwards"):
        assert counted[f"backward/{field}"] == pytest.approx(getattr(told, field) * micro_batches), field
    # the run's own account: forwards of rollout and update, and backwards at their price
    assert counted["cost/forward_equivalents"] == pytest.approx(8 * (told.units + told.rollout_units))
