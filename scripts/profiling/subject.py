"""What is profiled: a training step composed like the door's, of the config's model or of a larger random one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from hydra import compose, initialize_config_dir

from jaggrl.build import Config, build_policy, build_scorers, build_trainer, check, make, resolve
from jaggrl.infra.distributed import Ranks
from jaggrl.models.policy import Lora, Policy, make_trainable
from jaggrl.trainer import Trainer
from scripts.profiling.ledger import Ledger

CONF = Path(__file__).resolve().parents[2] / "conf"
HEAD = 64
BENCHMARK = (
    "model.resolution=128",  # 256 picture tokens
    "prompts_per_rollout=1",
    "group_size=2",
    "micro_batch=2",
    "reward.batch_size=2",
)
"""What the benchmark model changes: more tokens, fewer samples. Overrides given come after these."""
NAMES = {
    "rollout": "rollout: rest",
    "reward": "reward: rest",
    "reference": "update: making windows",
    "update_fwd": "update: rest",
    "update_bwd": "update: backward",
    "probe": "update: measuring",
    "optim": "optimizer: rest",
    "": "unaccounted",
}
"""How stages of the trainer's own stopwatch are told."""


def composed(overrides: list[str]) -> Config:
    """The door's config."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("train", overrides=overrides))


def build(config: Config, ranks: Ranks, width: int | None, double: int, single: int) -> Trainer:
    """The config's trainer; with ``width`` its network is a random FLUX of that size."""
    plan = check(config)
    policy = build_policy(config, ranks) if width is None else _random(config, ranks, width, double, single)
    return build_trainer(config, plan, ranks, policy, build_scorers(config, ranks))


def _random(config: Config, ranks: Ranks, width: int, double: int, single: int) -> Policy:
    """The config's pipeline around a random transformer of its inputs and another size."""
    model = make({k: v for k, v in config["model"].items() if k != "scorers"}, "model")
    shape = dict(model.network.config) | {
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": width // HEAD,
        "attention_head_dim": HEAD,
        "axes_dims_rope": (16, 24, 24),
    }
    torch.manual_seed(config["seed"])
    model.network = model.pipeline.transformer = FluxTransformer2DModel.from_config(shape)
    lora = Lora(**config["lora"]) if config["lora"] else None
    make_trainable(model, lora, config["checkpointing"])
    for module in [*model.frozen_modules(), model.network]:
        module.to(ranks.device)
    return Policy(model, lora, config["precision"], ranks.device, config["checkpointing"])


class _Named:
    """A reward that is a stage of its own."""

    def __init__(self, reward: Any, name: str, ledger: Ledger) -> None:
        self._reward = reward
        self._call = ledger.timed(reward, f"reward: {name}")

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reward, name)


@contextmanager
def instrument(trainer: Trainer, ledger: Ledger) -> Iterator[None]:
    """Let every part of the trainer's steps be a stage, by wrapping what it calls."""
    policy, model, timed = trainer.policy, trainer.policy.model, ledger.timed
    trainer.clock = ledger
    trainer.backward.attach(model.network, ledger)

    def forward() -> str:
        if ledger.stage == "rollout":
            return "rollout: network forward"
        if ledger.stage == "reference":
            return "update: reference forward"
        return f"update: forward {'with' if torch.is_grad_enabled() else 'without'} graph"

    def wrap(owner: Any, name: str, stage: str | Any) -> None:
        setattr(owner, name, timed(getattr(owner, name), stage))

    wrap(policy, "velocity", forward)
    wrap(model, "encode", "rollout: prompt embeddings")
    wrap(model, "decode", "rollout: decode")
    wrap(trainer.rollout, "_step", "rollout: solver, kernel, noise")
    wrap(trainer.algorithm, "credit", "credit")
    wrap(trainer.backward, "_cotangent", "update: losses, cotangents")
    wrap(trainer.optimizer, "step", "optimizer: step")
    wrap(policy.shadows, "lerp", "optimizer: EMA")
    wrap(trainer, "state_dict", "log: state to go back to")
    wrap(trainer, "_update_metrics", "log: metrics of the update")
    named: dict[str, Any] = {n: _Named(r, n, ledger) for n, r in trainer.reward.rewards.items()}
    trainer.reward.rewards = named
    clip = torch.nn.utils.clip_grad_norm_  # the only one that is not the trainer's own
    wrap(torch.nn.utils, "clip_grad_norm_", "optimizer: clipping")
    try:
        yield
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
