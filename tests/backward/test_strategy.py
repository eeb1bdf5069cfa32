"""Strategies on toy and real windows: served velocities, fitted weights, permuted steps, expectations."""

from dataclasses import replace

import pytest
import torch

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Debiased, Exact, Fitted, Lagrange, Linear, Subset, alpha
from jaggrl.backward.measure import alone, deposit, likeness
from jaggrl.backward.strategy import Backward
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.rollout import Sampler
from tests.toys import Field, gradients, toy_trainer, toy_window


def toy(W=5, B=3, affine=False, on_path=False, seed=0):
    """A field and a fresh window of it, fp32."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    field = Field(affine)
    t = torch.sort(torch.rand(W, B, generator=g), 0, descending=True).values
    z = torch.randn(W, B, 2, 4, 4, generator=g)
    if on_path:
        z = z[:1] + alpha(t)[..., None, None, None] * (z[-1:] - z[:1])
    c = torch.randn(B, 4, generator=g)
    return field, toy_window(field, z, t, c, torch.randn(z.shape, generator=g), fresh=True)


def pull(field, window, interpolant, **kwargs):
    report = Backward(interpolant, window=window.size, **kwargs)(window)
    return gradients(field), report


def moved(field, window, by=0.05):
    """The same window after the parameters moved: what the rollout stored is stale."""
    with torch.no_grad():
        for p in field.parameters():
            p += by * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return replace(window, fresh=False)


def real_windows(steps=11, window=5):
    """Windows of a toy rollout under a policy gradient, at the rollout's own parameters, and the network."""
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=0.1)
    sampler = Sampler(DanceSchedule(steps, 3.0), Everywhere(), Euler(), DanceSDE(0.3))
    trainer = toy_trainer(algorithm, sampler)
    batch = algorithm.credit(trainer.score(trainer.sample()))
    groups = algorithm.groups(batch.trajectory, 0, window, 0)
    micro = next(batch.micro_batches(8))
    return trainer.policy, list(algorithm.windows(micro, trainer.policy, groups))


@pytest.mark.parametrize("graph", ["joint", "batched", "sequential"])
def test_corrected_velocities_are_exact_where_the_jacobian_is_interpolated_exactly(graph):
    """Affine field, affine path, any parameters: what the anchors moved says what the middle moved."""
    field, window = toy(affine=True, on_path=True)
    window = moved(field, window)
    recomputed, _ = pull(field, window, Linear(), served="off", graph=graph)
    corrected, report = pull(field, window, Linear(), served="corrected", graph=graph)
    stale, _ = pull(field, window, Linear(), served="always", graph=graph)
    assert torch.allclose(corrected, recomputed, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(stale, recomputed, rtol=1e-2, atol=1e-3)
    assert report.passes.served == 3
    assert report.passes.nograd_forwards == (2 if graph == "sequential" else 0)


def test_corrected_velocities_beat_stale_ones_on_real_windows():
    policy, windows = real_windows()
    field = policy.model.network
    window = moved(field, windows[0])
    recomputed, corrected, stale = (
        pull(field, window, Linear(), served=served)[0] for served in ("off", "corrected", "always")
    )
    assert (corrected - recomputed).norm() < 0.5 * (stale - recomputed).norm()


def test_modes_of_fitted_agree():
    field, window = toy()
    results = [
        pull(field, window, Fitted(), graph=graph, served=served)[0]
        for graph in ("joint", "batched", "sequential")
        for served in ("off", "fresh")
    ]
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=1e-5, atol=1e-6)


def test_fitted_finds_the_weights_of_a_velocity_in_the_anchors_span():
    t = torch.tensor([0.9, 0.6, 0.1]).unsqueeze(1).expand(3, 2)
    anchors = [torch.randn(2, 4, 4), torch.randn(2, 4, 4)]
    v = 0.2 * anchors[0] + 1.1 * anchors[1]
    rule = Fitted(ridge=1e-8)
    table = rule.table(t, torch.Generator())
    expected = torch.tensor([[0.2, 0.2], [1.1, 1.1]])
    assert torch.allclose(rule.weights(table, 1, v, anchors), expected, atol=1e-5)
    linear = table.weights_AWB[:, 1]
    assert torch.allclose(Fitted(ridge=1e9).weights(table, 1, v, anchors), linear, atol=1e-5)
    zeros = [torch.zeros(2, 4, 4)] * 2
    assert torch.allclose(rule.weights(table, 1, zeros[0], zeros), linear)


def test_fitted_is_exact_under_theorem_1():
    field, window = toy(affine=True, on_path=True)
    exact, fitted = pull(field, window, Exact())[0], pull(field, window, Fitted())[0]
    assert torch.allclose(exact, fitted, rtol=1e-3, atol=1e-5)


def test_permuted_steps_are_taken_by_rules_without_times_and_exact_by_the_others():
    field, window = toy()
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = replace(window, t_WB=window.t_WB[order])
    assert not Backward(Subset(2)).by_time
    assert not Backward(Exact()).by_time
    assert Backward(Linear()).by_time
    assert pull(field, permuted, Subset(2))[1].passes.backwards == 2
    assert pull(field, permuted, Linear())[1].passes.backwards == 5


def test_chebyshev_anchors_lie_inside_the_window():
    t = torch.linspace(1, 0, 9).unsqueeze(1)
    assert Lagrange(3, "even").table(t, torch.Generator()).anchors == (0, 4, 8)
    assert Lagrange(3, "chebyshev").table(t, torch.Generator()).anchors == (1, 4, 7)


@pytest.mark.parametrize("interpolant", [Linear(), Lagrange(3), Debiased(), Subset(2)])
def test_served_and_batched_are_the_plain_form_on_real_windows(interpolant):
    """Equal to 1e-6 of the largest entry, fp32."""
    policy, windows = real_windows()
    results = []
    for graph, served in (
        ("sequential", "off"),
        ("joint", "fresh"),
        ("batched", "off"),
        ("batched", "fresh"),
    ):
        backward = Backward(interpolant, 5, graph, served=served, seed=1)
        for window in windows:
            backward(window)
        results.append(gradients(policy.model.network))
    for other in results[1:]:
        assert float((other - results[0]).abs().max()) <= 1e-6 * float(results[0].abs().max())


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_debiased_expects_the_exact_gradient_of_real_windows(probability):
    """Means of draws within 4 standard errors along the gradient and random directions; known variance."""
    policy, windows = real_windows()
    window = windows[0]
    parameters = policy.parameters

    def gradient(backward):
        _, grads = alone(parameters, lambda: backward(window))
        return torch.cat([g.flatten() for g in grads]).double()

    exact = gradient(Backward(Exact(), 5))
    jagg = gradient(Backward(Linear(), 5))
    draws = torch.stack([gradient(Backward(Debiased(probability), 5, seed=seed)) for seed in range(120)])
    directions = torch.randn(9, len(exact), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    directions[0] = exact
    seen, true = draws @ directions.T, directions @ exact
    standard_error = seen.std(0) / len(draws) ** 0.5
    assert bool(((seen.mean(0) - true).abs() <= 4 * standard_error + 1e-9).all())
    # each outcome by itself: its mean is exact to rounding, its spread is the variance of the draws
    outcomes = torch.stack([draws[i] for i in _distinct(draws)])
    assert len(outcomes) == (3 if probability == 1 else 4)
    is_jagg = (outcomes - jagg).norm(dim=1) < 1e-5 * jagg.norm()
    weights = torch.where(is_jagg, 1 - probability, probability / 3).double()
    assert torch.allclose(weights @ outcomes, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    variance = float(weights @ (outcomes - exact).square().sum(1))
    measured = float((draws - exact).square().sum(1).mean())
    assert measured == pytest.approx(variance, rel=0.35)
    assert variance > float((jagg - exact).square().sum())  # what the absence of bias costs


def _distinct(draws):
    kept = []
    for i, draw in enumerate(draws):
        if all(float((draw - draws[k]).norm()) > 1e-5 * float(draw.norm()) for k in kept):
            kept.append(i)
    return kept


def test_alone_leaves_what_was_accumulated_before():
    field, window = toy()
    parameters = list(field.parameters())
    Backward(Exact(), 5)(window)
    before = [p.grad.clone() for p in parameters]
    _, grads = alone(parameters, lambda: Backward(Linear(), 5)(window))
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))
    seen = likeness(grads, before)
    flat = [torch.cat([g.flatten() for g in gs]) for gs in (grads, before)]
    assert seen.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(*flat, dim=0)), abs=1e-5)
    assert seen.ratio == pytest.approx(float(flat[0].norm() / flat[1].norm()), rel=1e-5)
    deposit(parameters, grads)
    assert all(torch.allclose(p.grad, b + g) for p, b, g in zip(parameters, before, grads, strict=True))
