"""The rollout's feature cache: its schedule, what it counts and records, and that nothing of it stays behind."""

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import taylorseer_cache

from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Linear
from jaggrl.build import check
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.errors import UserError
from jaggrl.infra.distributed import Ranks, shard
from jaggrl.infra.precheck import precheck
from jaggrl.models.feature_cache import TaylorSeer
from jaggrl.models.policy import Policy, make_trainable
from jaggrl.prompts import Prompt
from jaggrl.rollout import Rollout, Sampler
from jaggrl.selfcheck import findings
from jaggrl.trajectory import layout
from tests.test_config import CONF, composed
from tests.tiny_flux import tiny_flux
from tests.toys import CPU, toy_policy, toy_trainer

STEPS = 6


def fresh_policy(ranks=None):
    model = tiny_flux()
    make_trainable(model, None, False)
    if ranks is not None:
        shard(model.network, model.blocks(), ranks, "fp32")
    return Policy(model, None, "fp32", CPU)


@pytest.fixture(scope="module")
def policy():
    return fresh_policy()


def sampler(cache):
    return Sampler(DanceSchedule(STEPS, 3.0), Everywhere(), Euler(), DanceSDE(0.3), cache=cache)


def sample(policy, cache, micro=4):
    mine = layout(2, 2, 1, 1, 0)
    prompts = [Prompt(s.prompt_index, ("a red circle", "two blue squares")[s.prompt_index]) for s in mine]
    record = frozenset({"states", "velocities"})
    return Rollout(sampler(cache), 0, micro)(policy, mine, prompts, 0, record)


def network_at(policy, tr, i):
    with torch.no_grad():
        return policy.velocity(tr.recorded["states"][i], tr.t_S[i].expand(4), tr.condition)


@pytest.mark.parametrize("cache", [TaylorSeer(), TaylorSeer(3, 2, 0), TaylorSeer(3, 1, 2, lite=True)])
def test_predicted_steps_are_those_of_the_schedule(policy, cache, monkeypatch):
    predicted = []
    original = taylorseer_cache.TaylorSeerState.predict
    monkeypatch.setattr(
        taylorseer_cache.TaylorSeerState,
        "predict",
        lambda state: predicted.append(state.current_step) or original(state),
    )
    policy.forward_shares(cache, 1)
    predicted.clear()
    tr = sample(policy, cache)
    assert set(predicted) == tr.predicted == {i for i in range(STEPS) if not cache.computed(i)} != set()
    for i in range(STEPS):
        same = torch.allclose(network_at(policy, tr, i), tr.recorded["velocities"][i], atol=1e-6)
        assert same == (i not in tr.predicted)


def test_each_micro_batch_is_its_own_trajectory_and_nothing_stays(policy):
    plain = sample(policy, None)
    whole, parts = sample(policy, TaylorSeer()), sample(policy, TaylorSeer(), micro=1)
    assert torch.allclose(whole.x0_B, parts.x0_B, atol=1e-5)
    assert not torch.allclose(whole.x0_B, plain.x0_B, atol=1e-5)
    assert torch.equal(sample(policy, None).x0_B, plain.x0_B)
    assert not policy.model.network.is_cache_enabled


def test_forwards_count_by_their_flops(policy):
    for cache in (None, TaylorSeer(), TaylorSeer(lite=True)):
        shares = policy.forward_shares(cache, STEPS)
        before = policy.forwards
        sample(policy, cache)
        assert policy.forwards - before == pytest.approx(4 * sum(shares))
    lite, attention = (policy.forward_shares(TaylorSeer(lite=on), STEPS)[2] for on in (True, False))
    assert 0 < lite < 0.2 < attention < 1


@pytest.mark.parametrize("served", ["fresh", "always"])
def test_predicted_velocities_are_served_only_when_asked_to(policy, served):
    policy.version = 0  # as at the start of a run
    trainer = toy_trainer(
        PolicyGradient(DanceSDE(0.3), Advantage()),
        sampler(TaylorSeer()),
        Linear(),
        {"window": 5, "served": served},
        policy=policy,
        prompt_texts=["a red circle", "two blue squares"],
    )
    metrics = trainer.step()
    assert metrics["train/cache_log_ratio_abs"] > 0
    assert metrics["train/cache_ratio_deviation_max"] > 1e-6
    assert bool(metrics["backward/served"]) == (served == "always")
    first = findings(trainer, metrics)[0]
    assert first.good and "feature cache" in first.meaning


def test_windows_of_computed_steps_stay_fresh(policy):
    tr = sample(policy, TaylorSeer(3, 3))
    assert tr.predicted == {3, 5}
    assert tr.fresh(policy.version, [0, 1, 2]) and not tr.fresh(policy.version, [2, 3])
    assert not tr.fresh(policy.version + 1, [0])


def test_the_config_builds_it_for_rollouts():
    config = composed("rollout_cache=taylorseer", "algorithm.rollout.cache.interval=3")
    assert check(config).sampler.cache == TaylorSeer(3)
    assert check(composed()).sampler.cache is None


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Ranks(0, 1, CPU)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("cache", [TaylorSeer(), TaylorSeer(3, lite=True)])
def test_a_sharded_network_is_cached_alike(alone, cache):
    """Gathers are hooks around the blocks, not in what the cache skips; the schedule is the same on all ranks."""
    plain, sharded = fresh_policy(), fresh_policy(alone)
    found, expected = sample(sharded, cache), sample(plain, cache)
    assert torch.allclose(found.x0_B, expected.x0_B, atol=1e-6)
    assert sharded.forward_shares(cache, STEPS) == plain.forward_shares(cache, STEPS)
    states, t_B = found.recorded["states"][2], found.t_S[2].expand(4)
    sharded.velocity(states, t_B, found.condition).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters)


def test_regression_on_predicted_velocities_is_refused():
    with pytest.raises(UserError, match="DiffusionART regresses .* use rollout_cache=null"):
        check(composed("experiment=shapes_art", "rollout_cache=taylorseer"))


def test_unknown_caches_are_refused_before_anything_is_loaded():
    with pytest.raises(UserError, match="rollout_cache 'taylor'.*taylorseer"):
        precheck(["rollout_cache=taylor"], "train", CONF)


@pytest.mark.parametrize("bad", [{"interval": 1}, {"warmup": 0}, {"order": -1}, {"dtype": "fp8"}])
def test_bad_values_are_one_line(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        TaylorSeer(**bad)


def test_networks_without_caches_are_refused():
    with pytest.raises(UserError, match="no feature caches"), toy_policy().cached(TaylorSeer()):
        pass
