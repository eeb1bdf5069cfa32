"""A FLUX pipeline folder with a few thousand trainable parameters: the shipped one around a tiny random transformer."""

import hashlib
import os
import tempfile
from pathlib import Path

import torch

from jaggrl.models.flux import Flux
from jaggrl.paths import resolve_path

SHIPPED = "package://jaggrl/shapes/weights/flux"
HEADS, HEAD_DIM = 2, 12


def tiny_flux_folder() -> Path:
    """The folder, made once per machine (atomically: several processes may ask at once)."""
    shipped = resolve_path(SHIPPED)
    stamp = hashlib.sha256(
        (shipped / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    ).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"jaggrl-tests-{os.getuid()}" / f"tiny-flux-{stamp}"
    if (folder / "model_index.json").is_file():
        return folder
    from diffusers import FluxPipeline, FluxTransformer2DModel

    pipeline = FluxPipeline.from_pretrained(shipped).to(torch.float32)
    config = dict(pipeline.transformer.config)
    config |= {
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "axes_dims_rope": (4, 4, 4),
    }
    torch.manual_seed(0)
    pipeline.transformer = FluxTransformer2DModel.from_config(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pipeline.save_pretrained(Path(temporary) / "new")
        try:
            os.replace(Path(temporary) / "new", folder)
        except OSError:  # another process was first
            assert (folder / "model_index.json").is_file()
    return folder


def tiny_flux() -> Flux:
    """The adapter on the tiny folder, at 64 pixels."""
    return Flux(str(tiny_flux_folder()), resolution=64, max_sequence_length=20)
