"""From config to objects: leaves by ``_target_``, cross-object checks, and the wiring of run-time objects.

``check`` is cheap and comes first: it refuses impossible values and combinations before any weight is loaded.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jaggrl.algorithms.base import Algorithm
from jaggrl.backward.strategy import Backward
from jaggrl.diffusion.exploration import Nowhere
from jaggrl.errors import UserError, unknown
from jaggrl.infra.distributed import Ranks, shard
from jaggrl.infra.wandb_run import MODES
from jaggrl.models.base import Model
from jaggrl.models.loading import locate_pipeline
from jaggrl.models.policy import Lora, Policy, make_trainable, narrow_frozen
from jaggrl.prompts import PromptDealer, PromptSet, load_prompts
from jaggrl.results import load_evaluation
from jaggrl.rewards.base import Reward, WeightedReward, check_weights
from jaggrl.rewards.catalogue import build_rewards, missing_files
from jaggrl.rollout import Rollout, Sampler
from jaggrl.trainer import Loop, Trainer
from jaggrl.trajectory import layout

Config = dict[str, Any]
"""The resolved config as plain containers; objects never see a DictConfig."""

# Whole numbers and the least that works.
EVALUATION_LEAST = {
    "evaluation.prompts": 1,
    "evaluation.steps": 2,
    "evaluation.micro_batch": 1,
    "evaluation.grid": 0,
    "reward.batch_size": 1,
}
TRAINING_LEAST = EVALUATION_LEAST | {
    "rollouts": 1,
    "prompts_per_rollout": 1,
    "group_size": 1,
    "updates_per_rollout": 1,
    "micro_batch": 1,
    "max_skipped": 1,
    "evaluation.every": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "distributed.replicas": 1,
}


LOOK_AHEAD = 1000
"""Rollouts whose exploration is looked at before the run; a sliding window has been everywhere by then."""


def resolve(cfg: DictConfig) -> Config:
    """Plain containers with all interpolations resolved; a missing or unresolvable value is one line."""
    try:
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"config: {first}; give the value on the command line") from error
    assert isinstance(resolved, dict)
    return {str(k): v for k, v in resolved.items()}


def make(node: Mapping[str, Any], where: str, **more: Any) -> Any:
    """Instantiate ``node['_target_']``; errors of its constructor come out as themselves, in one line."""
    try:
        return instantiate(dict(node), _convert_="all", **more)
    except InstantiationException as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, UserError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from error
        if isinstance(cause, TypeError):
            raise UserError(f"{where}: {cause}; compare the keys with conf/{where}") from error
        raise


@dataclass(frozen=True)
class Plan:
    """The cheap half of a run: everything that can be known without weights."""

    algorithm: Algorithm
    sampler: Sampler
    backward: Backward
    loop: Loop
    train_prompts: PromptSet
    heldout_prompts: PromptSet


def check(config: Config) -> Plan:
    """Build what is cheap and refuse what cannot work, naming the value and the remedy."""
    _check_values(config)
    algorithm_node = dict(config["algorithm"])
    sampler = make(algorithm_node.pop("rollout"), "algorithm")
    algorithm = make(algorithm_node, "algorithm")
    backward = make(config["backward"], "backward")
    loop = Loop(**{k: config[k] for k in Loop.__dataclass_fields__})
    world, replicas = int(os.environ.get("WORLD_SIZE", "1")), config["distributed"]["replicas"]
    _check_layout(loop, world)
    if world > 1 and world % replicas:
        raise UserError(
            f"distributed.replicas={replicas} does not divide {world} ranks; use 1 for one sharded group"
        )
    algorithm.check(
        interpolates=backward.by_time,
        init_noise=sampler.init_noise,
        explores=not isinstance(sampler.exploration, Nowhere),
        updates=loop.updates_per_rollout,
        group=loop.group_size,
    )
    _check_windows(sampler, algorithm, backward, min(config["rollouts"], LOOK_AHEAD), loop.seed)
    if sampler.cache is not None and algorithm.regresses:
        raise UserError(
            f"{type(algorithm).__name__} regresses on the rollout's velocities, which a feature cache would predict; "
            "use rollout_cache=null"
        )
    train_prompts = load_prompts(config["prompts"]["train"])
    heldout_prompts = check_evaluation(config)
    baseline = config["evaluation"]["baseline"]
    if baseline is not None and load_evaluation(Path(str(baseline)), 0) is None:
        raise UserError(
            f"evaluation.baseline={baseline} holds no evaluation of step 0; give the folder of a run, or null"
        )
    return Plan(algorithm, sampler, backward, loop, train_prompts, heldout_prompts)


def _check_windows(
    sampler: Sampler, algorithm: Algorithm, backward: Backward, rollouts: int, seed: int
) -> None:
    """Does every exploration of the run fit its schedule, and is there always a step to train?"""

    def any_levels(steps: int) -> torch.Tensor:
        return torch.linspace(1, 0, steps + 1)

    steps = sampler.schedule(any_levels).steps
    first: dict[range, int] = {}
    for rollout in range(rollouts):
        first.setdefault(sampler.exploration(rollout, steps, seed), rollout)
    for rollout in first.values():
        algorithm.groups(sampler.outline(any_levels, rollout, seed), rollout, backward.window, seed)


def check_evaluation(config: Config) -> PromptSet:
    """Refuse what no evaluation can work with; returns the held-out prompts."""
    _check_counts(config, EVALUATION_LEAST)
    if config["precision"] not in ("fp32", "bf16"):
        raise UserError(f"precision={config['precision']} is unknown; use fp32 or bf16")
    prompts = load_prompts(config["prompts"]["heldout"])
    locate_pipeline(config["model"]["path"])
    lacks = missing_files(_rewards(config), config["reward"]["catalogue"])
    if lacks:
        raise UserError("; ".join(lacks))
    return prompts


def _rewards(config: Config) -> list[str]:
    """Names of the rewards that train or are evaluated."""
    reward = config["reward"]
    return list(
        dict.fromkeys([*check_weights(reward["weights"], reward["catalogue"]), *(reward["eval"] or [])])
    )


def _check_counts(config: Config, least: Mapping[str, int]) -> None:
    for key, smallest in least.items():
        value: Any = config
        for name in key.split("."):
            value = value[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise UserError(f"{key}={value!r} must be a whole number of at least {smallest}")


def _check_values(config: Config) -> None:
    _check_counts(config, TRAINING_LEAST)
    if not isinstance(config["seed"], int):
        raise UserError(f"seed={config['seed']!r} must be a whole number")
    if config["check"] not in ("warn", "error", "off"):
        raise UserError(f"check={config['check']} is unknown; use warn, error or off")
    if not isinstance(config["max_grad_norm"], int | float) or not config["max_grad_norm"] > 0:
        raise UserError(f"max_grad_norm={config['max_grad_norm']} must be > 0; a large value clips nothing")
    budget = config["budget"]
    if budget is not None and not (isinstance(budget, int | float) and budget > 0):
        raise UserError(f"budget={budget!r} must be > 0 forward-equivalents, or null for none")
    ema = config["ema_decay"]
    if ema is not None and not (isinstance(ema, int | float) and 0 < ema < 1):
        raise UserError(f"ema_decay={ema} is outside (0, 1); use for instance 0.995, or null for none")
    if config["logger"]["wandb"] not in MODES:
        raise unknown("logger.wandb", config["logger"]["wandb"], MODES)
    _lora(config)
    try:
        make(config["optim"], "optim")([torch.zeros(1, requires_grad=True)])
    except (TypeError, ValueError) as error:
        raise UserError(f"optim: {error}; compare the keys with conf/optim") from error


def _lora(config: Config) -> Lora | None:
    """LoRA's settings; None for full fine-tuning."""
    if not config["lora"]:
        return None
    try:
        return Lora(**config["lora"])
    except TypeError as error:
        raise UserError(f"lora={config['lora']}: {error}; give rank, alpha and targets") from error


def _check_layout(loop: Loop, world: int) -> None:
    """Every update must hold samples of every group, the same number on every rank."""
    prompts, group, updates = loop.prompts_per_rollout, loop.group_size, loop.updates_per_rollout
    if updates > group:
        raise UserError(
            f"updates_per_rollout={updates} exceeds group_size={group}: every group is split over the updates; lower it"
        )

    def divides(count: int) -> bool:
        sizes = Counter(sample.part for sample in layout(count, group, updates, 1, 0))
        return all(size % world == 0 for size in sizes.values())

    if not divides(prompts):
        near = min(
            (p for p in range(1, prompts + world * updates + 1) if divides(p)), key=lambda p: abs(p - prompts)
        )
        raise UserError(
            f"prompts_per_rollout={prompts} x group_size={group} over {updates} updates does not divide over "
            f"{world} ranks; use prompts_per_rollout={near}"
        )


def build_policy(config: Config, ranks: Ranks, weights: Path | None = None) -> Policy:
    """Load the pipeline (and an export's ``weights``), open the network, shard it over the ranks."""
    node = {k: v for k, v in config["model"].items() if k != "scorers"}
    lora = _lora(config)
    torch.manual_seed(config["seed"])  # LoRA's initial weights: the same on all ranks
    model: Model = make(node, "model")
    if weights is not None:
        model.load_export(weights)
    make_trainable(model, lora, config["checkpointing"])
    if config["precision"] == "bf16":
        narrow_frozen(model)
    for module in model.frozen_modules():
        module.to(ranks.device)
    if ranks.world > 1:
        shard(model.network, model.blocks(), ranks, config["precision"], config["distributed"]["replicas"])
    else:
        model.network.to(ranks.device)
    return Policy(model, lora, config["precision"], ranks.device, config["checkpointing"])


def build_scorers(config: Config, ranks: Ranks) -> dict[str, Reward]:
    """Every reward that trains or is evaluated, loaded once."""
    return build_rewards(config["reward"]["catalogue"], _rewards(config), ranks.device)


def build_trainer(
    config: Config,
    plan: Plan,
    ranks: Ranks,
    policy: Policy,
    scorers: Mapping[str, Reward],
    tick: Callable[[str], None] = lambda stage: None,
) -> Trainer:
    """Wire the run-time objects."""
    reward = WeightedReward(scorers, config["reward"]["weights"], config["reward"]["batch_size"])
    reward.check_prompts(plan.train_prompts.prompts)
    optimizer = make(config["optim"], "optim")(policy.parameters)
    return Trainer(
        plan.loop,
        ranks,
        policy,
        PromptDealer(plan.train_prompts, plan.loop.prompts_per_rollout, plan.loop.seed),
        Rollout(plan.sampler, plan.loop.seed, plan.loop.micro_batch),
        reward,
        plan.algorithm,
        plan.backward,
        optimizer,
        tick,
    )
