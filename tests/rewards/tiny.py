"""Tiny shapes of the published scorers, and pictures and prompts for them."""

import torch

from jaggrl.prompts import Prompt

IMAGE_SIZE = 32
OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": IMAGE_SIZE, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def prompts_of(*texts: str) -> list[Prompt]:
    """Prompts of these texts."""
    return [Prompt(i, text) for i, text in enumerate(texts, 1)]


def pictures(count: int, height: int = 64, width: int = 64, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures (B, 3, H, W) on 8-bit levels."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (fine * 255).round() / 255
