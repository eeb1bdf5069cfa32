"""What a model adapter is: packing, calling, unpacking, decoding. Sign and time conversions happen here only.

Conventions towards the framework: rectified flow with ``v ~ eps - x0``, network time in [0, 1] (1 = noise), latents
fp32 of shape (B, *latent_shape), pictures (B, 3, H, W) in [0, 1]. No loop, loss, device or LoRA policy in here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jaggrl.errors import UserError
from jaggrl.trajectory import Condition


class Model(ABC):
    """A frozen pipeline around one trainable network."""

    location: str
    """The pipeline folder or hub id, as diffusers takes it."""
    latent_shape: tuple[int, ...]
    network: nn.Module
    """The trainable network (a diffusers transformer or UNet)."""
    pipeline: Any
    """The diffusers pipeline that owns the network."""
    truncated_prompts: int = 0
    """How many encoded texts were longer than a text encoder reads (counted for the log)."""

    @abstractmethod
    def encode_texts(self, texts: Sequence[str]) -> Condition:
        """Text -> network conditions, without grad."""

    @abstractmethod
    def velocity(self, z: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Raw network output for latents (B, ...) at network times (B,).

        With guidance branches the output stacks them on a second axis; ``guide`` combines them.
        """

    def guide(self, raw: Tensor) -> Tensor:
        """Combine the guidance branches of a raw output into v; the identity for embedded guidance."""
        return raw

    @abstractmethod
    def decode(self, x0: Tensor) -> Tensor:
        """Clean latents -> pictures in [0, 1], fp32, without grad."""

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """The steps + 1 noise levels of the pipeline's own scheduler, as the pipeline itself would set them."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order of execution: units of sharding and of activation checkpointing."""

    @abstractmethod
    def lora_targets(self) -> list[str]:
        """Names of the linear layers that LoRA adapts by default."""

    def frozen_modules(self) -> list[nn.Module]:
        """Everything of the pipeline that stays frozen (text encoders, VAE)."""
        parts = self.pipeline.components.values()
        return [m for m in parts if isinstance(m, nn.Module) and m is not self.network]

    def encode(self, texts: Sequence[str]) -> Condition:
        """``encode_texts`` with a cache: the encoders are frozen, so that a text is encoded once per run."""
        cache: dict[str, Condition] = self.__dict__.setdefault("_cache", {})
        missing = [t for t in dict.fromkeys(texts) if t not in cache]
        if missing:
            with torch.no_grad():
                encoded = self.encode_texts(missing)
            cache.update({t: encoded.rows(slice(i, i + 1)) for i, t in enumerate(missing)})
        return Condition.cat([cache[t] for t in texts])

    def export(
        self, folder: Path, state: dict[str, Tensor], lora_metadata: dict[str, Any] | None
    ) -> list[str]:
        """Write what diffusers loads and return the lines of Python that load it.

        Args:
            folder: where to write.
            state: the whole network's state dict (full), or the adapter's (LoRA), gathered on this process.
            lora_metadata: the adapter's LoraConfig as a dict, or None for full fine-tuning.
        """
        pipe = type(self.pipeline)
        if lora_metadata is None:
            self.network.save_pretrained(folder / "transformer", state_dict=state)  # type: ignore[operator]
            return [
                f"transformer = {type(self.network).__name__}.from_pretrained('{folder / 'transformer'}')",
                f"pipe = {pipe.__name__}.from_pretrained('{self.location}', transformer=transformer)",
            ]
        pipe.save_lora_weights(
            folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=lora_metadata
        )
        return [
            f"pipe = {pipe.__name__}.from_pretrained('{self.location}')",
            f"pipe.load_lora_weights('{folder}')",
        ]

    def load_export(self, folder: Path) -> None:
        """Load what ``export`` wrote: a ``transformer`` folder or LoRA weights. A folder with neither is refused."""
        network: Any = self.network
        if (folder / "transformer").is_dir():
            trained = type(network).from_pretrained(folder / "transformer")
            network.load_state_dict(trained.state_dict())
        elif (folder / "pytorch_lora_weights.safetensors").is_file():
            self.pipeline.load_lora_weights(folder)
        else:
            raise UserError(
                f"weights={folder} holds neither transformer/ nor pytorch_lora_weights.safetensors"
            )
