"""The policy: a model adapter made trainable, at a counted version, with its shadows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from jaggrl.errors import UserError
from jaggrl.models.base import Model
from jaggrl.models.feature_cache import TaylorSeer, flops
from jaggrl.models.shadow import Shadows
from jaggrl.trajectory import Condition


@dataclass(frozen=True)
class Lora:
    """LoRA of the trainable network; ``targets`` null takes the model's own."""

    rank: int = 64
    alpha: float = 128
    targets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"lora.rank={self.rank} must be a whole number of at least 1")
        if not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise UserError(f"lora.alpha={self.alpha} must be > 0; twice the rank is usual")
        if isinstance(self.targets, str):
            raise UserError(
                f"lora.targets={self.targets} must be a list of names, or null for the model's own"
            )


def make_trainable(model: Model, lora: Lora | None, checkpointing: bool) -> None:
    """Freeze the pipeline, open the network (all of it, or an injected adapter named 'default')."""
    for module in [*model.frozen_modules(), model.network]:
        module.requires_grad_(False).eval()
    network: Any = model.network
    if lora is None:
        network.requires_grad_(True)
    else:
        from peft import LoraConfig  # heavy, and only LoRA runs need it

        targets = list(lora.targets or model.lora_targets())
        try:
            network.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets))
        except ValueError as error:
            raise UserError(
                f"lora.targets={targets} fit no layer of {type(network).__name__}: {error}"
            ) from error
    if checkpointing:
        network.enable_gradient_checkpointing()


def narrow_frozen(model: Model) -> None:
    """Text encoders, and the network's frozen weights under LoRA, in bf16, as the pipelines are published.

    FLUX.1-dev's take 19 and 48 GB in fp32. The VAE stays as it is: pictures are judged.
    """
    for module in model.text_encoders():
        module.to(torch.bfloat16)
    for parameter in model.network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


class Policy:
    """What algorithms, rollout and evaluation call. ``version`` counts optimizer steps."""

    def __init__(
        self,
        model: Model,
        lora: Lora | None,
        precision: str,
        device: torch.device,
        checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.forwards = 0.0
        """Network forwards so far, in samples; one that a feature cache shortens counts by its FLOPs."""
        self.backward_cost = (1 if lora else 2) + int(checkpointing)
        """A backward in units of a forward: frozen weights need no weight gradient; checkpointing recomputes."""
        self.lora = lora
        self.device = device
        self.version = 0
        self.precision = precision
        self.shadows = Shadows(model.network)
        self.parameters: list[Tensor] = [p for p in model.network.parameters() if p.requires_grad]
        """The trainable parameters; listed now, because after a forward FSDP2 shows the root's gathered ones."""
        self._shares: Iterator[float] = repeat(1.0)
        """What the coming forwards cost, in forwards."""
        self._predicted_share: dict[TaylorSeer, float] = {}

    def velocity(self, z: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Raw network output; one autocast context per forward (a shared one may lose gradients)."""
        self.forwards += len(z) * next(self._shares)
        return self._forward(z, t, condition)

    def _forward(self, z: Tensor, t: Tensor, condition: Condition) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext():
            return self.model.velocity(z, t, condition)

    def velocities(self, zs: Sequence[Tensor], ts: Sequence[Tensor], condition: Condition) -> list[Tensor]:
        """Raw outputs of several steps of one micro-batch, in one forward of ``len(zs) * B`` samples."""
        if len(zs) == 1:
            return [self.velocity(zs[0], ts[0], condition)]
        raw = self.velocity(torch.cat(list(zs)), torch.cat(list(ts)), condition.repeat(len(zs)))
        return list(raw.chunk(len(zs)))

    @contextmanager
    def cached(self, cache: TaylorSeer | None) -> Iterator[None]:
        """One trajectory by the cached network, from its first step on; None is the network itself."""
        if cache is None:
            yield
            return
        self._measure(cache)
        with cache.trajectory(self.model.network):
            self._shares = (self._share(cache, step) for step in count())
            try:
                yield
            finally:
                self._shares = repeat(1.0)

    def forward_shares(self, cache: TaylorSeer | None, steps: int) -> list[float]:
        """What each step of a trajectory costs, in forwards: 1, or less where a cache predicts."""
        if cache is None:
            return [1.0] * steps
        self._measure(cache)
        return [self._share(cache, step) for step in range(steps)]

    def _share(self, cache: TaylorSeer, step: int) -> float:
        return 1.0 if cache.computed(step) else self._predicted_share[cache]

    @torch.no_grad()
    def _measure(self, cache: TaylorSeer) -> None:
        """FLOPs of a predicted step over those of a computed one, counted once on one sample by all ranks."""
        if cache not in self._predicted_share:
            z = torch.zeros(1, *self.model.latent_shape, device=self.device)
            t, condition = torch.full((1,), 0.5, device=self.device), self.model.encode([""])
            with cache.trajectory(self.model.network):  # the first step after the warm-up is a predicted one
                counts = [flops(partial(self._forward, z, t, condition)) for _ in range(cache.warmup + 1)]
            self._predicted_share[cache] = counts[-1] / counts[0]

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Act as ``current``, ``reference`` (before training) or a shadow, without grad except for ``current``."""
        if name == "current":
            yield
        elif name == "reference" and self.lora is not None:
            self._switch_adapters(off=True)
            try:
                with torch.no_grad():
                    yield
            finally:
                self._switch_adapters(off=False)
        else:
            with self.shadows.using(name):
                yield

    def _switch_adapters(self, off: bool) -> None:
        """Bypass or use the LoRA layers. peft's own switch also flips requires_grad, which FSDP does not survive."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self.model.network.modules():
            if isinstance(module, BaseTunerLayer):
                module._disable_adapters = off

    def need(self, name: str) -> None:
        """Make sure that ``using(name)`` will work: snapshots the present parameters where a copy is needed."""
        if name == "current" or (name == "reference" and self.lora is not None):
            return
        if name not in self.shadows.names:
            self.shadows.snapshot(name)
