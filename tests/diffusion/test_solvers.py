"""Deterministic solvers, against diffusers' and against each other's order."""

import math

import torch

from jaggrl.diffusion.solvers import DPMSolver2M, Euler

SIGMAS = torch.tensor([1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0])


def walk(solver, sigmas, z, field):
    solver.reset()
    for s, n in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        z = solver.step(field(z, s), z, s, n)
    return z


def field(z, sigma):
    return torch.tanh(z) * math.cos(3 * sigma) + sigma * z


def test_dpm2_is_diffusers_multistep():
    from diffusers import DPMSolverMultistepScheduler

    theirs = DPMSolverMultistepScheduler(
        solver_order=2,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    theirs.set_timesteps(10)
    theirs.sigmas = SIGMAS.clone()
    z = start = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for i, t in enumerate(theirs.timesteps):
        z = theirs.step(field(z, float(SIGMAS[i])), t, z).prev_sample
    assert torch.allclose(walk(DPMSolver2M(), SIGMAS, start, field), z, atol=1e-5)


def test_dpm2_is_of_second_order_between_its_ends():
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    fine = walk(Euler(), torch.linspace(0.9, 0.1, 20001, dtype=torch.float64), z, field)
    errors = {}
    for name, solver in (("euler", Euler()), ("dpm2", DPMSolver2M())):
        for steps in (40, 80):
            got = walk(solver, torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64), z, field)
            errors[name, steps] = float((got - fine).abs().max())
    assert errors["euler", 40] / errors["euler", 80] < 2.3
    assert errors["dpm2", 40] / errors["dpm2", 80] > 3
    assert errors["dpm2", 80] < errors["euler", 80] / 4


def test_reset_forgets():
    solver, z = DPMSolver2M(), torch.randn(3, 2)
    first = walk(solver, SIGMAS, z, field)
    assert torch.equal(walk(solver, SIGMAS, z, field), first)
