"""What a run will cost, told before it starts, and how many rollouts a budget buys."""

from jaggrl.backward.cost import Prediction, predict
from jaggrl.build import Plan
from jaggrl.errors import UserError
from jaggrl.trainer import Trainer


def forecast(plan: Plan, trainer: Trainer, checkpointing: bool) -> Prediction:
    """Predicted passes of one rollout (the first) and its updates, and the saving against exact."""
    policy, loop = trainer.policy, plan.loop
    outline = plan.sampler.outline(policy.model.sigmas, 0, loop.seed)
    groups = trainer.algorithm.groups(outline, 0, trainer.backward.window, loop.seed)
    return predict(
        trainer.backward,
        [(len(g.steps), g.position) for g in groups],
        loop.updates_per_rollout,
        checkpointing,
        policy.lora is not None,
        len({trainer.algorithm.behaviour, *trainer.algorithm.needs} - {"current"}),
        sum(policy.forward_shares(plan.sampler.cache, len(outline.t_S))),
        "velocities" in trainer.algorithm.record,
        plan.sampler.cache is None,
    )


def affordable(rollouts: int, budget: float | None, samples: int, prediction: Prediction) -> int:
    """How many of ``rollouts`` fit into ``budget`` forward-equivalents (null: all) by their predicted cost.

    Raises:
        UserError: not even one does.
    """
    if budget is None:
        return rollouts
    each = samples * (prediction.units + prediction.rollout_units)
    if each > budget:
        raise UserError(f"budget={budget} forward-equivalents is less than one rollout's {each:g}")
    return int(min(rollouts, budget / each))
