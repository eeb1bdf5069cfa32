"""Kriging: weights and anchors from a known kernel, the kernel measured on toys, and what it is good for."""

import pytest
import torch

from jaggrl.backward.interpolants import Exact, Linear
from jaggrl.backward.kriging import (
    Kriging,
    best_anchors,
    expected_cosine,
    jacobian_kernel,
    kriging_weights,
    residuals,
)
from jaggrl.backward.measure import alone
from jaggrl.backward.strategy import Backward
from jaggrl.errors import UserError
from jaggrl.infra.stopwatch import Stopwatch
from tests.backward.test_strategy import real_windows

CPU = torch.device("cpu")


def kernel_of(features):
    """The kernel of Jacobians that are these vectors."""
    return features @ features.T


def smooth(W=12, noise=0.3, seed=0):
    """Jacobians on a straight line in t, each with noise of its own."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 400, generator=g, dtype=torch.float64)
    t = torch.linspace(0, 1, W, dtype=torch.float64)[:, None]
    return (1 - t) * a + t * b + noise * torch.randn(W, 400, generator=g, dtype=torch.float64)


def test_weights_are_least_squares():
    J = smooth()
    anchors = (2, 9)
    weights = kriging_weights(kernel_of(J), anchors)
    fitted = torch.linalg.lstsq(J[list(anchors)].T, J.T).solution
    assert torch.allclose(weights, fitted, atol=1e-3)
    missed = (J - weights.T @ J[list(anchors)]).square().sum(1)
    assert torch.allclose(residuals(kernel_of(J), anchors), missed, atol=1e-6 * float(missed.max()))
    assert torch.equal(weights[:, [2, 9]], torch.eye(2, dtype=torch.float64))


def test_two_anchors_say_everything_of_a_straight_line():
    kernel = kernel_of(smooth(noise=0.0))
    anchors = best_anchors(kernel, torch.ones(12), 2)
    assert expected_cosine(kernel, torch.ones(12), anchors) > 0.9999
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    ends = kriging_weights(kernel, (0, 11))
    assert torch.allclose(ends, torch.stack([1 - t, t]), atol=1e-3)  # Eq. (7)


def test_anchors_are_the_best_of_all_pairs():
    kernel, energy = kernel_of(smooth(noise=0.6)), torch.linspace(1, 3, 12).double()
    anchors = best_anchors(kernel, energy, 2)
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12)]
    best = max(expected_cosine(kernel, energy, p) for p in pairs)
    assert expected_cosine(kernel, energy, anchors) == pytest.approx(best, abs=1e-6)


def test_target_takes_as_many_anchors_as_it_needs():
    kernel = kernel_of(smooth(noise=0.6))
    rule = Kriging(2, target=0.9)
    t = torch.linspace(1, 0, 12).unsqueeze(1)
    assert rule.asks(t)
    rule.learn(t, kernel, torch.ones(12))
    assert not rule.asks(t)
    table = rule.table(t, torch.Generator())
    assert rule.expected_cosine(t) >= 0.9
    fewer = best_anchors(kernel, torch.ones(12).double(), len(table.anchors) - 1)
    assert len(table.anchors) == 2 or expected_cosine(kernel, torch.ones(12), fewer) < 0.9
    other = Kriging(2, target=0.9)
    other.load_state_dict(rule.state_dict())
    assert other.table(t, torch.Generator()).anchors == table.anchors
    for settings in ({"anchor_count": 0}, {"target": 1.0}, {"every": 0}):
        with pytest.raises(UserError, match="backward.interpolant"):
            Kriging(**settings)


def test_a_window_that_moves_or_shrinks_is_another_window():
    """MixGRPO's: the same position, other times; each is measured for itself."""
    rule = Kriging(2)
    t = torch.linspace(1, 0, 12).unsqueeze(1)
    for steps in (slice(0, 4), slice(1, 5), slice(9, 12)):
        assert rule.asks(t[steps])
        size = len(t[steps])
        rule.learn(t[steps], kernel_of(smooth(noise=0.6))[:size, :size], torch.ones(size))
        assert rule.table(t[steps], torch.Generator()).weights_AWB.shape[1] == size
    assert not rule.asks(t[:4])


def test_kernel_of_real_windows_predicts_the_cosine_and_beats_jagg():
    """One measurement; then fresh cotangents: as good as expected, and better than the ends' linear weights."""
    policy, windows = real_windows(steps=13, window=12)
    window, parameters = windows[0], policy.parameters
    rule = Kriging(3)
    for seed in range(4):
        rule.learn(window.t_WB, *jacobian_kernel(window, parameters, torch.Generator().manual_seed(seed)))

    def cosine(interpolant):
        ways = []
        for rule_ in (interpolant, Exact()):
            backward = Backward(rule_, 12)
            backward.attach(policy.model.network, Stopwatch(CPU))
            _, grads = alone(parameters, lambda b=backward: b(window))
            ways.append(torch.cat([g.flatten() for g in grads]))
        return float(torch.nn.functional.cosine_similarity(*ways, dim=0))

    assert cosine(rule) > cosine(Linear())
    assert cosine(rule) == pytest.approx(rule.expected_cosine(window.t_WB), abs=0.1)


def test_strategy_learns_first_and_again_after_a_while():
    policy, windows = real_windows(steps=13, window=12)
    backward = Backward(Kriging(2, every=3), 12)
    backward.attach(policy.model.network, Stopwatch(CPU))
    backwards = [backward(windows[0]).passes.backwards for _ in range(5)]
    assert backwards == [14, 2, 2, 14, 2]
    assert all(
        torch.allclose(a, b)
        for a, b in zip(backward.state_dict()["interpolant"].values(), _again(backward), strict=True)
    )


def _again(backward):
    other = Backward(Kriging(2), 12)
    other.load_state_dict(backward.state_dict())
    return other.state_dict()["interpolant"].values()
