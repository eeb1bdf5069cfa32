"""DiffusionNFT: its quadratic identity, its force where q is known, decays, and the lagged policy."""

from dataclasses import replace

import pytest
import torch

from jaggrl.algorithms.diffusion_nft import ADV_MODES, DiffusionNFT, _States
from jaggrl.backward.interpolants import Exact, Linear
from jaggrl.backward.strategy import Backward
from jaggrl.diffusion.kernels import mean_d
from jaggrl.errors import UserError
from jaggrl.trajectory import Batch
from tests.algorithms.presets import FG, ode
from tests.toys import ToyModel, gradients, toy_policy, toy_trainer

C = FG.clip


def nft(**options):
    return DiffusionNFT(FG, **{"kl_coef": 0.0, "adaptive_weight": False} | options)


def trainer_of(algorithm=None, **options):
    return toy_trainer(algorithm or nft(), ode(second_order=True), **options)


def batch_of(trainer):
    return trainer.algorithm.credit(trainer.score(trainer.sample()))


def loss_at(algorithm, v, v_old, u, r, sigma=0.7, v_ref=None):
    """One state's loss per sample: weights 1, one trained step."""
    trainer = trainer_of(algorithm)
    batch = batch_of(trainer)
    rows = torch.zeros(len(v), dtype=torch.long)
    micro: Batch = batch.rows(rows)
    micro = replace(micro, credit={"r": r}, weight_B=torch.ones(len(v)))
    reference = None if v_ref is None else [v_ref]
    states = _States([0], torch.full((1, len(v)), sigma), [sigma], [v], [u], [v_old], reference)
    return algorithm._loss(micro, trainer.policy, states, 0, v).value


def tensors(seed=0, count=6):
    g = torch.Generator().manual_seed(seed)
    v, v_old, u = (torch.randn(count, 2, 4, 4, generator=g) for _ in range(3))
    return v, v_old, u, torch.rand(count, generator=g)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_quadratic_identity_with_weights_off(beta):
    """``r |v+ - u|^2 + (1-r) |v- - u|^2 = -2 beta (2r-1) <d, h> + beta^2 |d|^2 + |h|^2``."""
    v, v_old, u, r = tensors()
    d, h = v - v_old, u - v_old
    want = -2 * beta * (2 * r - 1) * mean_d(d * h) + beta**2 * mean_d(d**2) + mean_d(h**2)
    got = loss_at(nft(nft_beta=beta), v, v_old, u, r)
    assert torch.allclose(got, (want * C / beta).sum(), rtol=1e-5)


def forces(branches):
    """The descent direction on v at d = 0 over a population of (u, r) at one state, and its parts g, e, q."""
    _, _, u, r = tensors(3, 64)
    r = (r + 0.4 * u[:, 0, 0, 0].tanh()).clamp(0, 1)  # reward and endpoint are correlated
    v_old = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(9)).expand(64, -1, -1, -1)
    v = v_old.clone().requires_grad_()
    loss = loss_at(nft(branches=branches), v, v_old, u, r)
    (grad,) = torch.autograd.grad(loss, v)
    force = -grad.mean(0) * v[0].numel() / (2 * C)
    g = ((r - r.mean()).view(-1, 1, 1, 1) * (u - u.mean(0))).mean(0)
    return force, g, u.mean(0) - v_old[0], r.mean()


def test_force_of_both_branches_is_guidance_plus_consistency():
    """``F = 2 g + (2q - 1) e``: the consistency force is left where q is not 1/2."""
    force, g, e, q = forces("both")
    assert abs(float(q) - 0.5) > 0.005
    assert torch.allclose(force, 2 * g + (2 * q - 1) * e, atol=1e-5)


def test_force_of_one_branch():
    """Positive: ``g + q e``; negative: ``g - (1 - q) e``."""
    positive, g, e, q = forces("positive")
    assert torch.allclose(positive, g + q * e, atol=1e-5)
    assert torch.allclose(forces("negative")[0], g - (1 - q) * e, atol=1e-5)


def test_adaptive_weight_normalises_each_branch():
    """``l = sigma mean_d (v+- - u)^2 / mean_d |v+- - u|``, and the weight carries no gradient."""
    v, v_old, u, r = tensors()
    v.requires_grad_()
    sigma = 0.7
    got = loss_at(nft(adaptive_weight=True), v, v_old, u, r, sigma)

    def branch(error):
        return sigma * mean_d(error**2) / mean_d(error.abs()).detach()

    want = (C * (r * branch(v - u) + (1 - r) * branch(2 * v_old - v - u))).sum()
    assert torch.allclose(got, want, rtol=1e-5)
    assert torch.allclose(*(torch.autograd.grad(x, v)[0] for x in (got, want)), rtol=1e-4, atol=1e-6)


def test_kl_is_the_velocity_mse():
    v, v_old, u, r = tensors()
    with_kl = loss_at(nft(kl_coef=0.5), v, v_old, u, r, v_ref=u)
    assert torch.allclose(
        with_kl - loss_at(nft(), v, v_old, u, r), 0.5 * mean_d((v - u) ** 2).sum(), rtol=1e-4
    )


def test_decay_goldens():
    i = (0, 75, 100, 500, 1000)
    assert [nft(decay="none").lag(k) for k in i] == [0, 0, 0, 0, 0]
    assert [nft(decay="linear").lag(k) for k in i] == pytest.approx([0, 0.075, 0.1, 0.5, 0.5])
    assert [nft(decay="delayed").lag(k) for k in i] == pytest.approx([0, 0, 0.1875, 0.999, 0.999])
    assert nft(decay=0.9).lag(7) == 0.9


def test_modes_of_the_advantage():
    a = torch.tensor([-2.0, 0.0, 0.5])
    got = {name: rule(a).tolist() for name, rule in ADV_MODES.items()}
    assert got == {
        "all": [-2, 0, 0.5],
        "positive_only": [0, 0, 0.5],
        "negative_only": [-2, 0, 0],
        "one_only": [0, 0, 1],
        "binary": [-1, 0, 1],
    }


def test_the_lagged_policy_samples_and_lags():
    trainer = trainer_of(nft(decay=0.25), lr=0.5)
    before = [p.detach().clone() for p in trainer.policy.parameters]
    metrics = trainer.step()
    assert metrics["train/decay"] == 0.25
    after = [p.detach() for p in trainer.policy.parameters]
    old = trainer.policy.shadows.state_dict()["old"].values()
    for o, b, a in zip(old, before, after, strict=True):
        assert torch.allclose(o, 0.25 * b + 0.75 * a, atol=1e-6)
    got = trainer.sample()
    again = [trainer.policy, got.samples, got.prompts, trainer.steps_done]
    with trainer.policy.using("old"):
        assert torch.equal(trainer.rollout(*again).x0_B, got.x0_B)
    assert not torch.equal(trainer.rollout(*again).x0_B, got.x0_B)


def test_resume_brings_the_lagged_policy_back():
    """A checkpoint in the middle continues to the same weights and the same lagged copy."""

    def fresh():
        return trainer_of(nft(decay=0.5, kl_coef=0.1), lr=0.3, updates_per_rollout=2)

    straight = fresh()
    for _ in range(2):
        straight.step()
    saved = {
        "weights": {k: v.clone() for k, v in straight.policy.model.network.state_dict().items()},
        "trainer": straight.state_dict(),
    }
    saved["trainer"]["shadows"] = {
        n: {k: v.clone() for k, v in c.items()} for n, c in saved["trainer"]["shadows"].items()
    }
    assert set(saved["trainer"]["shadows"]) == {"old", "reference"}
    straight.step()
    resumed = fresh()
    resumed.policy.model.network.load_state_dict(saved["weights"])
    resumed.load_state_dict(saved["trainer"])
    resumed.step()
    for a, b in zip(straight.policy.parameters, resumed.policy.parameters, strict=True):
        assert torch.equal(a, b)
    for name in ("old", "reference"):
        a, b = (t.policy.shadows.state_dict()[name] for t in (straight, resumed))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_served_while_the_lagged_policy_is_the_current_one():
    trainer = trainer_of(nft(decay="none"), interpolant=Linear(), updates_per_rollout=2)
    served = [trainer.step()["backward/served"] for _ in range(2)]
    assert served[0] == served[1] > 0  # first updates only
    lagging = trainer_of(nft(decay=0.5), interpolant=Linear(), updates_per_rollout=2)
    assert [lagging.step()["backward/served"] for _ in range(2)] == [served[0], 0]
    batch = batch_of(trainer)
    (micro,) = batch.micro_batches(8)
    window = next(
        trainer.algorithm.windows(micro, trainer.policy, trainer.algorithm.groups(batch.trajectory, 2, 4, 0))
    )
    assert window.fresh and torch.equal(window.stored(1), window.velocities([1])[0])


def gradient(trainer, batch, interpolant, window=7):
    groups = trainer.algorithm.groups(batch.trajectory, 0, window, 0)
    backward = Backward(interpolant, window, served="off")
    for micro in batch.micro_batches(4):
        for w in trainer.algorithm.windows(micro, trainer.policy, groups):
            backward(w)
    return gradients(trainer.policy.model.network)


@pytest.mark.parametrize(("noise", "exact"), [("per_window", True), ("per_step", False)])
def test_one_noise_per_window_puts_its_states_on_jaggs_path(noise, exact):
    """Theorem 1 with an affine field: the path condition holds by construction, or not at all."""
    trainer = trainer_of(nft(noise=noise), policy=toy_policy(ToyModel(affine=True)))
    batch = batch_of(trainer)
    a, b = (gradient(trainer, batch, rule) for rule in (Exact(), Linear()))
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * float(a.abs().max())) is exact


def test_noise_is_each_samples_own():
    trainer = trainer_of(nft())
    batch = batch_of(trainer)
    algorithm = trainer.algorithm
    algorithm.groups(batch.trajectory, 3, 4, 0)
    whole = algorithm._noise(batch, 2)
    parts = torch.cat([algorithm._noise(m, 2) for m in batch.micro_batches(3)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, algorithm._noise(batch, 1))


def test_all_equal_rewards_move_nothing_on_policy():
    trainer = trainer_of(nft(adaptive_weight=True))
    batch = batch_of(trainer)
    batch.credit["r"].fill_(0.5)
    assert float(gradient(trainer, batch, Exact()).abs().max()) < 1e-6


def test_unanchored_is_first_order_only():
    """``v_old := v`` detached: the gradient is that of d = 0, even where the lagged policy is elsewhere."""
    v, v_old, u, r = tensors()
    v.requires_grad_()
    algorithm = nft(anchor="current")
    trainer = trainer_of(algorithm)
    micro = batch_of(trainer).rows(torch.zeros(6, dtype=torch.long))
    micro = replace(micro, credit={"r": r}, weight_B=torch.ones(6))
    states = _States([0], torch.full((1, 6), 0.7), [0.7], [v], [u], None, None)
    (grad,) = torch.autograd.grad(algorithm._loss(micro, trainer.policy, states, 0, v).value, v)
    want = -2 * C * (2 * r - 1).view(-1, 1, 1, 1) * (u - v) / v[0].numel()
    assert torch.allclose(grad, want.detach(), rtol=1e-4, atol=1e-6)


def test_the_reward_goes_up():
    algorithm = DiffusionNFT(FG, decay="linear")
    trainer = trainer_of(algorithm, lr=0.3, prompts_per_rollout=4, group_size=16, micro_batch=64)
    rewards = [trainer.step()["reward/brightness/mean"] for _ in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.01


CHECK = {"interpolates": True, "init_noise": "independent", "explores": False, "updates": 1, "group": 8}


def test_impossible_combinations_are_one_line(caplog):
    for change, message in (
        ({"explores": True}, "deterministic rollouts"),
        ({"init_noise": "group"}, "makes all samples of a prompt equal"),
        ({"init_noise": "rollout"}, "use algorithm.rollout.init_noise=independent"),
        ({"group": 1}, "group_size=1"),
    ):
        with pytest.raises(UserError, match=message):
            nft().check(**CHECK | change)
    nft().check(**CHECK)
    assert "per_window gives one" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"decay": "type1"},
        {"decay": 1.0},
        {"adv_mode": "some"},
        {"noise": "shared"},
        {"anchor": "new"},
        {"branches": "neither"},
        {"nft_beta": 0},
        {"kl_coef": -1},
        {"timestep_fraction": 2},
    ],
)
def test_bad_values_are_one_line(options):
    with pytest.raises(UserError) as error:
        nft(**options)
    assert "\n" not in str(error.value) and "algorithm." in str(error.value)
