"""The denoising loop: seeds, noise sharing, what is recorded, and Flash's shorter tail."""

import pytest
import torch

from jaggrl.diffusion.exploration import Everywhere, FixedWindow, Nowhere
from jaggrl.diffusion.flash import Compressed
from jaggrl.diffusion.kernels import DanceSDE, FlowSDE
from jaggrl.diffusion.schedule import DanceSchedule, ModelSchedule
from jaggrl.diffusion.solvers import DPMSolver2M, Euler
from jaggrl.errors import UserError
from jaggrl.prompts import Prompt
from jaggrl.rollout import RECORDS, Rollout, Sampler
from jaggrl.trajectory import layout
from tests.toys import toy_policy


def sample(sampler, world=1, rank=0, micro=3, seed=0, index=0, record=frozenset(RECORDS), policy=None):
    mine = layout(2, 4, 1, world, rank)
    prompts = [Prompt(s.prompt_index, "ab"[s.prompt_index] * 3) for s in mine]
    return Rollout(sampler, seed, micro)(policy or toy_policy(), mine, prompts, index, record)


def sde(init="independent", decode="final"):
    return Sampler(DanceSchedule(6, 3.0), Everywhere(), Euler(), DanceSDE(0.3), decode, init)


def test_a_sample_does_not_depend_on_rank_or_micro_batch():
    whole = sample(sde())
    for rank in (0, 1):
        part = sample(sde(), world=2, rank=rank, micro=2)
        rows = [s.index for s in part.samples]
        assert torch.allclose(part.x0_B, whole.x0_B[rows], atol=1e-6)
    assert not torch.equal(sample(sde(), index=1).x0_B, whole.x0_B)
    assert not torch.equal(sample(sde(), seed=1).x0_B, whole.x0_B)


def test_initial_noise_sharing():
    first = {i: sample(sde(i)).recorded["states"][0] for i in ("independent", "group", "rollout")}
    assert len({tuple(z.flatten().tolist()) for z in first["independent"]}) == 8
    assert len({tuple(z.flatten().tolist()) for z in first["group"]}) == 2
    assert len({tuple(z.flatten().tolist()) for z in first["rollout"]}) == 1
    later = sample(sde("rollout")).recorded["states"][1]
    assert len({tuple(z.flatten().tolist()) for z in later}) == 8  # step noise is never shared


def test_states_velocities_and_transitions_belong_together():
    tr = sample(sde())
    states, v = tr.recorded["states"], tr.recorded["velocities"]
    assert states.shape[0] == 7 and v.shape[0] == tr.recorded["log_prob"].shape[0] == 6
    policy = toy_policy()
    assert torch.allclose(policy.velocity(states[2], tr.t_S[2].expand(8), tr.condition), v[2], atol=1e-6)
    step = DanceSDE(0.3)(v[2], states[2], tr.sigma_S[2].expand(8), tr.sigma_S[3].expand(8))
    assert torch.allclose(step.log_prob(states[3]), tr.recorded["log_prob"][2], atol=1e-5)
    assert torch.allclose(step.mean, tr.recorded["mean"][2], atol=1e-6)


def test_decoding_the_denoised_prediction():
    tr = sample(sde(decode="denoised"))
    want = tr.recorded["states"][5] - tr.sigma_S[5] * tr.recorded["velocities"][5]
    assert torch.allclose(tr.x0_B, want, atol=1e-6)
    assert torch.equal(sample(sde()).x0_B, sample(sde()).recorded["states"][-1])


def test_noise_in_the_window_alone():
    sampler = Sampler(ModelSchedule(6), FixedWindow(1, 3), Euler(), FlowSDE(0.7))
    tr = sample(sampler)
    assert tr.noisy_S == (False, True, True, False, False, False)
    assert (tr.recorded["log_prob"][[0, 3, 4, 5]] == 0).all() and (tr.recorded["log_prob"][1:3] != 0).all()
    euler = tr.recorded["states"][4] + tr.recorded["velocities"][4] * (tr.sigma_S[5] - tr.sigma_S[4])
    assert torch.allclose(tr.recorded["states"][5], euler, atol=1e-6)


@pytest.mark.parametrize(
    ("window", "steps", "points"), [((0, 4), 25, 8), ((10, 14), 25, 4), ((19, 23), 25, 2), ((4, 8), 25, 7)]
)
def test_flash_compresses_what_follows_the_window(window, steps, points):
    """``max(int((S - last) * 0.4), 2)`` points from the first deterministic tau to 0, even in tau."""
    flash = Compressed(DPMSolver2M(), 0.4)
    sampler = Sampler(
        DanceSchedule(steps, 3.0), FixedWindow(*window), Euler(), FlowSDE(0.7), after_window=flash
    )
    schedule, walk = sampler.plan(lambda n: None, 0, 0)
    end = window[1]
    assert schedule.steps == len(walk) == end + points - 1
    assert torch.equal(schedule.sigma_S[:end], DanceSchedule(steps, 3.0)(None).sigma_S[:end])
    tau = schedule.sigma_S[end:] / (3 - 2 * schedule.sigma_S[end:])
    assert torch.allclose(tau, torch.linspace(1 - end / steps, 0, points), atol=1e-6)
    assert [w is None for w in walk] == [i in range(*window) for i in range(len(walk))]
    assert all(w is flash.solver for w in walk[end:]) and all(w is sampler.solver for w in walk[: window[0]])
    tr = sample(sampler, record=frozenset({"states"}))
    assert len(tr.recorded["states"]) == schedule.steps + 1 and tr.x0_B.isfinite().all()


def test_deterministic_rollout_is_the_solver():
    for solver in (Euler(), DPMSolver2M()):
        tr = sample(Sampler(ModelSchedule(6), Nowhere(), solver))
        assert not any(tr.noisy_S)
        z, policy = tr.recorded["states"][0], toy_policy()
        solver.reset()
        for i in range(6):
            v = policy.velocity(z, tr.t_S[i].expand(8), tr.condition)
            z = solver.step(v, z, float(tr.sigma_S[i]), float(tr.sigma_S[i + 1]))
        assert torch.allclose(z, tr.x0_B, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            lambda: Sampler(DanceSchedule(), Everywhere(), Euler(), None, "half"),
            "decode=half is unknown; use",
        ),
        (
            lambda: Sampler(DanceSchedule(), Everywhere(), Euler(), None, "final", "same"),
            "init_noise=same is unknown",
        ),
        (lambda: sample(Sampler(DanceSchedule(), Everywhere(), Euler())), "kernel is null"),
        (
            lambda: Sampler(ModelSchedule(), Everywhere(), Euler(), after_window=Compressed(Euler())),
            "needs DanceSchedule",
        ),
        (lambda: Compressed(Euler(), 0.0), "outside"),
    ],
)
def test_bad_values_are_one_line(bad, message):
    with pytest.raises(UserError, match=message):
        bad()
