"""What a run will cost, told before it starts, and how many rollouts a budget buys."""

from collections.abc import Callable

from jaggrl.backward.cost import Prediction, predict
from jaggrl.build import Plan
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
