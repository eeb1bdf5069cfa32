"""The loop: rollout, score, credit, update. Everything it calls is a constructor argument."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jaggrl.algorithms.base import Algorithm
from jaggrl.backward.strategy import Backward, Report
from jaggrl.diffusion.grouping import Group
from jaggrl.infra.distributed import Ranks, gather, largest, total, union
from jaggrl.infra.stopwatch import Stopwatch
from jaggrl.models.policy import Policy
from jaggrl.prompts import PromptDealer
from jaggrl.rewards.base import WeightedReward
from jaggrl.rewards.statistics import reward_metrics
from jaggrl.rollout import Rollout
from jaggrl.trajectory import Batch, Scored, Trajectory, layout


@dataclass(frozen=True)
class Loop:
    """Sizes of one training step."""

    prompts_per_rollout: int
    group_size: int
    updates_per_rollout: int
    micro_batch: int
    max_grad_norm: float
    seed: int
    ema_decay: float | None = None
    max_skipped: int = 10


class DivergedError(RuntimeError):
    """Too many updates in a row had non-finite gradients, or no score to learn from."""


class Trainer:
    """One policy in training. ``step`` is one rollout and its updates; the door decides how many, and what is saved."""

    def __init__(
        self,
        loop: Loop,
        ranks: Ranks,
        policy: Policy,
        prompts: PromptDealer,
        rollout: Rollout,
        reward: WeightedReward,
        algorithm: Algorithm,
        backward: Backward,
        optimizer: torch.optim.Optimizer,
        tick: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.loop = loop
        self.ranks = ranks
        self.policy = policy
        self.prompts = prompts
        self.rollout = rollout
        self.reward = reward
        self.algorithm = algorithm
        self.backward = backward
        self.optimizer = optimizer
        self.tick = tick
        self.clock = Stopwatch(ranks.device)
        backward.attach(policy.model.network, self.clock)
        self.samples = layout(
            loop.prompts_per_rollout, loop.group_size, loop.updates_per_rollout, ranks.world, ranks.rank
        )
        self.steps_done = 0
        self.skipped = 0
        """Updates left out for a non-finite gradient."""
        self.idle = 0
        """Updates left out for a zero gradient."""
        self.cost = 0.0
        """Forward-equivalents of all rollouts and updates so far, over all ranks (see ``policy.backward_cost``)."""
        self._skipped_in_a_row = 0
        self.first: Scored | None = None
        """The run's first rollout, for its self-check; let go at the next one."""
        self.first_ratio_deviation: float | None = None
        """max |ratio - 1| of the run's first update, before any parameter moved; None for ratio-free algorithms."""
        for name in (algorithm.behaviour, *algorithm.needs, *(["ema"] if loop.ema_decay else [])):
            policy.need(name)

    def step(self) -> dict[str, float]:
        """One rollout and its updates; returns what the log wants to know.

        A step that ends early (a stop request, before any weight moved) leaves no trace: the next process deals the
        same prompts and draws the same steps.
        """
        begun, version = self.state_dict(), self.policy.version
        try:
            return self._step()
        except BaseException:
            if self.policy.version == version:
                self.load_state_dict(begun)
                self.optimizer.zero_grad(set_to_none=True)
                self.clock.collect()
            raise

    def _step(self) -> dict[str, float]:
        before = self.policy.forwards
        self.first = None
        with self.clock("rollout"):
            trajectory = self.sample()
        with self.clock("reward"):
            scored = self.score(trajectory)
        batch = self.algorithm.credit(scored)
        metrics = self.update(batch)
        if self.steps_done == 0:
            self.first = scored
        self.steps_done += 1
        self.cost += (self.policy.forwards - before) * self.ranks.world
        metrics["cost/forward_equivalents"] = self.cost
        metrics |= reward_metrics(scored) | dict(batch.stats)
        for name, reward in self.reward.rewards.items():
            if reward.truncation is not None:
                metrics[f"reward/{name}/truncated"] = float(len(union(reward.truncation.cut)))
        return metrics | {f"time/{stage}_s": s for stage, s in self.clock.collect().items()}

    def sample(self) -> Trajectory:
        """This rank's trajectories of the next prompts."""
        dealt = next(self.prompts)
        prompts = [dealt[s.prompt_index] for s in self.samples]
        with self.policy.using(self.algorithm.behaviour):
            return self.rollout(
                self.policy,
                self.samples,
                prompts,
                self.steps_done,
                self.algorithm.record,
                lambda: self.tick("rollout"),
            )

    def score(self, trajectory: Trajectory) -> Scored:
        """Every reward of every sample of the rollout, gathered from all ranks into global order.

        A sample with non-finite latents has failed, whatever its picture scores.
        """
        trajectory, broken_B = trajectory.mended()
        parts_B = self.reward.score(trajectory.media_B, trajectory.prompts).parts
        index = gather(torch.tensor([s.index for s in trajectory.samples], device=self.ranks.device)).cpu()
        parts_N = {}
        for name, value_B in parts_B.items():
            parts_N[name] = torch.empty(len(index))
            value_B = value_B.float().to(self.ranks.device).masked_fill(broken_B, torch.nan)
            parts_N[name][index] = gather(value_B).cpu()
        return Scored(trajectory, parts_N, self.reward.weights, self.loop.group_size)

    def update(self, batch: Batch) -> dict[str, float]:
        """The rollout's optimizer steps, one per part."""
        self.backward.begin()
        groups = self.algorithm.groups(
            batch.trajectory, self.steps_done, self.backward.window, self.loop.seed
        )
        whole, norms = Report(), []
        for part in batch.split(self.loop.updates_per_rollout):
            report = Report()
            for micro in part.micro_batches(self.loop.micro_batch):
                report.add(self._accumulate(micro, groups))
            if self.policy.version == 0 and "ratio_deviation_max" in report.stats:
                self.first_ratio_deviation = float(largest(report.summary()["ratio_deviation_max"]))
            norms.append(self.optimize(float(total(part.valid_B.float().sum())) > 0))
            whole.add(report)
        metrics = self.algorithm.after_rollout(self.policy, self.policy.version)
        return metrics | self._update_metrics(whole, norms)

    def _accumulate(self, micro: Batch, groups: Sequence[Group]) -> Report:
        """Pull back one micro-batch's windows; making a window runs the forwards of other policies it asks for."""
        report = Report()
        windows = self.algorithm.windows(micro, self.policy, groups)
        while True:
            with self.clock("reference"):
                window = next(windows, None)
            if window is None:
                break
            report.add(self.backward(window))
            self.tick("update")
        backwards = report.passes.backwards * len(micro.trajectory.samples) * self.ranks.world
        self.cost += backwards * self.policy.backward_cost
        return report

    def optimize(self, judged: bool = True) -> float:
        """Clip, step, zero. Returns the pre-clip norm, the same on all ranks: all skip a step together.

        A non-finite gradient is skipped and counted. So is a zero one (all groups flat, failed or clipped), on which
        momentum and weight decay would still move the parameters; where no sample was ``judged`` at all (every score
        failed) it counts towards ``max_skipped`` too.
        """
        with self.clock("optim"):
            norm_tensor = torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.loop.max_grad_norm)
            if isinstance(norm_tensor, DTensor):
                norm_tensor = norm_tensor.full_tensor()
            norm = float(norm_tensor)
            if norm == 0:
                self.idle += 1
                self._skipped_in_a_row = 0 if judged else self._skipped_in_a_row + 1
            elif math.isfinite(norm):
                self.optimizer.step()
                self.policy.version += 1
                self._skipped_in_a_row = 0
                if self.loop.ema_decay:
                    self.policy.shadows.lerp("ema", self.loop.ema_decay)
            else:
                self.skipped += 1
                self._skipped_in_a_row += 1
            self.optimizer.zero_grad(set_to_none=True)
        if self._skipped_in_a_row >= self.loop.max_skipped:
            raise DivergedError(
                f"{self._skipped_in_a_row} updates in a row had non-finite gradients or not one sample with a score "
                "(max_skipped); lower optim.lr or look at reward/*/failed; the last checkpoint is intact"
            )
        return norm

    def _update_metrics(self, report: Report, norms: list[float]) -> dict[str, float]:
        """Means over ranks and updates (or maxima) of what the windows reported."""
        device = self.ranks.device
        metrics = {}
        for name, value in report.summary().items():
            across = largest(value) if name.endswith("_max") else total(value) / self.ranks.world
            metrics[f"train/{name}"] = float(across)
        finite = [n for n in norms if math.isfinite(n)]
        metrics |= {
            "train/loss": float(total(report.loss.to(device)) / self.ranks.world) / len(norms),
            "train/grad_norm": sum(finite) / len(finite) if finite else float("nan"),
            "train/grad_norm_max": max(finite, default=float("nan")),
            "train/skipped_updates": float(self.skipped),
            "train/idle_updates": float(self.idle),
            "train/updates": float(self.policy.version),
        }
        metrics |= {f"backward/{k}": float(v) for k, v in report.passes.as_dict().items()}
        return metrics | self.backward.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Counters, generators and shadows; weights and optimizer are saved beside them."""
        return {
            "counters": {
                "steps_done": self.steps_done,
                "version": self.policy.version,
                "skipped": self.skipped,
                "idle": self.idle,
                "skipped_in_a_row": self._skipped_in_a_row,
                "cost": self.cost,
            },
            "prompts": self.prompts.state_dict(),
            "backward": self.backward.state_dict(),
            "shadows": self.policy.shadows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        counters = state["counters"]
        self.steps_done = int(counters["steps_done"])
        self.policy.version = int(counters["version"])
        self.skipped = int(counters["skipped"])
        self.idle = int(counters["idle"])
        self._skipped_in_a_row = int(counters["skipped_in_a_row"])
        self.cost = float(counters["cost"])
        self.prompts.load_state_dict(state["prompts"])
        self.backward.load_state_dict(state["backward"])
        self.policy.shadows.load_state_dict(state["shadows"])
