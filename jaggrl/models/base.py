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
from torch.distributed.fsdp import FSDPModule

from jaggrl.errors import UserError
from jaggrl.trajectory import Condition

CACHE_BYTES = 1 << 30  # of encoded prompts on the device; one of FLUX.1-dev's takes 8 MB


class Model(ABC):
    """A frozen pipeline around one trainable network."""

    location: str
    """The pipeline folder or hub id, as diffusers takes it."""
    latent_shape: tuple[int, ...]
    network: Any
    """The trainable network (a diffusers transformer or UNet)."""
    pipeline: Any
    """The diffusers pipeline that owns the network."""

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

    @property
    def truncated(self) -> set[str]:
        """Encoded texts that were longer than a text encoder reads (counted for the log)."""
        found: set[str] = self.__dict__.setdefault("_truncated", set())
        return found

    def options(self) -> dict[str, Any]:
        """What else than the weights decides over the pictures, as JSON holds it: evaluations are compared by it."""
        return {}

    def text_encoders(self) -> list[nn.Module]:
        """The pipeline's text encoders."""
        parts = self.pipeline.components.items()
        return [m for name, m in parts if name.startswith("text_encoder") and isinstance(m, nn.Module)]

    def frozen_modules(self) -> list[nn.Module]:
        """Everything of the pipeline that stays frozen (text encoders, VAE)."""
        parts = self.pipeline.components.values()
        return [m for m in parts if isinstance(m, nn.Module) and m is not self.network]

    def encode(self, texts: Sequence[str]) -> Condition:
        """``encode_texts`` with a cache, of one text at a time: a text's condition depends on nothing else."""
        cache: dict[str, Condition] = self.__dict__.setdefault("_cache", {})
        asked = {t: cache[t] if t in cache else self._encode_alone(t) for t in dict.fromkeys(texts)}
        cache.update(asked)
        held = sum(x.nbytes for condition in cache.values() for x in condition.tensors.values())
        while held > CACHE_BYTES:
            oldest = cache.pop(next(iter(cache)))
            held -= sum(x.nbytes for x in oldest.tensors.values())
        return Condition.cat([asked[t] for t in texts])

    @torch.no_grad()
    def _encode_alone(self, text: str) -> Condition:
        return self.encode_texts([text])

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
            bare = unsharded(self.network, state)
            bare.save_pretrained(folder / "transformer")
            return [
                f"transformer = {type(bare).__name__}.from_pretrained('{folder / 'transformer'}')",
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
        try:
            if (folder / "transformer").is_dir():
                trained = type(network).from_pretrained(folder / "transformer")
                network.load_state_dict(trained.state_dict())
            elif (folder / "pytorch_lora_weights.safetensors").is_file():
                self.pipeline.load_lora_weights(folder)
                if not getattr(network, "peft_config", None):  # diffusers only warns
                    raise ValueError("no key of the LoRA belongs to the network")
            else:
                raise ValueError("neither transformer/ nor pytorch_lora_weights.safetensors is in it")
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"weights={folder} cannot be loaded into model.path={self.location}: {first}; "
                "give an export and the model that it was trained from"
            ) from error


def unsharded(network: Any, state: dict[str, Tensor]) -> Any:
    """A diffusers network of the same config around ``state``, which it shares.

    Under FSDP2 the network's own tensors are shards and its class is another one, which diffusers would write down.
    """
    plain: Any = next(c for c in type(network).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        bare = plain.from_config(network.config)
    bare.load_state_dict(state, assign=True)
    return bare
