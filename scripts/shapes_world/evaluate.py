"""Stage `evaluate`: what the verifier says of the pipeline's pictures; grids to look at."""

import json
from collections import Counter
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from numpy.typing import NDArray
from PIL import Image as PilImage

from jaggrl.shapes.captions import parse, read_prompts
from jaggrl.shapes.render import render
from jaggrl.shapes.scene import CATEGORIES, SHAPES, SQUARE_SCALE, TRIANGLE_SCALE, Object, Scene
from jaggrl.shapes.verifier import Reading, read, verify
from scripts.shapes_world.common import Build, Progress, picture_pool, write_card
from scripts.shapes_world.flux import GUIDANCE
from scripts.shapes_world.tokens import T5_LENGTH
from scripts.shapes_world.vae import load_vae

STEPS = 20
CLEAN_ERROR = 0.03
"""Largest mean absolute distance to the clean rendering of what a picture shows for it to count as clean."""
Pictures = NDArray[np.uint8]


def distance_to_clean(picture: Pictures) -> float:
    """Mean absolute distance of a picture, [64, 64, 3] uint8, to the clean rendering of what it shows.

    Infinity if a part cannot be read. Blur, dimness and grain raise it; mistakes do not.
    """
    reading: Reading = read(picture)
    if reading.background is None or any(found.shape is None for found in reading.objects):
        return float("inf")
    unit = {
        "circle": np.pi,
        "square": 4 * SQUARE_SCALE**2,
        "triangle": 0.75 * np.sqrt(3.0) * TRIANGLE_SCALE**2,
    }
    objects = [
        Object(found.shape, found.colour, found.x, found.y, float(np.sqrt(found.area / unit[found.shape])))
        for found in reading.objects
        if found.shape in SHAPES
    ]
    ideal = render(Scene(tuple(objects), reading.background))
    return float(np.abs(ideal - picture / 255.0).mean())


def sample(pipeline: FluxPipeline, texts: list[str], seed: int, steps: int = STEPS) -> Pictures:
    """Pictures of some captions by the plain pipeline, [N, 64, 64, 3] uint8, each from its own seed."""
    generators = [torch.Generator().manual_seed(seed * 100_000 + i) for i in range(len(texts))]
    made = pipeline(
        texts,
        height=64,
        width=64,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        max_sequence_length=T5_LENGTH,
        generator=generators,
        output_type="np",
    ).images
    return np.asarray(np.round(255.0 * made), np.uint8)


def judge(pictures: Pictures, texts: list[str]) -> dict[str, Any]:
    """Pass rates over all captions and per category, share of clean ones, and which parts fail how often."""
    verdicts = [verify(picture, parse(text)) for picture, text in zip(pictures, texts, strict=True)]
    kinds = [parse(text).category for text in texts]
    passed = np.array([verdict.all_hold for verdict in verdicts])
    clean = np.array([distance_to_clean(picture) < CLEAN_ERROR for picture in pictures])
    failing = Counter(
        name.split()[0] for verdict in verdicts for name in {m.split()[0] for m in verdict.mistakes}
    )
    return {
        "n": len(texts),
        "all_hold": round(float(passed.mean()), 4),
        "fraction": round(float(np.mean([verdict.fraction for verdict in verdicts])), 4),
        "by_category": {
            c: round(float(passed[[k == c for k in kinds]].mean()), 4) for c in CATEGORIES if c in kinds
        },
        "clean_share": round(float(clean.mean()), 4),
        "all_hold_of_clean": round(float(passed[clean].mean()), 4) if clean.any() else None,
        "all_hold_of_degraded": round(float(passed[~clean].mean()), 4) if (~clean).any() else None,
        "pictures_failing_by_part": {name: round(n / len(texts), 4) for name, n in failing.most_common()},
    }


@torch.no_grad()
def autoencoder_limit(build: Build) -> dict[str, Any]:
    """The same for held-out renderings that only went through the autoencoder: the ceiling."""
    vae = load_vae(build)
    pool = picture_pool(build, "vae_test", 600, "heldout")
    made = torch.cat(
        [vae.decode(vae.encode(pool.tensor(p)).latent_dist.mean).sample for p in torch.arange(600).split(100)]
    )
    pictures = ((made.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    degraded = (np.arange(600) // len(CATEGORIES)) % 2 == 1
    out = {}
    for name, chosen in (("clean", ~degraded), ("degraded", degraded)):
        texts = [text for text, keep in zip(pool.texts, chosen, strict=True) if keep]
        out[name] = judge(pictures[chosen], texts)
    return out


def grid(pictures: Pictures, columns: int, zoom: int = 2) -> PilImage.Image:
    """Pictures in rows of `columns`, enlarged without smoothing."""
    rows = [np.concatenate(list(pictures[i : i + columns]), axis=1) for i in range(0, len(pictures), columns)]
    image = PilImage.fromarray(np.concatenate([row for row in rows if row.shape == rows[0].shape], axis=0))
    return image.resize((image.width * zoom, image.height * zoom), PilImage.Resampling.NEAREST)


def evaluate(build: Build) -> None:
    """Sample both prompt files with the plain pipeline, judge, write figures into the card, and two grids."""
    folder = build.out / "flux"
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    figures: dict[str, Any] = {"steps": STEPS}
    for split in ("heldout", "train"):
        texts = read_prompts(split)[:252]
        progress = Progress(f"sample {split}")
        pictures = []
        for i in range(0, len(texts), 42):
            pictures.append(sample(pipeline, texts[i : i + 42], seed=i))
            progress.show(min(1.0, (i + 42) / len(texts)), "")
        figures[split] = judge(np.concatenate(pictures), texts)
        grid(np.concatenate(pictures)[:96], 12).save(build.work / f"grid_{split}.png")
        print(f"[evaluate] {split}: {json.dumps(figures[split])}", flush=True)
    figures["autoencoder_only"] = autoencoder_limit(build)
    print(f"[evaluate] autoencoder: {json.dumps(figures['autoencoder_only'])}", flush=True)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    title = card.pop("title")
    del card["sha256"]
    write_card(folder, title, {**card, "verifier": figures})
