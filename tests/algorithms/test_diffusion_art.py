"""DiffusionART: the sign of its direction, invariances, the restoring second update, and the mask."""

from dataclasses import replace

import pytest
import torch

from jaggrl.algorithms import diffusion_art
from jaggrl.algorithms.diffusion_art import DiffusionART, masked, proxy_kl, shared_direction
from jaggrl.credit import preference
from jaggrl.diffusion.kernels import FlowSDE, mean_d
from jaggrl.errors import UserError
from jaggrl.rewards.base import Reward, RewardCard, WeightedReward
from jaggrl.trajectory import Scored, layout
from tests.algorithms.presets import ode
from tests.toys import gradients, toy_trainer

NOISE_DIRECTION = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(5))


class Linear(Reward):
    """A linear function of the picture (the toy's decoder is a sigmoid of the latent)."""

    card = RewardCard("linear", "inner product with a fixed picture", "", "1", "sum", (-9.0, 9.0))

    def __call__(self, media_B, prompts):
        return (torch.logit(media_B.clamp(1e-6, 1 - 1e-6)) * NOISE_DIRECTION).sum((1, 2, 3))


def art(**options):
    return DiffusionART(FlowSDE(0.7), **options)


def trainer_of(algorithm=None, **options):
    sizes = {"updates_per_rollout": 2, "group_size": 8, "micro_batch": 8} | options
    reward = WeightedReward({"linear": Linear()}, {"linear": 1.0})
    return toy_trainer(algorithm or art(), ode(), reward=reward, **sizes)


def scored_of(trainer, change=lambda r: r):
    scored = trainer.score(trainer.sample())
    parts = {n: change(v.clone()) for n, v in scored.parts_N.items()}
    return Scored(scored.trajectory, parts, scored.weights, scored.group_size)


def expected_reward(trainer):
    """Mean reward of fixed prompts and noise."""
    state = trainer.prompts.state_dict()
    value = float(trainer.score(trainer.sample()).total_N.mean())
    trainer.prompts.load_state_dict(state)
    return value


def test_one_update_raises_a_linear_reward_and_the_other_sign_lowers_it(monkeypatch):
    gains = []
    for sign in (1, -1):
        trainer = trainer_of(updates_per_rollout=1, lr=0.5, prompts_per_rollout=3)
        before = expected_reward(trainer)

        def directed(*args, sign=sign):
            direction_P, found_P = shared_direction(*args)
            return sign * direction_P, found_P

        monkeypatch.setattr(diffusion_art, "shared_direction", directed)
        trainer.step()
        trainer.steps_done = 0
        gains.append(expected_reward(trainer) - before)
    assert gains[0] > 0.1 and gains[1] < -0.1


def test_direction_moves_the_prediction_towards_the_covariance():
    """x0^ = x - sigma v: adding G_v = -C/RMS(C) to v adds +sigma C/RMS(C) to x0^. G has unit RMS."""
    trainer = trainer_of()
    scored = scored_of(trainer)
    batch = trainer.algorithm.credit(scored)
    x0, r = scored.trajectory.x0_B, scored.total_N
    index = torch.tensor([s.index for s in scored.trajectory.samples])
    for p in range(2):
        rows = (index // 8 == p).nonzero().flatten()
        reward = r[index[rows]]
        centred = x0[rows] - x0[rows].mean(0)
        covariance = ((reward - reward.mean()).view(-1, 1, 1, 1) * centred).mean(0)
        want = -covariance / covariance.square().mean().sqrt()
        for row in rows:
            assert torch.allclose(batch.credit["direction"][row], want, atol=1e-4)
    assert torch.allclose(mean_d(batch.credit["direction"] ** 2), torch.ones(16), atol=1e-4)


@pytest.mark.parametrize("change", [lambda r: 5 * r, lambda r: r - 30, lambda r: 0.01 * r + 2])
def test_direction_is_invariant_to_affine_rewards(change):
    trainer = trainer_of()
    scored = trainer.score(trainer.sample())
    moved = replace(scored, parts_N={n: change(v) for n, v in scored.parts_N.items()})
    a, b = (trainer.algorithm.credit(s).credit["direction"] for s in (scored, moved))
    assert torch.allclose(a, b, atol=2e-4)


def test_pairwise_of_two_is_the_scalar_form():
    trainer = trainer_of(group_size=2)
    scored = scored_of(trainer)
    scalar, pairwise = (art(pairwise=on).credit(scored) for on in (False, True))
    assert torch.allclose(scalar.credit["direction"], pairwise.credit["direction"], atol=1e-4)


def test_groups_spread_over_ranks_add_up(monkeypatch):
    """Two ranks' partial sums, added, give the one process's direction."""
    trainer = trainer_of()
    scored = scored_of(trainer)
    whole, found = shared_direction(scored.trajectory, preference(scored.total_N, 8, False), 8)
    place = {s.index: i for i, s in enumerate(scored.trajectory.samples)}
    shards = []
    for rank in range(2):
        mine = layout(2, 8, 2, 2, rank)
        rows = torch.tensor([place[s.index] for s in mine])
        tr = scored.trajectory
        shards.append(replace(tr, samples=mine, x0_B=tr.x0_B[rows]))
    partial = []

    def keep(x):
        partial.append(x.clone())
        return x

    share_N = preference(scored.total_N, 8, False)
    monkeypatch.setattr(diffusion_art, "total", keep)
    for shard in shards:
        shared_direction(shard, share_N, 8)
    monkeypatch.setattr(diffusion_art, "total", lambda x: partial[0] + partial[1])
    for shard in shards:
        spread, there = shared_direction(shard, share_N, 8)
        assert torch.allclose(spread, whole, atol=1e-5) and torch.equal(there, found)


def pull(trainer, part):
    groups = trainer.algorithm.groups(part.trajectory, 0, 4, 0)
    for micro in part.micro_batches(8):
        for window in trainer.algorithm.windows(micro, trainer.policy, groups):
            trainer.backward(window)
    return gradients(trainer.policy.model.network)


def test_a_prompt_without_covariance_moves_nothing():
    def tie(r):
        r[:8] = 0.25
        return r

    trainer = trainer_of(group_size=8)
    batch = trainer.algorithm.credit(scored_of(trainer, tie))
    assert batch.stats["train/zero_cov_frac"] == 0.5
    first = torch.tensor([s.prompt_index == 0 for s in batch.trajectory.samples])
    assert (batch.weight_B[first] == 0).all() and (batch.weight_B[~first] > 0).all()
    rest = batch.rows((~first).nonzero().flatten())
    for whole, alone in zip(batch.split(2), rest.split(2), strict=True):
        assert torch.allclose(pull(trainer, whole), pull(trainer, alone), rtol=1e-4, atol=1e-6)
    nothing = trainer.algorithm.credit(scored_of(trainer, torch.zeros_like))
    assert float(pull(trainer, next(nothing.split(2))).abs().max()) == 0


def first_loss(trainer, batch, raw_of, weight="one"):
    """The first window's step 2: its proxy's gradient, v0 and G_v."""
    micro = next(batch.micro_batches(8))
    window = next(
        trainer.algorithm.windows(micro, trainer.policy, trainer.algorithm.groups(batch.trajectory, 0, 4, 0))
    )
    v0 = window.stored(2)
    v = raw_of(v0).requires_grad_()
    loss = window.loss(2, v)
    (grad,) = torch.autograd.grad(loss.value, v)
    return loss, grad, v0, micro


@pytest.mark.parametrize(("weight", "power"), [("one", 0), ("sigma", 1), ("sigma2", 2)])
def test_gradient_of_the_second_update_restores(weight, power):
    """``(2w/D)(d - G_v)``, w the state's weight; at d = 0, the first update, it is ``-(2w/D) G_v``."""
    trainer = trainer_of(art(weight=weight, mask_threshold=1e9))
    batch = next(trainer.algorithm.credit(scored_of(trainer)).split(2))
    share = float(batch.weight_B[0]) / 7
    sigma = float(batch.trajectory.sigma_S[2])
    for shift in (0.0, 0.3):
        d = torch.full_like(batch.trajectory.recorded["velocities"][2], shift)
        loss, grad, v0, micro = first_loss(trainer, batch, lambda v0, d=d: (v0 + d).clone())
        want = share * sigma**power * 2 / v0[0].numel() * (d - micro.credit["direction"])
        assert torch.allclose(grad, want, rtol=1e-4, atol=1e-7)
        assert loss.stats["drift"] == pytest.approx(shift, abs=1e-4)


def test_mask_truth_table():
    """Masked iff far (m >= delta) and outward (<d, G_v - d> > 0)."""
    g = torch.ones(4, 1, 2, 2)
    d = torch.stack([0.5 * g[0], 0.5 * g[0], 1.5 * g[0], 1.5 * g[0]])  # short of the target, or beyond it
    far = torch.tensor([True, False, True, False])
    drift = torch.where(far, 2e-5, 5e-6)
    assert masked(d, g, drift, 1e-5).tolist() == [True, False, False, False]
    assert (
        masked(-d, g, torch.full((4,), 1.0), 1e-5).tolist() == [False] * 4
    )  # inward of a wrong drift: restored
    assert masked(0.5 * g, g, torch.full((4,), 1e-5), 1e-5).all()  # the threshold itself masks
    assert not masked(0 * g, g, torch.zeros(4), 1e-5).any()  # the first update


def test_proxy_kl_is_that_of_the_surrogate_transition():
    kernel = FlowSDE(0.7)
    sigma, sigma_next = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.4])
    z, v, d = (torch.randn(2, 2, 4, 4) for _ in range(3))
    a, b = kernel(v, z, sigma, sigma_next), kernel(v + 0.01 * d, z, sigma, sigma_next)
    want = mean_d((a.mean - b.mean) ** 2) / (2 * a.std**2)
    got = proxy_kl(0.01 * d, kernel.kappa(sigma, sigma_next), kernel.std(sigma, sigma_next))
    assert torch.allclose(got, want, rtol=1e-3)


def test_masked_states_keep_their_place_in_the_mean():
    algorithm = art(mask_threshold=1e-12)
    trainer = trainer_of(algorithm)
    batch = list(algorithm.credit(scored_of(trainer)).split(2))[1]
    direction = next(batch.micro_batches(8)).credit["direction"]
    outward = 0.5 * direction
    outward[4:] = -outward[4:]
    loss, grad, _, _ = first_loss(trainer, batch, lambda v0: v0 + outward)
    assert loss.stats["mask_frac"] == 0.5
    assert float(grad[:4].abs().max()) == 0 and float(grad[4:].abs().min(0).values.max()) > 0
    want = (2 / 32) * (outward - direction)[4:] * float(batch.weight_B[0]) / 7
    assert torch.allclose(grad[4:], want, rtol=1e-4, atol=1e-7)


def test_first_update_is_never_masked_and_the_second_has_drifted():
    trainer = trainer_of(art(mask_threshold=1e-12), lr=0.3)
    batch = trainer.algorithm.credit(trainer.score(trainer.sample()))
    stats = []
    for part in batch.split(2):
        groups = trainer.algorithm.groups(part.trajectory, 0, 4, 0)
        reports = [
            trainer.backward(w)
            for micro in part.micro_batches(8)
            for w in trainer.algorithm.windows(micro, trainer.policy, groups)
        ]
        stats.append([float(r.summary()[k]) for r in reports for k in ("mask_frac", "drift")])
        trainer.optimize()
    assert max(stats[0]) < 1e-6 and min(stats[1][1::2]) > 1e-4


def test_two_disjoint_minibatches_within_each_prompt():
    trainer = trainer_of()
    parts = list(trainer.algorithm.credit(trainer.score(trainer.sample())).split(2))
    indices = [sorted(s.index for s in p.trajectory.samples) for p in parts]
    assert sorted(indices[0] + indices[1]) == list(range(16))
    for part in parts:
        assert [s.prompt_index for s in part.trajectory.samples].count(0) == 4


def test_several_rewards_mix():
    trainer = trainer_of()
    scored = scored_of(trainer)
    r = scored.parts_N["linear"]
    two = replace(scored, parts_N={"a": r, "b": 1000 * torch.rand(16)}, weights={"a": 1.0, "b": 1.0})
    raw, standardised = (art(mix=m).credit(two).credit["direction"] for m in ("reward", "advantage"))
    alone = art().credit(scored).credit["direction"]
    agreement = [float((x * alone).mean()) for x in (raw, standardised)]
    assert agreement[1] > agreement[0]


def test_the_reward_goes_up():
    trainer = trainer_of(lr=0.1, prompts_per_rollout=3)
    rewards = [trainer.step()["reward/linear/mean"] for _ in range(12)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


CHECK = {"interpolates": True, "init_noise": "independent", "explores": False, "updates": 2, "group": 8}


def test_impossible_combinations_are_one_line(caplog):
    for options, change, message in (
        ({}, {"explores": True}, "deterministic rollouts"),
        ({}, {"init_noise": "group"}, "makes all samples of a prompt equal"),
        ({}, {"group": 7}, "use group_size=8"),
        ({"pairwise": True}, {"group": 7, "updates": 1}, "does not make pairs"),
    ):
        with pytest.raises(UserError, match=message):
            art(**options).check(**CHECK | change)
    art().check(**CHECK)
    assert not caplog.text
    art().check(**CHECK | {"updates": 1})
    assert "has none that restores" in caplog.text


@pytest.mark.parametrize(
    "options", [{"weight": "snr"}, {"mix": "sum"}, {"mask_threshold": 0}, {"timestep_fraction": 0}]
)
def test_bad_values_are_one_line(options):
    with pytest.raises(UserError) as error:
        art(**options)
    assert "\n" not in str(error.value) and "algorithm." in str(error.value)
