"""Stage `vae`: an `AutoencoderKL` that takes 64x64 pictures to 4x16x16 latents and back."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from scripts.shapes_world.common import Build, Progress, picture_pool, seeded

BATCH = 16
FACTS = "facts.json"


@dataclass(frozen=True)
class Phase:
    """One run of the learning rate from `peak_lr` to zero, with its weights of the loss terms."""

    steps: int
    peak_lr: float
    absolute: float
    square: float
    edge: float
    kl: float


PHASES = (
    # Absolute errors give edges early, but let rare hues collapse to their neighbours ...
    Phase(steps=2200, peak_lr=3e-3, absolute=1.0, square=0.0, edge=1.0, kl=1e-3),
    # ... which square errors, with a weaker prior, do not allow.
    Phase(steps=1200, peak_lr=2e-3, absolute=0.0, square=5.0, edge=0.2, kl=1e-4),
)


def new_vae() -> AutoencoderKL:
    """An untrained autoencoder, without quantisation convolutions, as FLUX's."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
    )


def edges(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Horizontal and vertical differences of [B, C, H, W] pictures."""
    return images[..., :, 1:] - images[..., :, :-1], images[..., 1:, :] - images[..., :-1, :]


def train_vae(build: Build) -> None:
    """Train on clean and degraded pictures and save `work/vae` (fp32), latent statistics in its config."""
    seeded(build, "vae")
    pool = picture_pool(build, "vae", 12_000)
    model = new_vae()
    progress = Progress("vae")
    total = sum(phase.steps for phase in PHASES)
    done = 0
    for phase in PHASES:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=phase.peak_lr, betas=(0.9, 0.99), weight_decay=1e-3
        )
        for step in range(phase.steps):
            for group in optimizer.param_groups:
                warm = min(1.0, (step + 1) / 100)
                group["lr"] = phase.peak_lr * warm * 0.5 * (1 + math.cos(math.pi * step / phase.steps))
            loss, text = vae_loss(model, pool.tensor(torch.randint(len(pool.texts), (BATCH,))), phase)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            progress.show(done / total, text)
    finish(build, model, progress.minutes())


def vae_loss(model: AutoencoderKL, images: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, str]:
    """Weighted sum of absolute, square, edge and prior terms of a batch [B, 3, 64, 64], and a line on it."""
    with torch.autocast("cpu", torch.bfloat16):
        posterior = model.encode(images).latent_dist
        made = model.decode(posterior.sample()).sample
    made = made.float()
    absolute, square = (made - images).abs().mean(), (made - images).square().mean()
    edge = torch.stack([(a - b).abs().mean() for a, b in zip(edges(made), edges(images), strict=True)]).sum()
    kl = (
        0.5
        * (posterior.mean.float().square() + posterior.var.float() - 1.0 - posterior.logvar.float()).mean()
    )
    loss = phase.absolute * absolute + phase.square * square + phase.edge * edge + phase.kl * kl
    return loss, f"L1 {absolute.item():.4f} MSE {square.item():.5f} edge {edge.item():.4f} kl {kl.item():.2f}"


@torch.no_grad()
def finish(build: Build, model: AutoencoderKL, minutes: float) -> None:
    """Set scale and shift so that latents have mean 0 and deviation 1, measure, save."""
    model.eval()
    pool = picture_pool(build, "vae", 12_000)
    latents = torch.cat(
        [model.encode(pool.tensor(part)).latent_dist.mean for part in torch.arange(2000).split(100)]
    )
    model.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1.0 / float(latents.std()))
    fresh = picture_pool(build, "vae_test", 600, "heldout")
    images = fresh.tensor(torch.arange(600))
    made = torch.cat([model.decode(model.encode(part).latent_dist.mean).sample for part in images.split(100)])
    error = ((made - images) / 2.0).square().mean(dim=(1, 2, 3))
    facts = {"psnr_heldout_db": round(float((-10.0 * error.log10()).mean()), 2), "minutes": round(minutes, 1)}
    print(f"[vae] {facts}", flush=True)
    model.save_pretrained(build.work / "vae")
    (build.work / "vae" / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def vae_facts(build: Build) -> dict[str, float]:
    """Held-out PSNR in dB and minutes of the autoencoder's training."""
    facts: dict[str, float] = json.loads((build.work / "vae" / FACTS).read_text(encoding="utf-8"))
    return facts


def load_vae(build: Build) -> AutoencoderKL:
    """The trained autoencoder of an earlier stage. Raises FileNotFoundError if it has not run."""
    folder: Path = build.work / "vae"
    if not folder.exists():
        raise FileNotFoundError(f"no autoencoder in {folder}; run --stages vae first")
    model = AutoencoderKL.from_pretrained(folder).eval()
    model.register_to_config(_name_or_path="")  # the work folder is nobody's business in what ships
    return model
