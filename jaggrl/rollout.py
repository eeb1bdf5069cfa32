"""The no-grad denoising loop: from prompts to decoded pictures, writing down what the algorithm asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.diffusion.exploration import Exploration
from jaggrl.diffusion.flash import Compressed
from jaggrl.diffusion.kernels import Kernel
from jaggrl.diffusion.noise import generator, normal
from jaggrl.diffusion.schedule import DanceSchedule, ModelSigmas, Schedule
from jaggrl.diffusion.solvers import Solver
from jaggrl.errors import UserError
from jaggrl.models.feature_cache import TaylorSeer
from jaggrl.models.policy import Policy
from jaggrl.prompts import Prompt
from jaggrl.trajectory import Condition, Sample, Trajectory

INIT_NOISE = ("independent", "group", "rollout")
RECORDS = ("states", "velocities", "log_prob", "mean")


@dataclass(frozen=True)
class Sampler:
    """How a trajectory walks: the rollout part of an algorithm's config, and evaluation's own."""

    schedule: Callable[..., Schedule]
    exploration: Exploration
    solver: Solver
    kernel: Kernel | None = None
    decode: str = "final"
    """``final``: the last latent; ``denoised``: x0 of the last forward, before the last noise (DanceGRPO)."""
    init_noise: str = "independent"
    """``independent``, shared by each ``group``, or the whole ``rollout`` (DanceGRPO's init_same_noise)."""
    after_window: Compressed | None = None
    """MixGRPO-Flash: fewer steps, and another solver, after the last stochastic step."""
    cache: TaylorSeer | None = None
    """A feature cache: the behaviour policy is then the cached network."""

    def __post_init__(self) -> None:
        if self.decode not in ("final", "denoised"):
            raise UserError(f"rollout.decode={self.decode} is unknown; use final or denoised")
        if self.init_noise not in INIT_NOISE:
            raise UserError(f"rollout.init_noise={self.init_noise} is unknown; use {', '.join(INIT_NOISE)}")
        if self.after_window is not None and not isinstance(self.schedule, DanceSchedule):
            raise UserError(
                "rollout.after_window needs DanceSchedule; change rollout.schedule or set after_window=null"
            )

    def plan(
        self, model_sigmas: ModelSigmas, rollout: int, seed: int
    ) -> tuple[Schedule, list[Solver | None]]:
        """This rollout's schedule and how it walks each step (None: by the kernel), the same on all ranks."""
        schedule = self.schedule(model_sigmas)
        explored = self.exploration(rollout, schedule.steps, seed)
        if len(explored) and self.kernel is None:
            raise UserError("rollout.kernel is null but rollout.exploration asks for noise; give a kernel")
        after = self.solver
        if self.after_window is not None and len(explored):
            assert isinstance(self.schedule, DanceSchedule)
            schedule, after = self.after_window(self.schedule, explored), self.after_window.solver
        last = max(explored, default=schedule.steps)
        walk = [None if i in explored else after if i > last else self.solver for i in range(schedule.steps)]
        return schedule, walk

    def outline(self, model_sigmas: ModelSigmas, rollout: int, seed: int) -> Trajectory:
        """A rollout's steps without samples: enough to cut its windows, before anything is sampled."""
        schedule, walk = self.plan(model_sigmas, rollout, seed)
        noisy_S, nothing = tuple(solver is None for solver in walk), torch.empty(0)
        return Trajectory([], [], Condition({}), schedule.t_S, schedule.sigma_S, noisy_S, nothing, nothing)


class Rollout:
    """Samples trajectories in micro-batches; the result does not depend on their size or on the rank."""

    def __init__(self, sampler: Sampler, seed: int, micro_batch: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.micro_batch = micro_batch

    @torch.no_grad()
    def __call__(
        self,
        policy: Policy,
        samples: Sequence[Sample],
        prompts: Sequence[Prompt],
        index: int,
        record: frozenset[str] = frozenset(),
        tick: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        """Sample one trajectory per entry of ``samples``.

        Args:
            policy: already acting as the behaviour policy.
            samples: this rank's samples.
            prompts: one per sample.
            index: the rollout's number, part of every seed.
            record: names to write down (``RECORDS``).
            tick: called after every network forward, for progress and signals.
        """
        schedule, walk = self.sampler.plan(policy.model.sigmas, index, self.seed)
        noisy_S = tuple(solver is None for solver in walk)
        condition = policy.model.encode([p.text for p in prompts])
        pieces = []
        for rows in _chunks(len(samples), self.micro_batch):
            with policy.cached(self.sampler.cache):
                piece = self._walk(
                    policy, schedule, walk, condition.rows(rows), samples[rows], index, record, tick
                )
            pieces.append(piece)
        x0 = torch.cat([x for x, _ in pieces])
        media = torch.cat([policy.model.decode(x0[rows]) for rows in _chunks(len(samples), self.micro_batch)])
        cache = self.sampler.cache
        predicted = [] if cache is None else [i for i in range(schedule.steps) if not cache.computed(i)]
        recorded = {name: torch.cat([r[name] for _, r in pieces], 1) for name in record}
        return Trajectory(
            samples,
            prompts,
            condition,
            schedule.t_S,
            schedule.sigma_S,
            noisy_S,
            x0,
            media,
            recorded,
            policy.version,
            frozenset(predicted),
        )

    def _walk(
        self,
        policy: Policy,
        schedule: Schedule,
        walk: Sequence[Solver | None],
        condition: Condition,
        samples: Sequence[Sample],
        index: int,
        record: frozenset[str],
        tick: Callable[[], None],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One micro-batch from noise to x0."""
        z = self._initial(policy, samples, index)
        draws = [generator(self.seed, index, s.prompt_index, s.member, "step") for s in samples]
        written: dict[str, list[Tensor]] = {name: [] for name in record}
        _forget(walk)
        x0 = z
        for i in range(schedule.steps):
            t_B = schedule.t_S[i].to(z.device).expand(len(z))
            raw = policy.velocity(z, t_B, condition)
            v = policy.model.guide(raw).float()
            x0 = z - schedule.sigma_S[i].item() * v
            step: dict[str, Tensor] = {"states": z, "velocities": raw}
            if walk[i] is None:
                _forget(walk)  # noise comes in between
            z = self._step(i, v, z, schedule, walk[i], draws, step)
            for name, values in written.items():
                if name in step:
                    values.append(step[name])
            tick()
        if "states" in written:
            written["states"].append(z)
        final = x0 if self.sampler.decode == "denoised" else z
        return final, {name: torch.stack(values) for name, values in written.items()}

    def _step(
        self,
        i: int,
        v: Tensor,
        z: Tensor,
        schedule: Schedule,
        solver: Solver | None,
        draws: Sequence[torch.Generator],
        step: dict[str, Tensor],
    ) -> Tensor:
        """The next latent; leaves the step's mean and log-probability (0 on deterministic steps)."""
        if solver is not None:
            step["mean"] = solver.step(v, z, schedule.sigma_S[i].item(), schedule.sigma_S[i + 1].item())
            step["log_prob"] = torch.zeros(len(z), device=z.device)
            return step["mean"]
        assert self.sampler.kernel is not None
        sigma_B, next_B = (schedule.sigma_S[k].to(z.device).expand(len(z)) for k in (i, i + 1))
        transition = self.sampler.kernel(v, z, sigma_B, next_B)
        z_next = transition.sample(normal(draws, z.shape[1:], z.device))
        step["mean"], step["log_prob"] = transition.mean, transition.log_prob(z_next)
        return z_next

    def _initial(self, policy: Policy, samples: Sequence[Sample], index: int) -> Tensor:
        """Initial noise by the sharing rule."""
        share = self.sampler.init_noise
        keys = [
            (
                -1 if share == "rollout" else s.prompt_index,
                s.member if share == "independent" else -1,
            )
            for s in samples
        ]
        draws = [generator(self.seed, index, prompt, member, "initial") for prompt, member in keys]
        return normal(draws, policy.model.latent_shape, policy.device)


def _forget(walk: Sequence[Solver | None]) -> None:
    """Multistep solvers forget their last predictions."""
    for solver in walk:
        if solver is not None:
            solver.reset()


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
