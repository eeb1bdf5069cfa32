"""What the scorers learn from: four pictures per caption, right or wrong, clean or degraded."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from jaggrl.shapes.captions import captions, split_specs
from jaggrl.shapes.render import QUALITIES, draw
from jaggrl.shapes.scene import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    INVERSE,
    SHAPES,
    SIZE,
    Spec,
    Thing,
    sample_scene,
)
from scripts.shapes_world.common import Build, Progress, seeded
from scripts.shapes_world.vae import load_vae

KINDS = ("right clean", "right degraded", "wrong clean", "wrong degraded")
MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073)).view(1, 3, 1, 1)
STD = torch.tensor((0.26862954, 0.26130258, 0.27577711)).view(1, 3, 1, 1)
"""CLIP's own normalisation, which the loaders of all three formats use."""


@dataclass(frozen=True)
class Quads:
    """Per caption its four pictures in the order of `KINDS`: [N, 4, SIZE, SIZE, 3] uint8."""

    images: NDArray[np.uint8]
    texts: list[str]

    def pixels(self, index: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Normalised pictures [B, K, 3, SIZE, SIZE] of captions `index` [B] and of `kinds` [B, K]."""
        chosen = self.images[index.numpy()[:, None], kinds.numpy()]
        batch = torch.from_numpy(chosen).permute(0, 1, 4, 2, 3).float() / 255.0
        return (batch - MEAN) / STD


def mistaken(spec: Spec, rng: np.random.Generator) -> Spec:
    """A spec like this one but for one part: background, a shape, a colour, the count or the relation."""
    kinds = ["background", "shape"] + ["colour"] * (2 if spec.things[0].colour else 0)
    kinds += ["count"] * (3 if spec.category == "counting" else 0) + ["relation"] * (
        3 if spec.relation else 0
    )
    kind = kinds[rng.integers(len(kinds))]
    if kind == "background":
        return replace(spec, background=_other(spec.background, list(BACKGROUNDS), rng))
    if kind == "relation" and spec.relation:
        return replace(spec, relation=INVERSE[spec.relation])
    if kind == "count":
        return replace(spec, things=spec.things[:1] * int(_other(str(len(spec.things)), list("1234"), rng)))
    things = list(spec.things)
    chosen = range(len(things)) if spec.category == "counting" else [int(rng.integers(len(things)))]
    old = things[chosen[0]]
    if kind == "shape":
        new = Thing(_other(old.shape, list(SHAPES), rng), old.colour)
    else:
        new = Thing(old.shape, _other(str(old.colour), list(COLOURS), rng))
    for number in chosen:
        things[number] = new
    return replace(spec, things=tuple(things))


def quads(build: Build, name: str, count: int, split: str) -> Quads:
    """Draw `count` captions of a split with their four pictures; every third four go through the VAE."""
    path = build.work / f"quads_{name}_{split}_{count}_{build.seed}.npz"
    if path.exists():
        stored = np.load(path)
        return Quads(stored["images"], [str(text) for text in stored["texts"]])
    rng = seeded(build, f"quads/{name}/{split}")
    by_category = split_specs(split)
    images = np.empty((count, 4, SIZE, SIZE, 3), np.uint8)
    texts = []
    for i in range(count):
        found = by_category[CATEGORIES[i % len(CATEGORIES)]]
        spec = found[rng.integers(len(found))]
        scenes = sample_scene(spec, rng), sample_scene(mistaken(spec, rng), rng)
        for kind in range(4):
            images[i, kind] = np.round(255.0 * draw(scenes[kind // 2], QUALITIES[kind % 2], rng))
        texts.append(str(rng.choice(captions(spec))))
    _through_vae(build, images[::3])
    np.savez(path, images=images, texts=np.asarray(texts))
    return Quads(images, texts)


def preference_loss(better: torch.Tensor, worse: torch.Tensor, scale: float) -> torch.Tensor:
    """HPS's loss: softmax over the two pictures' scale * cosine, [B] each, all mass on the better."""
    return functional.softplus(scale * (worse - better)).mean()


def accuracy(scores: torch.Tensor) -> dict[str, float]:
    """Pair accuracies of scores [N, 4] in the order of `KINDS`."""
    pairs = {
        "clean_over_degraded": (scores[:, 0] > scores[:, 1]).float(),
        "right_over_wrong_clean": (scores[:, 0] > scores[:, 2]).float(),
        "right_over_wrong_degraded": (scores[:, 1] > scores[:, 3]).float(),
        "right_degraded_over_wrong_clean": (scores[:, 1] > scores[:, 2]).float(),
    }
    return {name: round(float(hits.mean()), 4) for name, hits in pairs.items()}


@torch.no_grad()
def _through_vae(build: Build, images: NDArray[np.uint8]) -> None:
    """Replace pictures [N, 4, SIZE, SIZE, 3] by what the VAE makes of them, as the generator's will be."""
    vae = load_vae(build)
    progress = Progress("vae round trip")
    for i in range(0, len(images), 16):
        batch = (
            torch.from_numpy(images[i : i + 16].reshape(-1, SIZE, SIZE, 3)).permute(0, 3, 1, 2).float()
            / 127.5
            - 1
        )
        with torch.autocast("cpu", torch.bfloat16):
            made = vae.decode(vae.encode(batch).latent_dist.mean).sample.float()
        made = ((made.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        images[i : i + 16] = made.reshape(-1, 4, SIZE, SIZE, 3)
        progress.show(min(1.0, (i + 16) / len(images)), "")


def _other(value: str, names: list[str], rng: np.random.Generator) -> str:
    left = [name for name in names if name != value]
    return left[rng.integers(len(left))]
