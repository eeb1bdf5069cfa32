"""The loop's promises: micro-batches never change a gradient, failures are masked or skipped and counted."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Linear, Subset
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import WeightedReward
from jaggrl.rollout import Sampler
from jaggrl.trainer import DivergedError, Trainer
from jaggrl.trajectory import Trajectory, layout
from tests.algorithms.presets import PRESETS
from tests.toys import Brightness, toy_trainer


def dance(steps: int = 5, init_noise: str = "independent") -> tuple[PolicyGradient, Sampler]:
    kernel = DanceSDE(0.3)
    sampler = Sampler(DanceSchedule(steps, 3.0), Everywhere(), Euler(), kernel, "denoised", init_noise)
    return PolicyGradient(kernel, Advantage(), clip_range=0.1), sampler


class Scripted(Brightness):
    """Brightness, with chosen samples of each call replaced."""

    def __init__(self, replace: dict[int, float], scale: float = 1.0) -> None:
        self.replace = replace
        self.scale = scale

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        scores = self.scale * super().__call__(media_B, prompts)
        for index, value in self.replace.items():
            scores[index] = value
        return scores


def scripted(replace: dict[int, float], scale: float = 1.0) -> WeightedReward:
    return WeightedReward({"brightness": Scripted(replace, scale)}, {"brightness": 1.0}, batch_size=1000)


def first_gradient(trainer: Trainer) -> Tensor:
    """The first update's accumulated gradient."""
    seen: list[Tensor] = []
    optimize = trainer.optimize

    def spy(judged: bool) -> float:
        seen.append(torch.cat([p.grad.flatten().clone() for p in trainer.policy.parameters]))
        return optimize(judged)

    trainer.optimize = spy  # type: ignore[method-assign]
    trainer.step()
    return seen[0]


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batch_never_changes_the_gradient(micro_batch: int) -> None:
    algorithm, sampler = dance()
    reference = first_gradient(toy_trainer(algorithm, sampler, Linear(), micro_batch=4))
    other = first_gradient(toy_trainer(algorithm, sampler, Linear(), micro_batch=micro_batch))
    assert torch.allclose(reference, other, rtol=1e-4, atol=1e-6 * float(reference.abs().max()))


@pytest.mark.parametrize(("world", "updates"), [(1, 1), (2, 2), (4, 3), (3, 1)])
def test_layout_is_disjoint_exhaustive_and_rank_independent(world: int, updates: int) -> None:
    prompts, group = 12, 5
    everyone = [layout(prompts, group, updates, world, r) for r in range(world)]
    indices = sorted(s.index for rank in everyone for s in rank)
    assert indices == list(range(prompts * group))
    alone = {s.index: s.part for s in layout(prompts, group, updates, 1, 0)}
    for rank in everyone:
        assert all(alone[s.index] == s.part for s in rank)
        assert len(rank) == len(everyone[0])
        assert [s.part for s in rank] == [s.part for s in everyone[0]]


def test_nan_reward_is_masked_and_counted() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, reward=scripted({2: float("nan")}))
    metrics = trainer.step()
    assert metrics["reward/total/failed"] == 1
    assert metrics["train/skipped_updates"] == 0
    assert all(p.isfinite().all() for p in trainer.policy.parameters)


@pytest.mark.parametrize("name", ["dance_grpo", "grpo_guard", "diffusion_nft", "diffusion_art"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_latents_are_a_failed_reward(name: str, value: float) -> None:
    """The same gradients as where the same sample's reward alone failed."""

    def gradient(reward: WeightedReward | None, broken: Sequence[int]) -> Tensor:
        trainer = toy_trainer(*PRESETS[name](), Linear(), reward=reward)
        sample = trainer.sample

        def poisoned() -> Trajectory:
            trajectory = sample()
            for x in (trajectory.x0_B, *(r.transpose(0, 1) for r in trajectory.recorded.values())):
                x[list(broken)] = value
            return trajectory

        trainer.sample = poisoned  # type: ignore[method-assign]
        found = first_gradient(trainer)
        assert trainer.skipped == 0
        assert trainer.first is not None
        assert int((~trainer.first.total_N.isfinite()).sum()) == 1
        assert (trainer.first_ratio_deviation or 0.0) < 1e-5  # the broken sample's place holds a whole one
        return found

    masked, broken = gradient(scripted({2: float("nan")}), []), gradient(None, [2])
    assert broken.abs().max() > 0
    assert torch.allclose(broken, masked, rtol=1e-5, atol=1e-7 * float(masked.abs().max()))


def test_all_latents_broken_leave_zeros() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler)
    with torch.no_grad():
        trainer.policy.model.network.head.bias.fill_(float("nan"))
    trajectory, broken_B = trainer.sample().mended()
    assert broken_B.all()
    assert all(x.isfinite().all() for x in (trajectory.x0_B, *trajectory.recorded.values()))


def test_masked_sample_leaves_the_others_as_a_smaller_group() -> None:
    parts = {"r": torch.tensor([1.0, 2.0, float("nan"), 4.0])}
    smaller = {"r": torch.tensor([1.0, 2.0, 4.0])}
    got = Advantage()(parts, {"r": 1.0}, 4)
    want = Advantage()(smaller, {"r": 1.0}, 3)
    assert torch.allclose(got[[0, 1, 3]], want)
    assert got[2] == 0


def test_all_failed_moves_nothing() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, reward=scripted(dict.fromkeys(range(8), float("nan"))))
    before = [p.detach().clone() for p in trainer.policy.parameters]
    metrics = trainer.step()
    assert metrics["reward/total/failed"] == 8
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters, strict=True))


def test_all_equal_group_moves_nothing() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, reward=scripted(dict.fromkeys(range(8), 0.5)))
    before = [p.detach().clone() for p in trainer.policy.parameters]
    metrics = trainer.step()
    assert metrics["reward/zero_std_groups"] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters, strict=True))


def test_reward_spike_survives() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, reward=scripted({}, scale=1e6))
    trainer.step()
    assert all(p.isfinite().all() for p in trainer.policy.parameters)


def poisoned(trainer: Trainer, at: set[int]) -> None:
    """Make the gradient NaN at the given optimizer steps."""
    optimize, calls = trainer.optimize, [0]

    def spy(judged: bool) -> float:
        if calls[0] in at:
            trainer.policy.parameters[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
        calls[0] += 1
        return optimize(judged)

    trainer.optimize = spy  # type: ignore[method-assign]


def test_non_finite_gradient_skips_the_step_and_is_counted() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler)
    poisoned(trainer, {0})
    before = [p.detach().clone() for p in trainer.policy.parameters]
    metrics = trainer.step()
    assert metrics["train/skipped_updates"] == 1
    assert trainer.policy.version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters, strict=True))
    trainer.step()
    assert trainer.policy.version == 1


def test_gives_up_where_no_score_ever_comes() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(
        algorithm, sampler, reward=scripted(dict.fromkeys(range(8), float("nan"))), max_skipped=2
    )
    assert trainer.step()["train/idle_updates"] == 1
    with pytest.raises(DivergedError, match="not one sample with a score"):
        trainer.step()


def test_gives_up_after_too_many_skips() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, max_skipped=2)
    poisoned(trainer, set(range(10)))
    trainer.step()
    with pytest.raises(DivergedError, match="lower optim.lr"):
        trainer.step()


def test_reward_share_shows_the_imbalance() -> None:
    algorithm, sampler = dance()
    reward = WeightedReward(
        {"small": Scripted({}), "large": Scripted({}, scale=100.0)}, {"small": 1.0, "large": 1.0}
    )
    metrics = toy_trainer(algorithm, sampler, reward=reward).step()
    assert metrics["reward/large/share"] == pytest.approx(100 / 101, rel=1e-3)


def test_cost_counts_every_forward_and_backward() -> None:
    """8 samples, 5 rollout forwards, 4 trained steps in one fresh JAGG window: 2 forwards and 2 backwards of 2."""
    algorithm, sampler = dance()
    metrics = toy_trainer(algorithm, sampler, Linear(), {"window": 4}).step()
    assert metrics["cost/forward_equivalents"] == 8 * (5 + 2 + 2 * 2)


def test_state_dict_resumes_exactly() -> None:
    """4 steps == 2 + resume + 2, weights and metrics, on the toy."""
    algorithm, sampler = dance()
    whole = toy_trainer(algorithm, sampler, Linear(), ema_decay=0.9)
    metrics = [whole.step() for _ in range(4)]
    first = toy_trainer(algorithm, sampler, Linear(), ema_decay=0.9)
    for _ in range(2):
        first.step()
    second = toy_trainer(algorithm, sampler, Linear(), ema_decay=0.9)
    second.policy.model.network.load_state_dict(first.policy.model.network.state_dict())
    second.load_state_dict(first.state_dict())
    resumed = [second.step() for _ in range(2)]
    for a, b in zip(whole.policy.parameters, second.policy.parameters, strict=True):
        assert torch.equal(a, b)
    keys = [k for k in metrics[0] if not k.startswith("time/")]
    assert [[m[k] for k in keys] for m in metrics[2:]] == [[m[k] for k in keys] for m in resumed]


def test_updates_without_a_gradient_are_counted_and_move_nothing() -> None:
    """Flat groups under AdamW: momentum of earlier updates and weight decay would move the parameters."""
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, optimizer=torch.optim.AdamW)
    trainer.step()
    before = [p.detach().clone() for p in trainer.policy.parameters]
    trainer.reward = scripted(dict.fromkeys(range(8), 0.5))
    metrics = trainer.step()
    assert (metrics["train/idle_updates"], metrics["train/updates"]) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters, strict=True))


def test_updates_of_a_rollout_begin_once() -> None:
    algorithm, sampler = dance()
    trainer = toy_trainer(algorithm, sampler, updates_per_rollout=2)
    begun: list[int] = []
    trainer.backward.begin = lambda: begun.append(trainer.steps_done)  # type: ignore[method-assign]
    for _ in range(3):
        trainer.step()
    assert begun == [0, 1, 2]


@pytest.mark.parametrize("stage", ["rollout", "update"])
def test_interrupted_step_leaves_no_trace(stage: str) -> None:
    """A stop between two forwards: the saved state is that of the step's beginning."""
    algorithm, sampler = dance()
    whole, other = (
        toy_trainer(algorithm, sampler, Subset(2), {"window": 2}, micro_batch=2) for _ in range(2)
    )
    for trainer in (whole, other):
        trainer.step()

    def stop(now: str) -> None:
        if now == stage:
            raise KeyboardInterrupt

    other.tick = stop
    with pytest.raises(KeyboardInterrupt):
        other.step()
    other.tick = lambda now: None
    a, b = whole.step(), other.step()
    assert {k: v for k, v in a.items() if not k.startswith("time/")} == {
        k: v for k, v in b.items() if not k.startswith("time/")
    }
    for p, q in zip(whole.policy.parameters, other.policy.parameters, strict=True):
        assert torch.equal(p, q)
