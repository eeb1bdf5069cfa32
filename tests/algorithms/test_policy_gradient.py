"""The GRPO family on toys: ratios, masks, best-of-n, KL, Guard, step orders."""

import pytest
import torch

from jaggrl.algorithms import base
from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.credit import Advantage
from jaggrl.diffusion.kernels import DanceSDE, FlowCPS, FlowSDE, mean_d
from jaggrl.errors import UserError
from jaggrl.rewards.base import WeightedReward
from jaggrl.trajectory import Scored
from tests.algorithms.presets import PRESETS, dance, flow
from tests.toys import Brightness, gradients, toy_trainer

GRPO = [n for n in PRESETS if not n.startswith("diffusion")]


def trainer_of(name, **options):
    algorithm, sampler = PRESETS[name]()
    return toy_trainer(algorithm, sampler, **options)


def rescored(trainer, change=lambda r: r):
    """A rollout with its rewards changed, and its batch."""
    scored = trainer.score(trainer.sample())
    parts = {n: change(v.clone()) for n, v in scored.parts_N.items()}
    return trainer.algorithm.credit(Scored(scored.trajectory, parts, scored.weights, scored.group_size))


def gradient(trainer, batch, micro=4):
    groups = trainer.algorithm.groups(batch.trajectory, 0, 4, 0)
    for piece in batch.micro_batches(micro):
        for window in trainer.algorithm.windows(piece, trainer.policy, groups):
            trainer.backward(window)
    return gradients(trainer.policy.model.network)


@pytest.mark.parametrize("name", GRPO)
def test_ratio_is_one_before_any_update(name):
    metrics = trainer_of(name).step()
    assert metrics["train/ratio_deviation_max"] <= 1e-6
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["dance_grpo", "grpo_guard", "flow_grpo_cps"])
def test_an_all_equal_group_moves_nothing(name):
    trainer = trainer_of(name)
    grad = gradient(trainer, rescored(trainer, lambda r: torch.full_like(r, 0.3)))
    assert float(grad.abs().max()) == 0


def test_a_failed_sample_is_as_if_it_were_not_there():
    trainer = trainer_of("dance_grpo", prompts_per_rollout=1, group_size=8)

    def fail(r):
        r[3] = float("nan")
        return r

    batch = rescored(trainer, fail)
    others = batch.rows(torch.tensor([i for i in range(8) if i != 3]))
    assert batch.weight_B[3] == 0 and float(batch.weight_B.sum()) == pytest.approx(1)
    a, b = gradient(trainer, batch), gradient(trainer, others)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))


def test_best_of_n_trains_the_extremes_and_drops_the_rest():
    kernel = DanceSDE(0.3)
    everything = PolicyGradient(kernel, Advantage())
    chosen = PolicyGradient(kernel, Advantage(), best_of_n=2)
    results = []
    for algorithm in (everything, chosen):
        trainer = toy_trainer(algorithm, dance(kernel))
        results.append((trainer, rescored(trainer)))
    (trainer, whole), (other, thin) = results
    assert len(thin.trajectory.samples) == 4 and len(whole.trajectory.samples) == 8
    for p in range(2):
        a = whole.credit["advantage"].view(2, 4)[p]
        kept = [s.member for s in thin.trajectory.samples if s.prompt_index == p]
        assert kept == sorted([int(a.argmin()), int(a.argmax())])
    rows = torch.tensor([s.index for s in thin.trajectory.samples])
    want = gradient(trainer, whole.rows(rows)) * 2  # 8 samples shared the objective, now 4 do
    assert torch.allclose(gradient(other, thin), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def test_best_of_n_keeps_as_many_rows_as_the_fullest_rank(monkeypatch):
    trainer = trainer_of("dance_grpo_best_of_n", updates_per_rollout=2)
    monkeypatch.setattr(base, "largest", lambda busy: torch.maximum(busy, torch.tensor([3, 4])))
    batch = rescored(trainer)
    parts = [s.part for s in batch.trajectory.samples]
    assert (parts.count(0), parts.count(1)) == (3, 4)
    assert int((batch.weight_B > 0).sum()) == 4  # idle rows pad, and weigh nothing
    assert {s.index for s in batch.trajectory.samples} <= set(range(8))


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), FlowCPS(0.8), DanceSDE(0.3)])
@pytest.mark.parametrize("form", ["kernel", "velocity"])
def test_kl_is_zero_at_the_reference_and_finite_everywhere(kernel, form):
    algorithm = PolicyGradient(kernel, Advantage(), kl_coef=0.04, kl_form=form)
    trainer = toy_trainer(algorithm, flow(kernel))
    assert trainer.step()["train/kl"] == pytest.approx(0, abs=1e-10)
    for p in trainer.policy.parameters:
        p.data += 0.1
    kl = trainer.step()["train/kl"]
    assert 0 < kl < float("inf")


def test_kl_forms_in_closed_form():
    """Flow-GRPO: ``kappa^2 mean_d (v - v_ref)^2 / (2 g^2)``, without the step length."""
    v, ref, z = (torch.randn(3, 2, 4, 4) for _ in range(3))
    kernel = FlowSDE(0.7)
    sigma, sigma_next = torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0.8, 0.5, 0.1])
    a, b = kernel(v, z, sigma, sigma_next), kernel(ref, z, sigma, sigma_next)
    want = (
        kernel.kappa(sigma, sigma_next) ** 2 * mean_d((v - ref) ** 2) / (2 * kernel.g(sigma, sigma_next) ** 2)
    )
    assert torch.allclose(mean_d((a.mean - b.mean) ** 2) / (2 * a.g**2), want, rtol=1e-4)


def test_kl_pulls_back_to_the_reference():
    kernel = FlowSDE(0.7)
    algorithm = PolicyGradient(kernel, Advantage(), kl_coef=10.0, kl_form="velocity")
    trainer = toy_trainer(algorithm, flow(kernel), lr=0.1)
    for p in trainer.policy.parameters:
        p.data += 0.1
    first = trainer.step()["train/kl"]
    for _ in range(4):
        last = trainer.step()["train/kl"]
    assert last < first / 2


def test_guard_reweighting_divides_by_the_step_length():
    plain, weighted = (
        PolicyGradient(FlowSDE(0.7), Advantage(), guard=True, guard_reweight=on, clip_range=1.0)
        for on in (False, True)
    )
    losses = []
    for algorithm in (plain, weighted):
        trainer = toy_trainer(algorithm, flow(FlowSDE(0.7)))
        batch = rescored(trainer)
        micro = next(batch.micro_batches(1))
        (window,) = algorithm.windows(micro, trainer.policy, algorithm.groups(batch.trajectory, 0, 7, 0))
        losses.append([window.loss(j, window.stored(j)).stats["policy_loss"] for j in range(7)])
    length = -batch.trajectory.sigma_S.diff()[:7]
    assert torch.allclose(torch.stack(losses[1]), torch.stack(losses[0]) / length, rtol=1e-5)


def test_trained_steps_by_order():
    kernel = DanceSDE(0.3)
    trainer = toy_trainer(PolicyGradient(kernel, Advantage(), timestep_fraction=0.6), dance(kernel))
    tr = trainer.sample()

    def steps(window=2, rollout=0, **kwargs):
        return [g.steps for g in PolicyGradient(kernel, Advantage(), **kwargs).groups(tr, rollout, window, 0)]

    assert steps() == [(0, 1), (2, 3), (4, 5), (6,)]  # the last of 8 transitions is never trained
    assert steps(ignore_last=False) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert steps(timestep_fraction=0.6) == [(0, 1), (2, 3)]
    drawn = {tuple(steps(rollout=r, timestep_fraction=0.6, steps="random_windows")) for r in range(20)}
    assert len(drawn) == 3 and all(len(d) == 2 and d[0] < d[1] for d in drawn)


def test_permuted_steps_are_each_samples_own_and_repeatable():
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), timestep_fraction=0.6, steps="permute")
    trainer = toy_trainer(algorithm, dance(DanceSDE(0.3)))
    batch = rescored(trainer)
    groups = algorithm.groups(batch.trajectory, 5, 4, 0)
    (micro,) = batch.micro_batches(8)
    step_KB = algorithm._steps_of_samples(micro, groups)
    assert step_KB.shape == (4, 8) and step_KB.max() <= 6
    assert len({tuple(c) for c in step_KB.T.tolist()}) > 4
    halves = [algorithm._steps_of_samples(m, groups) for m in batch.micro_batches(4)]
    assert torch.equal(torch.cat(halves, 1), step_KB)  # not the micro-batch's
    assert trainer.step()["train/ratio_deviation_max"] <= 1e-6


def test_the_reward_goes_up():
    trainer = trainer_of("dance_grpo", lr=3.0, prompts_per_rollout=4, group_size=16, micro_batch=64)
    rewards = [trainer.step()["reward/brightness/mean"] for _ in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.01


def test_two_rewards_train_together():
    reward = WeightedReward({"a": Brightness(), "b": Brightness()}, {"a": 1.0, "b": 1.0})
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(mix="advantage"))
    metrics = toy_trainer(algorithm, dance(DanceSDE(0.3)), reward=reward).step()
    assert metrics["train/grad_norm"] > 0


CHECK = {"interpolates": True, "init_noise": "rollout", "explores": True, "updates": 2, "group": 8}


@pytest.mark.parametrize(
    ("options", "setting", "message"),
    [
        ({}, {"explores": False}, "needs stochastic steps"),
        ({}, {"group": 1}, "group_size=1 gives no PolicyGradient credit"),
        ({"steps": "permute"}, {}, "steps=permute breaks windows"),
        ({"best_of_n": 12}, {}, "best_of_n=12 exceeds group_size=8"),
        ({"kernel": FlowCPS(), "kl_coef": 0.1, "ignore_last": False}, {}, "ignore_last=true"),
    ],
)
def test_impossible_combinations_are_one_line(options, setting, message):
    algorithm = PolicyGradient(**{"kernel": FlowSDE(), "advantage": Advantage(), **options})
    with pytest.raises(UserError, match=message):
        algorithm.check(**CHECK | setting)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_range": 0},
        {"steps": "all"},
        {"kl_form": "sum"},
        {"kl_coef": -1},
        {"best_of_n": 1},
        {"timestep_fraction": 0},
        {"kernel": FlowCPS(), "guard": True},
    ],
)
def test_bad_values_are_one_line(options):
    with pytest.raises(UserError) as error:
        PolicyGradient(**{"kernel": FlowSDE(), "advantage": Advantage(), **options})
    assert "\n" not in str(error.value)
