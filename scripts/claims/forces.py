"""DiffusionART's second update taken apart: guidance ``-G_v`` and restoration ``d``, in output and parameter space."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from jaggrl.algorithms.diffusion_art import DiffusionART
from jaggrl.build import build_policy, build_scorers, build_trainer, check, resolve
from jaggrl.diffusion.kernels import mean_d, over_latent
from jaggrl.infra.distributed import Ranks
from jaggrl.trainer import Trainer
from jaggrl.trajectory import Batch

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class Forces:
    """One second update: RMS over states in output space, and norms of the summed parameter gradients."""

    guiding_output: float
    restoring_output: float
    guiding_gradient: float
    restoring_gradient: float


def measure(experiment: str, seed: int, rollouts: int, overrides: list[str]) -> list[Forces]:
    """Train as usual and take every second update apart just before it is made."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = resolve(compose("train", overrides=[f"experiment={experiment}", f"seed={seed}", *overrides]))
    plan, ranks = check(config), Ranks(0, 1, torch.device("cpu"))
    policy = build_policy(config, ranks)
    trainer = build_trainer(config, plan, ranks, policy, build_scorers(config, ranks))
    found = []
    for _ in range(rollouts):
        batch = trainer.algorithm.credit(trainer.score(trainer.sample()))
        groups = trainer.algorithm.groups(batch.trajectory, trainer.steps_done, trainer.backward.window, seed)
        first, second = batch.split(2)
        for part in (first, second):
            if part is second:
                found.append(_forces(trainer, part))
            for micro in part.micro_batches(trainer.loop.micro_batch):
                for window in trainer.algorithm.windows(micro, policy, groups):
                    trainer.backward(window)
            trainer.optimize()
        trainer.steps_done += 1
    return found


def _forces(trainer: Trainer, part: Batch) -> Forces:
    """Both parts of ``(2w/D)(d - G_v)`` over the update's states, w = 1; the common factor is left out."""

    def guiding(d: Tensor, direction: Tensor) -> Tensor:
        return -direction

    def restoring(d: Tensor, direction: Tensor) -> Tensor:
        return d

    results = [_pull(trainer, part, force) for force in (guiding, restoring)]
    (guiding_output, guiding_gradient), (restoring_output, restoring_gradient) = results
    return Forces(guiding_output, restoring_output, guiding_gradient, restoring_gradient)


def _pull(trainer: Trainer, part: Batch, force: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """RMS of a force over all states, and the norm of the parameter gradient of their weighted sum."""
    algorithm, policy = trainer.algorithm, trainer.policy
    assert isinstance(algorithm, DiffusionART)
    squares = []
    for micro in part.micro_batches(trainer.loop.micro_batch):
        tr = micro.trajectory
        for i in algorithm.trained_steps(tr):
            t_B = tr.t_S[i].expand(len(tr.samples))
            raw = policy.velocity(tr.recorded["states"][i], t_B, tr.condition)
            d = policy.model.guide(raw.detach() - tr.recorded["velocities"][i]).float()
            pull = force(d, micro.credit["direction"])
            squares.append(mean_d(pull**2))
            torch.autograd.backward(raw, (over_latent(micro.weight_B, pull) * pull).to(raw.dtype))
    gradients = [p.grad.flatten() for p in policy.parameters if p.grad is not None]
    norm = float(torch.cat(gradients).norm())
    trainer.optimizer.zero_grad(set_to_none=True)
    return float(torch.cat(squares).mean().sqrt()), norm
