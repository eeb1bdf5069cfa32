"""Transition kernels: identities and closed-form gradients in fp64."""

import math

import pytest
import torch

from jaggrl.algorithms.ratio import clipped_loss, guarded_log_ratio
from jaggrl.diffusion.kernels import DanceSDE, FlowCPS, FlowSDE, mean_d
from jaggrl.errors import UserError

KERNELS = {
    "dance": DanceSDE(0.3),
    "dance_euler": DanceSDE(0.3, "euler"),
    "flow": FlowSDE(0.7),
    "cps": FlowCPS(0.8),
}
SIGMA = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
NEXT = torch.tensor([0.95, 0.7, 0.3, 0.05], dtype=torch.float64)


def latents(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 2, 3, 3, generator=g, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("name", KERNELS)
def test_closed_form_step_gradient(name):
    """``dL/dv_b = -(A rho [active] / B) kappa w (z' - mu) / D``, w = 1/s^2, or 2 for CPS."""
    kernel = KERNELS[name]
    v, z, noise = latents()
    old = kernel(v + 0.01, z, SIGMA, NEXT)
    z_next = old.sample(noise)
    advantage = torch.tensor([1.5, -0.5, 2.0, -1.0], dtype=torch.float64)
    v.requires_grad_()
    new = kernel(v, z, SIGMA, NEXT)
    ratio = (new.log_prob(z_next) - old.log_prob(z_next)).exp()
    clip = float((ratio.detach() - 1).abs().sort().values[1:3].mean())  # some are outside, some are not
    clipped_loss(ratio, advantage, clip).mean().backward()
    active = ~((advantage > 0) & (ratio > 1 + clip) | (advantage < 0) & (ratio < 1 - clip))
    w = torch.full_like(SIGMA, 2.0) if name == "cps" else 1 / new.std**2
    factor = -advantage * ratio * active / 4 * kernel.kappa(SIGMA, NEXT) * w / v[0].numel()
    want = factor.view(-1, 1, 1, 1) * (z_next - new.mean)
    assert torch.allclose(v.grad, want.detach(), rtol=1e-12, atol=1e-14)
    assert float(v.grad.abs().max()) > 0


@pytest.mark.parametrize("name", KERNELS)
def test_kappa_and_std_are_the_transitions_own(name):
    kernel = KERNELS[name]
    v, z, _ = latents()
    a, b = kernel(v, z, SIGMA, NEXT), kernel(v + 1, z, SIGMA, NEXT)
    assert torch.allclose((b.mean - a.mean)[:, 0, 0, 0], kernel.kappa(SIGMA, NEXT), atol=1e-12)
    assert torch.equal(a.std, kernel.std(SIGMA, NEXT))


def test_dance_is_flow_with_constant_g():
    class ConstantFlow(FlowSDE):
        def g(self, sigma, sigma_next):
            return torch.full_like(sigma, 0.3)

    v, z, noise = latents()
    dance, flow = DanceSDE(0.3)(v, z, SIGMA, NEXT), ConstantFlow(0.7)(v, z, SIGMA, NEXT)
    assert torch.equal(dance.mean, flow.mean) and torch.equal(dance.std, flow.std)
    assert torch.equal(dance.log_prob(dance.sample(noise)), flow.log_prob(flow.sample(noise)))


def test_dance_is_the_reference_code_score_form():
    """``score = -(x - (1-sigma) x0^) / sigma^2``, ``mu = x + v delta - eta^2/2 score delta``."""
    v, z, _ = latents()
    s, delta = SIGMA.view(-1, 1, 1, 1), (NEXT - SIGMA).view(-1, 1, 1, 1)
    score = -(z - (1 - s) * (z - s * v)) / s**2
    want = z + v * delta - 0.5 * 0.3**2 * score * delta
    assert torch.allclose(DanceSDE(0.3)(v, z, SIGMA, NEXT).mean, want, atol=1e-12)


def test_flow_guard_of_sigma_one_is_in_the_denominator_alone():
    g = FlowSDE(0.7).g(SIGMA, NEXT)
    assert float(g[0]) == pytest.approx(0.7 / math.sqrt(1 - 0.95))
    assert float(g[1]) == pytest.approx(0.7 * math.sqrt(0.9 / 0.1))


def test_cps_keeps_coefficients():
    """The marginal at sigma' keeps its noise level: ``(sigma' cos)^2 + s^2 = sigma'^2``."""
    kernel = FlowCPS(0.8)
    assert torch.allclose((NEXT * math.cos(0.4 * math.pi)) ** 2 + kernel.std(SIGMA, NEXT) ** 2, NEXT**2)
    assert float(kernel.std(SIGMA[:1], torch.zeros(1))) == 0


def test_guard_identity():
    """``s (log ratio + mean_d(dmu)^2 / 2s^2) = mean_d(xi dmu)``, per sample."""
    v, z, noise = latents()
    old, new = FlowSDE(0.7)(v, z, SIGMA, NEXT), FlowSDE(0.7)(v + 0.1 * z, z, SIGMA, NEXT)
    z_next = old.sample(noise)
    log_ratio = new.log_prob(z_next) - old.log_prob(z_next)
    got = guarded_log_ratio(log_ratio, new.mean, old.mean, new.std)
    assert torch.allclose(got, mean_d(noise * (new.mean - old.mean)), rtol=1e-12, atol=1e-14)
    assert got.shape == (4,)


@pytest.mark.parametrize(
    "bad", [lambda: DanceSDE(0.0), lambda: FlowSDE(-1), lambda: FlowCPS(1.0), lambda: DanceSDE(0.3, "heun")]
)
def test_bad_values_are_one_line(bad):
    with pytest.raises(UserError, match="use"):
        bad()
