"""Rewards to credit: advantages, r, preferences, weights and selections, with failed scores in between."""

import math

import pytest
import torch

from jaggrl.credit import Advantage, best_of, optimality, preference, sample_weights, standardised_total
from jaggrl.errors import UserError

NAN = math.nan


def test_group_of_eight_with_one_failure_is_a_group_of_seven():
    rewards = torch.rand(8)
    failed = rewards.clone()
    failed[3] = NAN
    others = torch.tensor([i for i in range(8) if i != 3])
    for rule in (Advantage(), Advantage(std="global", ddof=0, eps=1e-4)):
        eight = rule({"r": failed}, {"r": 1.0}, 8)
        assert torch.allclose(eight[others], rule({"r": rewards[others]}, {"r": 1.0}, 7), atol=1e-6)
        assert eight[3] == 0
    share = preference(failed, 8, pairwise=False)
    assert torch.allclose(share[others], preference(rewards[others], 7, False), atol=1e-7) and share[3] == 0
    weight = sample_weights(failed.isfinite(), torch.zeros(8, dtype=torch.long))
    assert torch.allclose(weight[others], torch.full((7,), 1 / 7)) and weight[3] == 0


@pytest.mark.parametrize("reward", [[0.3] * 4, [0.1 + 0.2] * 4, [NAN] * 4, [NAN, NAN, NAN, 0.5], [0.0] * 4])
def test_nothing_to_compare_gives_zero(reward):
    parts = {"r": torch.tensor(reward + [1.0, 2.0, 3.0, 4.0])}
    for rule in (Advantage(), Advantage(std="global", ddof=0, eps=1e-4)):
        assert rule(parts, {"r": 1.0}, 4)[:4].tolist() == [0.0] * 4
    assert preference(parts["r"], 4, False)[:4].abs().max() == 0
    assert preference(parts["r"], 4, True)[:4].abs().max() == 0


def test_standard_deviations_of_the_repositories():
    r = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
    one = {"r": 1.0}
    numpy_std = float(r.numpy().std())
    assert Advantage(std="global", eps=1e-4, ddof=0)({"r": r}, one, 3)[2] == pytest.approx(
        1 / (numpy_std + 1e-4)
    )
    assert Advantage()({"r": r}, one, 3).tolist() == pytest.approx([-1, 0, 1, -1, 0, 1])
    assert Advantage(ddof=0)({"r": r}, one, 3)[2] == pytest.approx(math.sqrt(1.5))
    everyone = Advantage(std="global", centre="global")({"r": r}, one, 3)
    assert everyone[0] == pytest.approx(float((1 - r.mean()) / r.std()))
    assert Advantage(clip=0.5)({"r": r}, one, 3).abs().max() == 0.5


def test_mix_of_rewards_or_of_advantages():
    parts = {"a": torch.tensor([0.0, 1.0, 2.0]), "b": torch.tensor([30.0, 10.0, 20.0])}
    weights = {"a": 1.0, "b": 2.0}
    total = {"t": parts["a"] + 2 * parts["b"]}
    assert torch.allclose(Advantage()(parts, weights, 3), Advantage()(total, {"t": 1.0}, 3))
    each = Advantage()(parts, {"a": 1.0}, 3) + 2 * Advantage()({"b": parts["b"]}, {"b": 1.0}, 3)
    assert torch.allclose(Advantage(mix="advantage")(parts, weights, 3), each)
    scaled = standardised_total(parts, weights)
    want = parts["a"] / parts["a"].std(correction=0) + 2 * parts["b"] / parts["b"].std(correction=0)
    assert torch.allclose(scaled, want)
    parts["b"][1] = NAN
    assert standardised_total(parts, weights).isnan().tolist() == [False, True, False]


def test_advantage_mapping_to_r():
    a = torch.tensor([-9.0, -5.0, -2.5, 0.0, 2.5, 5.0, 9.0])
    assert optimality(a, 5.0).tolist() == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_preference_scalar_and_pairwise():
    r = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, NAN])
    assert preference(r[:4], 4, False).tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert preference(r, 6, True).tolist() == [
        -1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]  # a tie and a failure are dropped
    two = torch.tensor([0.2, 0.9])
    scalar, pair = preference(two, 2, False), preference(two, 2, True)
    assert torch.allclose(scalar / scalar.abs().max(), pair)


@pytest.mark.parametrize(("scale", "offset"), [(3.0, 0.0), (1.0, 7.0), (0.01, -2.0)])
def test_preference_is_affine(scale, offset):
    r = torch.rand(8, dtype=torch.float64)
    assert torch.allclose(
        preference(scale * r + offset, 4, False), scale * preference(r, 4, False), atol=1e-7
    )


def test_best_and_worst_of_each_group():
    a = torch.tensor([3.0, 1.0, 2.0, 0.0, 9.0, 8.0, 7.0, 6.0])
    valid = torch.ones(8, dtype=torch.bool)
    assert best_of(a, valid, 4, 2).tolist() == [True, False, False, True, True, False, False, True]
    valid[0] = False
    assert best_of(a, valid, 4, 2)[:4].tolist() == [False, False, True, True]
    valid[:] = False
    assert not best_of(a, valid, 4, 2).any()
    assert best_of(a, ~valid, 4, 3).view(2, 4).sum(1).tolist() == [3, 3]


def test_weights_sum_to_one_per_update():
    part = torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.tensor([True, False, True, False, False, False])
    assert sample_weights(valid, part).tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("key", ["std", "centre", "mix"])
def test_unknown_choices_are_refused(key):
    with pytest.raises(UserError, match=f"advantage.{key}=sum is unknown; use"):
        Advantage(**{key: "sum"})
