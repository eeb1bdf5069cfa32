"""Small stand-ins for tests: a model adapter around a few linear layers, a reward, and windows from nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from jaggrl.algorithms.base import Algorithm
from jaggrl.backward.interpolants import Exact, Interpolant
from jaggrl.backward.strategy import Backward
from jaggrl.infra.distributed import Ranks
from jaggrl.models.base import Model
from jaggrl.models.policy import Lora, Policy, make_trainable
from jaggrl.prompts import Prompt, PromptDealer, PromptSet
from jaggrl.rewards.base import Reward, RewardCard, WeightedReward
from jaggrl.rollout import Rollout, Sampler
from jaggrl.trainer import Loop, Trainer
from jaggrl.trajectory import Condition
from jaggrl.window import StepLoss, Window

SHAPE = (2, 4, 4)
CPU = torch.device("cpu")


class Field(nn.Module):
    """v(z, t, c): a small MLP, or with ``affine`` a field that is affine in (z, t) and nonlinear in its parameters."""

    def __init__(self, affine: bool = False, width: int = 16) -> None:
        super().__init__()
        size = SHAPE[0] * SHAPE[1] * SHAPE[2]
        self.affine = affine
        self.block = nn.Linear(size + 1 + 4, width)
        self.head = nn.Linear(width, size)

    def forward(self, z: Tensor, t: Tensor, c: Tensor) -> Tensor:
        """(B, 2, 4, 4), (B,), (B, 4) -> (B, 2, 4, 4)."""
        hidden = self.block(torch.cat([z.flatten(1), t[:, None], c], 1))
        if not self.affine:
            hidden = torch.tanh(hidden)
        return self.head(hidden).view_as(z)

    def add_adapter(self, config: LoraConfig) -> None:
        """As diffusers' networks do."""
        inject_adapter_in_model(config, self, "default")


class ToyPipeline:
    """What ``Model.frozen_modules`` asks of a pipeline."""

    def __init__(self, network: nn.Module) -> None:
        self.components: dict[str, Any] = {"transformer": network}


class ToyModel(Model):
    """A model adapter without diffusers."""

    def __init__(self, affine: bool = False, seed: int = 0, width: int = 16) -> None:
        torch.manual_seed(seed)
        self.location = "toy"
        self.latent_shape = SHAPE
        self.network = Field(affine, width)
        self.pipeline = ToyPipeline(self.network)

    def encode_texts(self, texts: Sequence[str]) -> Condition:
        """Four numbers from the letters."""
        rows = [[len(t) / 10, (sum(map(ord, t)) % 7) / 7, (sum(map(ord, t)) % 5) / 5, 1.0] for t in texts]
        return Condition({"c": torch.tensor(rows)})

    def velocity(self, z: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """The field."""
        return self.network(z, t, condition.tensors["c"])

    def decode(self, x0: Tensor) -> Tensor:
        """Three channels of 4x4."""
        return torch.sigmoid(torch.stack([x0[:, 0], x0[:, 1], x0.mean(1)], 1)).detach()

    def sigmas(self, steps: int) -> Tensor:
        """Shift 2 from 1 to 0."""
        tau = torch.linspace(1, 0, steps + 1)
        return 2 * tau / (1 + tau)

    def blocks(self) -> list[nn.Module]:
        """One."""
        return [self.network.block]  # type: ignore[list-item]

    def lora_targets(self) -> list[str]:
        """Both layers."""
        return ["block", "head"]

    def export(
        self, folder: Path, state: dict[str, Tensor], lora_metadata: dict[str, Any] | None
    ) -> list[str]:
        """Nothing to load."""
        return []


class Brightness(Reward):
    """Mean of the first channel."""

    card = RewardCard("brightness", "mean of the first channel", "", "1", "mean", (0.0, 1.0))

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B,)."""
        return media_B[:, 0].mean((1, 2))


def toy_policy(model: Model | None = None, lora: Lora | None = None) -> Policy:
    """A trainable toy on the CPU."""
    model = model or ToyModel()
    make_trainable(model, lora, checkpointing=False)
    return Policy(model, lora, "fp32", CPU)


def toy_prompts(texts: Sequence[str]) -> PromptSet:
    """A prompt set from memory."""
    return PromptSet(Path("toy"), "", tuple(Prompt(i, t) for i, t in enumerate(texts)))


def toy_trainer(
    algorithm: Algorithm,
    sampler: Sampler,
    interpolant: Interpolant | Backward | None = None,
    backward: dict[str, Any] | None = None,
    reward: WeightedReward | None = None,
    policy: Policy | None = None,
    ranks: Ranks | None = None,
    lr: float = 1e-2,
    prompt_texts: Sequence[str] = ("a", "bb", "ccc"),
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **loop: Any,
) -> Trainer:
    """A whole trainer around toys, with a whole strategy or a rule and its options; ``loop`` overrides sizes."""
    sizes = {
        "prompts_per_rollout": 2,
        "group_size": 4,
        "updates_per_rollout": 1,
        "micro_batch": 4,
        "max_grad_norm": 1e9,
        "seed": 0,
    } | loop
    policy = policy or toy_policy()
    strategy = (
        interpolant
        if isinstance(interpolant, Backward)
        else Backward(interpolant or Exact(), **(backward or {}))
    )
    return Trainer(
        Loop(**sizes),
        ranks or Ranks(0, 1, CPU),
        policy,
        PromptDealer(toy_prompts(prompt_texts), sizes["prompts_per_rollout"], seed=0),
        Rollout(sampler, sizes["seed"], sizes["micro_batch"]),
        reward or WeightedReward({"brightness": Brightness()}, {"brightness": 1.0}),
        algorithm,
        strategy,
        optimizer(policy.parameters, lr=lr),
    )


def toy_window(
    field: Field, z_WB: Tensor, t_WB: Tensor, c: Tensor, target_WB: Tensor, fresh: bool = False
) -> Window:
    """A window of squared errors (scaled per step, so that cotangents differ)."""
    stored = [field(z, t, c).detach() for z, t in zip(z_WB, t_WB, strict=True)]

    def velocities(js: Sequence[int]) -> list[Tensor]:
        out = field(torch.cat([z_WB[j] for j in js]), torch.cat([t_WB[j] for j in js]), c.repeat(len(js), 1))
        return list(out.chunk(len(js)))

    def loss(j: int, v: Tensor) -> StepLoss:
        return StepLoss((1 + j) * ((v - target_WB[j]) ** 2).mean())

    return Window(t_WB, 0.0, velocities, loss, stored=lambda j: stored[j], fresh=fresh)


def gradients(module: nn.Module) -> Tensor:
    """All gradients as one vector, then cleared."""
    flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    module.zero_grad(set_to_none=True)
    return flat
