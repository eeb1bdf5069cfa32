"""Held-out evaluation: the same prompts and the same noise each time, every scorer, trained or not.

The door ``python -m jaggrl.evaluate`` and the training run share this code, so that they give the same numbers.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.diffusion.exploration import Nowhere
from jaggrl.diffusion.schedule import ModelSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.errors import UserError
from jaggrl.infra.distributed import Ranks, gather
from jaggrl.models.policy import Policy
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import Reward, score_parts
from jaggrl.rollout import Rollout, Sampler
from jaggrl.trajectory import Sample


@dataclass(frozen=True)
class Evaluation:
    """Raw scores of n held-out prompts, in prompt order, and the first pictures."""

    values: Mapping[str, Tensor]
    """Reward name -> (n,), the mean over each prompt's samples that could be scored, NaN where none could."""
    pictured: Mapping[str, Tensor]
    """Reward name -> (k,), the scores of the pictures in ``media``."""
    media: Tensor
    """The first ``grid`` pictures (k, 3, H, W)."""
    captions: Sequence[str]

    def means(self) -> dict[str, float]:
        """Mean of each reward over the prompts that it could score."""
        return {name: float(v[v.isfinite()].mean()) for name, v in self.values.items()}


class Evaluator:
    """Samples held-out prompts by the model's own ODE schedule and scores them."""

    def __init__(
        self,
        ranks: Ranks,
        policy: Policy,
        scorers: Mapping[str, Reward],
        prompts: Sequence[Prompt],
        steps: int,
        seed: int,
        micro_batch: int,
        batch_size: int,
        grid: int,
        tick: Callable[[], None] = lambda: None,
        samples: int = 1,
    ) -> None:
        if samples < 1:
            raise UserError(f"evaluation.samples={samples} samples nothing; use at least 1")
        if not prompts:
            raise UserError("evaluation.prompts=0 evaluates nothing; use at least 1")
        for scorer in scorers.values():
            scorer.check_prompts(prompts)
        self.ranks = ranks
        self.policy = policy
        self.scorers = scorers
        self.prompts = prompts
        self.batch_size = batch_size
        self.grid = grid
        self.tick = tick
        self.samples = samples
        self.setting = {
            "model": policy.model.location,
            "model_options": policy.model.options(),
            "precision": policy.precision,
            "prompts_sha256": hashlib.sha256("\n".join(p.text for p in prompts).encode()).hexdigest(),
            "n": len(prompts),
            "steps": steps,
            "seed": seed,
            "samples": samples,
            "grid": grid,
            "rewards": list(scorers),
            "cards": {name: scorer.card.as_dict() for name, scorer in scorers.items()},
        }
        """What must be the same for two evaluations to be compared."""
        self._rollout = Rollout(Sampler(ModelSchedule(steps), Nowhere(), Euler()), seed, micro_batch)

    def __call__(self, weights: str = "current") -> Evaluation:
        """Evaluate the ``current`` weights or a shadow (``ema``). Every rank takes an equal share, padding dropped."""
        n, world = len(self.prompts), self.ranks.world
        share = -(-n // world)
        mine = [(self.ranks.rank + i * world) % n for i in range(share)]
        prompts = [self.prompts[i] for i in mine]
        shown = min(self.grid, n)
        media, scored = [], []
        for member in range(self.samples):
            samples = [Sample(i, i, member, 0) for i in mine]
            with self.policy.using(weights):
                trajectory = self._rollout(self.policy, samples, prompts, -1, tick=self.tick)
            parts_B = score_parts(self.scorers, trajectory.media_B, prompts, self.batch_size)
            # rank r holds prompts r, r + world, ...; the tail beyond n is padding
            scored.append({name: self._in_order(value_B, n) for name, value_B in parts_B.items()})
            media.append(self._in_order(trajectory.media_B[: -(-shown // world)], shown))
        values = {name: torch.stack([s[name] for s in scored]).nanmean(0) for name in scored[0]}
        pictured = {name: value[:shown] for name, value in scored[0].items()}
        return Evaluation(values, pictured, media[0], [p.text for p in self.prompts[:shown]])

    def _in_order(self, x_B: Tensor, count: int) -> Tensor:
        """Gather (B, ...) of all ranks and interleave into prompt order."""
        gathered = gather(x_B.float().to(self.ranks.device)).cpu()
        by_rank = gathered.view(self.ranks.world, *x_B.shape)
        return by_rank.transpose(0, 1).flatten(0, 1)[:count]


def held_out(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts spread evenly over the file, the same for every run (all of them if there are fewer)."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]
