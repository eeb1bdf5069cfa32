"""What a run will cost, told before it starts, and how many rollouts a budget buys."""

import logging
from collections.abc import Callable, Iterator

from jaggrl.backward.cost import Prediction, predict
from jaggrl.backward.interpolants import Exact
from jaggrl.build import Config, Plan
from jaggrl.errors import UserError
from jaggrl.trainer import Trainer


def forecast(plan: Plan, trainer: Trainer, checkpointing: bool, rollout: int = 0) -> Prediction:
    """Predicted passes of one rollout and its updates, and the saving against exact."""
    policy, loop = trainer.policy, plan.loop
    outline = plan.sampler.outline(policy.model.sigmas, rollout, loop.seed)
    groups = trainer.algorithm.groups(outline, rollout, trainer.backward.window, loop.seed)
    return predict(
        trainer.backward,
        [(len(g.steps), g.position) for g in groups],
        loop.updates_per_rollout,
        checkpointing,
        policy.lora is not None,
        trainer.algorithm.references,
        sum(policy.forward_shares(plan.sampler.cache, len(outline.t_S))),
        "velocities" in trainer.algorithm.record,
        plan.sampler.cache is None,
        trainer.algorithm.trained_share(loop.group_size),
    )


def affordable(rollouts: int, budget: float | None, samples: int, cost: Callable[[int], float]) -> int:
    """How many of ``rollouts`` fit into ``budget`` forward-equivalents (null: all) by their predicted cost.

    Args:
        rollouts: wanted.
        budget: in forward-equivalents of one sample.
        samples: of one rollout.
        cost: of one sample of the i-th rollout and its updates; a moving window may change it.

    Raises:
        UserError: not even one does.
    """
    if budget is None:
        return rollouts
    spent = 0.0
    for rollout in range(rollouts):
        spent += samples * cost(rollout)
        if spent > budget * (1 + 1e-9):
            if not rollout:
                raise UserError(f"budget={budget} forward-equivalents is less than one rollout's {spent:g}")
            return rollout
    return rollouts


def announcement(
    config: Config, plan: Plan, trainer: Trainer, prediction: Prediction, rollouts: int
) -> Iterator[tuple[int, str]]:
    """What one step is, before the first one: lines with their log levels."""
    loop, policy = plan.loop, trainer.policy
    samples, updates = loop.prompts_per_rollout * loop.group_size, loop.updates_per_rollout
    trainable = sum(p.numel() for p in policy.parameters)
    yield (
        logging.INFO,
        f"each rollout: {loop.prompts_per_rollout} prompts x {loop.group_size} samples = {samples}, over "
        f"{trainer.ranks.world} ranks; {updates} optimizer updates of {samples / updates:.4g} samples",
    )
    how = "LoRA" if policy.lora else "full"
    yield (
        logging.INFO,
        f"{config['model']['path']}: {trainable:,} trainable parameters ({how}), {policy.precision}",
    )
    yield logging.INFO, prediction.describe()
    backward = plan.backward
    if not prediction.interpolated and not isinstance(backward.interpolant, Exact):
        yield (
            logging.WARNING,
            f"no window is interpolated, all gradients are exact: trained steps fill no window of {backward.window} "
            f"(backward.window=0 takes all of them), or backward.jagg_frac={backward.jagg_frac:g} leaves none",
        )
    if config["budget"] is not None:
        yield (
            logging.INFO,
            f"budget of {config['budget']:g} forward-equivalents: {rollouts} of {config['rollouts']} rollouts by "
            "their predicted cost",
        )
