"""FLUX.1 through ``diffusers.FluxPipeline``: FLUX.1-dev and the shapes world's FLUX are two paths of this adapter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn

from jaggrl.errors import UserError
from jaggrl.models.base import Model
from jaggrl.models.loading import load_pipeline, locate_pipeline
from jaggrl.trajectory import Condition


class Flux(Model):
    """FLUX: 2x2-packed latents, embedded guidance (no second branch), CLIP pooled and T5 token conditions."""

    def __init__(
        self,
        path: str,
        resolution: int = 1024,
        guidance: float = 3.5,
        max_sequence_length: int = 512,
    ) -> None:
        """Load the pipeline folder (or cached hub id) ``path``.

        Args:
            path: a folder that ``FluxPipeline.from_pretrained`` loads, ``package://`` included, or a cached hub id.
            resolution: picture height and width in pixels.
            guidance: FLUX's embedded guidance, the same in rollout, training and evaluation.
            max_sequence_length: T5 tokens; the pipeline pads to it, so give what the weights were trained at.
        """
        self.pipeline = load_pipeline(FluxPipeline, path)
        self.location = locate_pipeline(path)
        self.network = self.pipeline.transformer
        side = resolution // self.pipeline.vae_scale_factor
        if side < 2 or resolution % (2 * self.pipeline.vae_scale_factor):
            step = 2 * self.pipeline.vae_scale_factor
            raise UserError(
                f"model.resolution={resolution} is not a multiple of {step}; use {max(step, resolution // step * step)}"
            )
        self.latent_shape = (self.network.config.in_channels // 4, side, side)
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        self._ids: Tensor | None = None

    def encode_texts(self, texts: Sequence[str]) -> Condition:
        """T5 states (B, L, E) and CLIP pooled (B, E'), padded as the pipeline pads."""
        self.truncated.update(t for t in texts if self._too_long(t))
        states, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(texts), prompt_2=None, max_sequence_length=self.max_sequence_length
        )
        return Condition({"states": states.float(), "pooled": pooled.float()})

    def _too_long(self, text: str) -> bool:
        """Whether either text encoder cuts the text."""
        clip = len(self.pipeline.tokenizer(text).input_ids) > self.pipeline.tokenizer_max_length
        return clip or len(self.pipeline.tokenizer_2(text).input_ids) > self.max_sequence_length

    def velocity(self, z: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """``v = eps - x0`` as FLUX predicts it; t in [0, 1] goes in unscaled (the network multiplies by 1000)."""
        batch, channels, height, width = z.shape
        guidance = None
        if self.network.config.guidance_embeds:
            guidance = torch.full((batch,), self.guidance, device=z.device)
        states = condition.tensors["states"]
        packed = self.network(
            hidden_states=self.pipeline._pack_latents(z, batch, channels, height, width),
            timestep=t,
            guidance=guidance,
            pooled_projections=condition.tensors["pooled"],
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3, device=z.device),
            img_ids=self._image_ids(z),
            return_dict=False,
        )[0]
        scale = self.pipeline.vae_scale_factor
        return self.pipeline._unpack_latents(packed, height * scale, width * scale, scale)

    def _image_ids(self, z: Tensor) -> Tensor:
        """Positions of the packed tokens, made once."""
        if self._ids is None or self._ids.device != z.device:
            _, _, height, width = z.shape
            self._ids = self.pipeline._prepare_latent_image_ids(
                1, height // 2, width // 2, z.device, torch.float32
            )
        return self._ids

    @torch.no_grad()
    def decode(self, x0: Tensor) -> Tensor:
        """``vae.decode(x0 / scaling_factor + shift_factor)`` to [0, 1]."""
        vae = self.pipeline.vae
        latents = x0.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(latents, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def sigmas(self, steps: int) -> Tensor:
        """``linspace(1, 1/N, N)`` through the scheduler's resolution-dependent shift, then 0, as FluxPipeline does."""
        scheduler = self.pipeline.scheduler
        config = scheduler.config
        tokens = self.latent_shape[1] * self.latent_shape[2] // 4
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return scheduler.sigmas.float().cpu().clone()

    def options(self) -> dict[str, Any]:
        """Size, guidance and length of the text."""
        shape, length = list(self.latent_shape), self.max_sequence_length
        return {"latent_shape": shape, "guidance": self.guidance, "max_sequence_length": length}

    def blocks(self) -> list[nn.Module]:
        """Double-stream blocks, then single-stream blocks."""
        return [*self.network.transformer_blocks, *self.network.single_transformer_blocks]

    def lora_targets(self) -> list[str]:
        """Attention projections of the picture stream, as DanceGRPO and flow_grpo adapt FLUX."""
        return ["to_k", "to_q", "to_v", "to_out.0"]
