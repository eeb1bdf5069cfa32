"""The modules of the shapes world's FLUX, untrained: sizes, vocabularies and the scheduler."""

from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from scripts.shapes_world.tokens import CLIP_LENGTH, clip_tokenizer, t5_tokenizer


@dataclass
class Parts:
    """The trained parts of the pipeline."""

    transformer: FluxTransformer2DModel
    clip: CLIPTextModel
    t5: T5EncoderModel

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The three modules."""
        return self.transformer, self.clip, self.t5


def new_parts() -> Parts:
    """Untrained modules; modulations and output start at zero, so every block starts as the identity."""
    clip_vocabulary = clip_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=5,
        joint_attention_dim=96,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and (
            ".linear" in name and "norm" in name or name == "proj_out"
        ):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            projection_dim=64,
            bos_token_id=clip_vocabulary.bos_token_id,
            eos_token_id=clip_vocabulary.eos_token_id,
            pad_token_id=clip_vocabulary.pad_token_id,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer()),
            d_model=96,
            d_kv=24,
            d_ff=192,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    return Parts(transformer, clip, t5)


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's scheduler."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        shift=3.0,
    )
