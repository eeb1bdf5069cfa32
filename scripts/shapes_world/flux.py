"""Stage `flux`: transformer and text encoders trained together by flow matching; a pipeline folder."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FluxPipeline
from torch.nn import functional

from scripts.shapes_world.common import (
    Build,
    Progress,
    parameters,
    picture_pool,
    replace_folder,
    seeded,
    write_card,
)
from scripts.shapes_world.flux_parts import Parts, new_parts, scheduler
from scripts.shapes_world.tokens import CLIP_LENGTH, T5_LENGTH, clip_tokenizer, t5_tokenizer
from scripts.shapes_world.vae import load_vae, vae_facts

POOL, BATCH = 48_000, 64
PEAK_LR, WARMUP, EMA = 2e-3, 200, 0.999
GUIDANCE = 3.5
"""The guidance that the transformer is told, in training and for sampling."""
PUBLISH_MINUTES = 6.0


def token_ids(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """CLIP's and T5's token ids, padded as the pipeline pads: [B, CLIP_LENGTH] and [B, T5_LENGTH]."""
    clip = clip_tokenizer()(
        texts, padding="max_length", max_length=CLIP_LENGTH, truncation=True, return_tensors="pt"
    )
    t5 = t5_tokenizer()(
        texts, padding="max_length", max_length=T5_LENGTH, truncation=True, return_tensors="pt"
    )
    return clip.input_ids, t5.input_ids


@torch.no_grad()
def packed_latents(build: Build) -> tuple[torch.Tensor, list[str]]:
    """Latents of the training pictures, packed as the pipeline packs them, [N, 64, 16]; cached."""
    path = build.work / f"latents_{POOL}_{build.seed}.pt"
    pool = picture_pool(build, "flux", POOL)
    if path.exists():
        return torch.load(path), pool.texts
    vae = load_vae(build)
    out = torch.empty(POOL, 64, 16, dtype=torch.float16)
    progress = Progress("latents")
    for part in torch.arange(POOL).split(100):
        with torch.autocast("cpu", torch.bfloat16):
            mean = vae.encode(pool.tensor(part)).latent_dist.mean.float()
        scaled = (mean - vae.config.shift_factor) * vae.config.scaling_factor
        out[part] = FluxPipeline._pack_latents(scaled, len(part), 4, 16, 16).half()
        progress.show(float(part[-1] + 1) / POOL, "")
    torch.save(out, path)
    return out, pool.texts


@dataclass(frozen=True)
class Batch:
    """Latents [B, 64, 16], noise of the same shape, times [B] in (0, 1), and token ids."""

    x0: torch.Tensor
    noise: torch.Tensor
    t: torch.Tensor
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor

    def split(self, count: int) -> list["Batch"]:
        """`count` equal parts."""
        columns = (self.x0, self.noise, self.t, self.clip_ids, self.t5_ids)
        return [Batch(*parts) for parts in zip(*(column.chunk(count) for column in columns), strict=True)]


def velocity_loss(parts: Parts, batch: Batch) -> torch.Tensor:
    """Flow matching: mean square of v_theta(x_t, t) - (eps - x0) with x_t = (1 - t) x0 + t eps."""
    mixed = torch.lerp(batch.x0, batch.noise, batch.t[:, None, None])
    with torch.autocast("cpu", torch.bfloat16):
        made = parts.transformer(
            hidden_states=mixed,
            timestep=batch.t,
            guidance=torch.full_like(batch.t, GUIDANCE),
            pooled_projections=parts.clip(batch.clip_ids).pooler_output,
            encoder_hidden_states=parts.t5(batch.t5_ids)[0],
            txt_ids=torch.zeros(batch.t5_ids.shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(1, 8, 8, torch.device("cpu"), torch.float32),
            return_dict=False,
        )[0]
    return functional.mse_loss(made.float(), batch.noise - batch.x0)


def backward(
    parts: Parts, trained: list[torch.nn.Parameter], batch: Batch, pool: ThreadPoolExecutor, workers: int
) -> float:
    """Set the gradients of a batch, one part of it per worker, and return the mean loss.

    Workers of one thread each wait for each other once per step, threads inside of operations at every
    operation: on a busy machine this is far faster. The sum has a fixed order, so results repeat.
    """

    def work(part: Batch) -> tuple[float, tuple[torch.Tensor, ...]]:
        torch.set_num_threads(1)
        loss = velocity_loss(parts, part)
        return loss.item(), torch.autograd.grad(loss, trained)

    done = list(pool.map(work, batch.split(workers)))
    for value, *gradients in zip(trained, *(gradients for _, gradients in done), strict=True):
        value.grad = sum(gradients[1:], start=gradients[0]) / workers
    return sum(loss for loss, _ in done) / workers


def optimizers(parts: Parts, workers: int) -> list[torch.optim.Optimizer]:
    """Muon for the transformer's inner matrices, dealt out to the workers, and AdamW for all else."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for module in parts.modules():
        for name, value in module.named_parameters():
            inner = value.ndim == 2 and "transformer_blocks" in name
            (matrices if inner else others).append(value)
    matrices.sort(key=lambda value: -value.numel())
    muons = [
        torch.optim.Muon(matrices[i::workers], lr=PEAK_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for i in range(workers)
    ]
    return [*muons, torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)]


def apply(optimizer: torch.optim.Optimizer) -> None:
    """One step of one optimizer, in a worker's thread."""
    torch.set_num_threads(1)
    optimizer.step()


def rate(step: int, done: float) -> float:
    """Learning rate: linear warm-up, flat for 40 % of the training, cosine to zero; `done` in [0, 1]."""
    decay = 1.0 if done < 0.4 else 0.5 * (1 + math.cos(math.pi * (done - 0.4) / 0.6))
    return PEAK_LR * min(1.0, (step + 1) / WARMUP) * decay


def draw_batch(latents: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> Batch:
    """A random batch with logit-normal times."""
    index = torch.randint(len(latents), (BATCH,))
    x0 = latents[index].float()
    t = torch.sigmoid(0.2 + 1.2 * torch.randn(BATCH))
    return Batch(x0, torch.randn_like(x0), t, clip_ids[index], t5_ids[index])


def train_flux(build: Build) -> None:
    """Train all parts together; publish the moving average every few minutes and at the end."""
    latents, texts = packed_latents(build)
    clip_ids, t5_ids = token_ids(texts)
    seeded(build, "flux")
    parts = new_parts()
    average = copy.deepcopy(parts)
    print(
        f"[flux] parameters: transformer {parameters(parts.transformer)}, "
        f"text {parameters(parts.clip, parts.t5)}"
    )
    workers = build.threads
    optims = optimizers(parts, workers)
    pool = ThreadPoolExecutor(workers)
    trained = [p for module in parts.modules() for p in module.parameters()]
    averaged: list[torch.Tensor] = [p for module in average.modules() for p in module.parameters()]
    progress, smooth, published = Progress("flux"), 1.0, 0.0
    step, done = 0, 0.0
    while done < 1.0:
        batch = draw_batch(latents, clip_ids, t5_ids)
        loss = backward(parts, trained, batch, pool, workers)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optims:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, done)
        list(pool.map(apply, optims))
        with torch.no_grad():
            torch._foreach_lerp_(
                averaged, list[torch.Tensor](trained), 1.0 - min(EMA, (1 + step) / (10 + step))
            )
        smooth += (loss - smooth) / min(step + 1, 200)
        step += 1
        # A slow machine does fewer steps, but still ends its schedule within the time.
        done = max(step / build.flux_steps, progress.minutes() / build.flux_minutes)
        progress.show(min(done, 1.0), f"step {step} loss {smooth:.4f}")
        if progress.minutes() - published > PUBLISH_MINUTES:
            published = progress.minutes()
            publish(build, average, step, published, smooth)
    publish(build, average, step, progress.minutes(), smooth)


def publish(build: Build, average: Parts, step: int, minutes: float, loss: float) -> None:
    """Write the pipeline folder in half precision, in the place of an earlier one."""
    pipeline = FluxPipeline(
        scheduler=scheduler(),
        vae=copy.deepcopy(load_vae(build)),
        text_encoder=copy.deepcopy(average.clip),
        tokenizer=clip_tokenizer(),
        text_encoder_2=copy.deepcopy(average.t5),
        tokenizer_2=t5_tokenizer(),
        transformer=copy.deepcopy(average.transformer),
    )
    # The text encoders stay in fp32: transformers loads the dtype of the file, diffusers always fp32.
    pipeline.transformer.half()
    pipeline.vae.half()
    facts = {
        "format": "diffusers FluxPipeline folder; max_sequence_length=20, guidance_scale=3.5, 64x64 pictures",
        "trained": f"flow matching, {POOL} pictures of the train split, half degraded; batch {BATCH}, EMA",
        "seed": build.seed,
        "steps": step,
        "minutes": round(minutes, 1),
        "loss": round(loss, 4),
        "parameters": {
            "transformer": parameters(average.transformer),
            "text_encoder": parameters(average.clip),
            "text_encoder_2": parameters(average.t5),
            "vae": parameters(pipeline.vae),
        },
        "vae_training": vae_facts(build),
    }

    def write(folder: Path) -> None:
        pipeline.save_pretrained(folder)
        write_card(folder, "FLUX of the shapes world", facts)

    replace_folder(build.out / "flux", write)
    print(f"[flux] published step {step}", flush=True)
