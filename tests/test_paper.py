"""The JAGG paper's equations as tests, each named for its number."""

import pytest
import torch

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.algorithms.ratio import clipped_loss
from jaggrl.backward.interpolants import Debiased, Ends, Exact, Lagrange, Linear, Subset, alpha
from jaggrl.backward.strategy import Backward
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE, Transition
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.rollout import Sampler
from tests.toys import Field, ToyModel, gradients, toy_policy, toy_trainer, toy_window


def random_window(W=4, B=3, affine=False, on_path=False, seed=0, fresh=False):
    """A toy window; ``on_path`` puts (z_j, t_j) on the segment between the ends, with uneven times."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    field = Field(affine).double()
    t = torch.sort(torch.rand(W, B, generator=g, dtype=torch.float64), 0, descending=True).values
    z = torch.randn(W, B, 2, 4, 4, generator=g, dtype=torch.float64)
    if on_path:
        z = z[:1] + alpha(t)[..., None, None, None] * (z[-1:] - z[:1])
    c = torch.randn(B, 4, generator=g, dtype=torch.float64)
    target = torch.randn(z.shape, generator=g, dtype=torch.float64)
    return field, toy_window(field, z, t, c, target, fresh)


def pull(field, window, interpolant, **kwargs):
    report = Backward(interpolant, window=window.size, **kwargs)(window)
    return gradients(field), report


def autograd(field, window):
    sum(window.loss(j, window.velocities([j])[0]).value for j in range(window.size)).backward()
    return gradients(field)


def test_exact_is_autograd():
    field, window = random_window()
    assert torch.allclose(pull(field, window, Exact())[0], autograd(field, window), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("graph", ["joint", "batched", "sequential"])
@pytest.mark.parametrize("W", [3, 4, 7])
def test_theorem_1_exact_jacobian_interpolation(graph, W):
    """Affine field, affine path with uneven times: two backwards give the exact gradient."""
    field, window = random_window(W, affine=True, on_path=True)
    exact, _ = pull(field, window, Exact())
    jagg, report = pull(field, window, Linear(), graph=graph)
    assert report.passes.backwards == 2
    assert torch.allclose(jagg, exact, rtol=1e-4, atol=1e-6)


def test_theorem_1_needs_its_path():
    field, window = random_window(affine=True, on_path=False)
    exact, jagg = pull(field, window, Exact())[0], pull(field, window, Linear())[0]
    assert torch.nn.functional.cosine_similarity(exact, jagg, dim=0) < 0.999


def test_theorem_1_alpha_comes_from_network_time_under_shift():
    """Times of a shift-3 schedule are uneven: alpha from them is exact where j/(W-1) is not."""
    schedule = DanceSchedule(21, 3.0)(None)
    t = schedule.t_S[:4, None].double().expand(4, 2)
    assert not torch.allclose(alpha(t)[:, 0], torch.linspace(0, 1, 4, dtype=torch.float64), atol=1e-3)
    assert alpha(t)[:, 0].tolist() == pytest.approx([0, 0.321, 0.642, 1], abs=2e-3)
    field = Field(affine=True).double()
    z = torch.randn(2, 2, 2, 4, 4, dtype=torch.float64)
    z = z[0] + alpha(t)[..., None, None, None] * (z[1] - z[0])
    window = toy_window(field, z, t, torch.randn(2, 4).double(), torch.randn(4, 2, 2, 4, 4).double())
    exact, jagg = pull(field, window, Exact())[0], pull(field, window, Linear())[0]
    assert torch.allclose(exact, jagg, rtol=1e-5, atol=1e-7)


def test_theorem_1_through_real_windows():
    """The rollout's own windows of a policy gradient: put its states on the affine path, JAGG equals exact."""
    policy = toy_policy(ToyModel(affine=True))
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=0.1)
    trainer = toy_trainer(algorithm, dance_sampler(9), policy=policy)
    batch = algorithm.credit(trainer.score(trainer.sample()))
    t_S, states = batch.trajectory.t_S, batch.trajectory.recorded["states"]
    a = ((t_S[0] - t_S) / (t_S[0] - t_S[7]))[:, None, None, None, None]
    states[:9] = states[:1] + a * (states[7:8] - states[:1]).clone()
    micro = next(batch.micro_batches(8))
    results = []
    for interpolant in (Exact(), Linear()):
        backward = Backward(interpolant, window=4, served="off")  # the states were moved
        for window in algorithm.windows(micro, policy, algorithm.groups(batch.trajectory, 0, 4, 0)):
            backward(window)
        results.append(gradients(policy.model.network))
    assert torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-6 * float(results[0].abs().max()))


def dance_sampler(steps=8, init_noise="independent"):
    return Sampler(DanceSchedule(steps, 3.0), Everywhere(), Euler(), DanceSDE(0.3), "denoised", init_noise)


def test_eq_3_group_advantage():
    parts = {"r": torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 10.0])}
    a = Advantage()(parts, {"r": 1.0}, 3)
    assert torch.allclose(a, torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), atol=1e-6)


def test_eq_4_clipped_loss_is_one_sided():
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7], requires_grad=True)
    a = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = clipped_loss(ratio, a, 0.2)
    assert torch.allclose(loss, torch.tensor([-1.2, 1.3, -0.7, 0.8]))
    (grad,) = torch.autograd.grad(loss.sum(), ratio)
    assert grad.tolist() == [0.0, 1.0, -1.0, 0.0]


def test_eq_5_log_prob_is_the_mean_over_dimensions():
    mean, std = torch.zeros(2, 3, 4, 4), torch.tensor([0.5, 2.0])
    z = torch.randn(2, 3, 4, 4)
    expected = torch.distributions.Normal(0.0, std.view(-1, 1, 1, 1)).log_prob(z).flatten(1).mean(1)
    assert torch.allclose(Transition(mean, std, std).log_prob(z), expected, atol=1e-6)


def test_eq_6_and_7_weights():
    t = torch.tensor([0.9, 0.7, 0.6, 0.1]).unsqueeze(1)
    table = Linear().table(t, torch.Generator())
    a = torch.tensor([0, 0.25, 0.375, 1.0])
    assert table.anchors == (0, 3)
    assert torch.allclose(table.weights_AWB[:, :, 0], torch.stack([1 - a, a]))


@pytest.mark.parametrize(
    "interpolant", [Exact(), Linear(), Lagrange(3), Lagrange(4), Lagrange(3, "chebyshev")]
)
def test_cardinality_and_partition_of_unity(interpolant):
    t = torch.sort(torch.rand(7, 2), 0, descending=True).values
    table = interpolant.table(t, torch.Generator())
    eye = torch.eye(len(table.anchors)).unsqueeze(-1).expand(-1, -1, 2)
    assert torch.equal(table.weights_AWB[:, list(table.anchors)], eye)
    assert torch.allclose(table.weights_AWB.sum(0), torch.ones(7, 2), atol=1e-5)


@pytest.mark.parametrize("interpolant", [Subset(2), Subset(3), Debiased(1.0), Debiased(0.5)])
def test_expectation_of_the_table_is_the_identity(interpolant):
    """E[M] = I, over many draws of the shared generator."""
    t = torch.tensor([0.9, 0.8, 0.5, 0.3, 0.2]).unsqueeze(1)
    g = torch.Generator().manual_seed(0)
    total = torch.zeros(5, 5)
    n = 20000
    for _ in range(n):
        table = interpolant.table(t, g)
        for row, anchor in enumerate(table.anchors):
            total[anchor] += table.weights_AWB[row, :, 0]
    assert torch.allclose(total / n, torch.eye(5), atol=0.08)


@pytest.mark.parametrize("interpolant", [Linear(), Lagrange(3), Subset(2), Debiased(1.0), Ends()])
def test_tables_are_triangular_in_pull_back_order(interpolant):
    t = torch.sort(torch.rand(6, 2), 0, descending=True).values
    table = interpolant.table(t, torch.Generator().manual_seed(1))
    for i in range(len(table.anchors)):
        for later in table.anchors[i + 1 :]:
            assert bool((table.weights_AWB[i, later] == 0).all())


@pytest.mark.parametrize("interpolant", [Linear(), Ends(), Lagrange(3), Debiased(1.0), Subset(2)])
def test_joint_sequential_batched_and_served_agree(interpolant):
    """Graph modes and served velocities are the same gradient."""
    field, window = random_window(6, fresh=True)
    results = [
        pull(field, window, interpolant, graph=graph, served=served, seed=3)[0]
        for graph in ("joint", "batched", "sequential")
        for served in ("off", "fresh")
    ]
    for other in results[1:]:
        assert torch.allclose(results[0], other, rtol=1e-5, atol=1e-7)


def test_w_2_is_exact():
    field, window = random_window(2)
    assert torch.equal(pull(field, window, Exact())[0], pull(field, window, Linear())[0])


def test_ablate_is_not_exact_and_discards_the_middle():
    field, window = random_window(4)
    exact, ablate = pull(field, window, Exact())[0], pull(field, window, Ends())[0]
    assert not torch.allclose(exact, ablate, rtol=1e-2)


def test_repeated_times_fall_back_to_exact():
    field, window = random_window(4)
    window.t_WB[1] = window.t_WB[0]
    got, report = pull(field, window, Linear())
    assert report.passes.backwards == 4
    assert torch.allclose(got, autograd(field, window), rtol=1e-5, atol=1e-7)


PASSES = {  # grad forwards, no-grad forwards, backwards, backward calls (W = 4)
    ("exact", "joint", "off"): (4, 0, 4, 4),
    ("jagg", "joint", "off"): (2, 2, 2, 1),
    ("jagg", "sequential", "off"): (2, 2, 2, 2),
    ("ablate", "joint", "off"): (2, 0, 2, 1),
    ("jagg", "joint", "fresh"): (2, 0, 2, 1),
    ("jagg", "batched", "off"): (2, 2, 2, 1),
}


@pytest.mark.parametrize(("name", "graph", "served"), PASSES)
def test_pass_counts_of_the_cost_table(name, graph, served):
    field, window = random_window(4, fresh=True)
    interpolant = {"exact": Exact(), "jagg": Linear(), "ablate": Ends()}[name]
    _, report = pull(field, window, interpolant, graph=graph, served=served)
    p = report.passes
    assert (p.grad_forwards, p.nograd_forwards, p.backwards, p.backward_calls) == PASSES[name, graph, served]
    if graph == "batched":
        assert p.forward_calls == 2  # the endpoints; the middle


def test_clipped_step_contributes_nothing():
    """A step whose loss is constant adds exactly zero, through any strategy."""
    field, window = random_window(4)
    from dataclasses import replace

    from jaggrl.window import StepLoss

    whole = replace(window, loss=lambda j, v: StepLoss(0.0 * v.sum()) if j == 1 else window.loss(j, v))
    without = pull(field, whole, Linear())[0]
    ref = replace(window, loss=lambda j, v: StepLoss(0.0 * v.sum()) if j in (1,) else window.loss(j, v))
    assert torch.equal(without, pull(field, ref, Linear())[0])
    nothing = replace(window, loss=lambda j, v: StepLoss(0.0 * v.sum()))
    grad, report = pull(field, nothing, Linear())
    assert report.passes.backwards == 2
    assert torch.equal(grad, torch.zeros_like(grad))


def test_ratio_is_one_on_replay_for_every_trained_step():
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=1e-4)
    trainer = toy_trainer(algorithm, dance_sampler())
    metrics = trainer.step()
    assert metrics["train/ratio_deviation_max"] <= 1e-6
    assert metrics["train/clip_high"] == metrics["train/clip_low"] == 0
    assert metrics["train/grad_norm"] > 0
