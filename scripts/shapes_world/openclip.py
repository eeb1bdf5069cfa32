"""Stage `hpsv2`: an open_clip config, a `.pt` checkpoint with a `state_dict`, the tokenizer's merges."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch.nn import functional

from scripts.shapes_world.clip import CAPTIONS, STEPS, Features, contrastive, fit, load_quads, quality
from scripts.shapes_world.common import Build, parameters, replace_folder, seeded, write_card
from scripts.shapes_world.preference import preference_loss
from scripts.shapes_world.tokens import clip_tokenizer, write_open_clip_bpe

SCALE = 100.0
"""HPSv2's logit scale."""


def config() -> dict[str, Any]:
    """The open_clip model config: a small convolutional net, unlike the other two scorers' transformers."""
    words = len(clip_tokenizer())
    return {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": words,
            "width": 96,
            "heads": 4,
            "layers": 2,
        },
    }


def open_clip_features(model: open_clip.CLIP) -> Features:
    """The two towers, normalised."""

    def features(pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = model.encode_image(pixels), model.encode_text(ids)
        return functional.normalize(image.float(), dim=-1), functional.normalize(text.float(), dim=-1)

    return features


def all_kinds(count: int) -> torch.Tensor:
    """All four pictures of each caption, [B, 4]."""
    return torch.arange(4).repeat(count, 1)


def hps_loss(image: torch.Tensor, kinds: torch.Tensor, text: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """Clean over degraded, right over wrong within and across qualities; and contrastive."""
    score = torch.einsum("bkd,bd->bk", image, text)
    pairs = ((0, 1), (0, 2), (1, 3), (1, 2), (2, 3))
    losses = torch.stack([preference_loss(score[:, a], score[:, b], SCALE) for a, b in pairs])
    either = image[torch.arange(len(texts)), torch.randint(2, (len(texts),))]
    return losses.mean() + 0.5 * contrastive(either, text, texts, 50.0)


def train_hpsv2(build: Build) -> None:
    """Train and write `config.json`, `checkpoint.pt` and `bpe.txt.gz`."""
    merges = build.work / "bpe.txt.gz"
    write_open_clip_bpe(merges)
    tokenizer = open_clip.SimpleTokenizer(bpe_path=str(merges), context_length=77)
    data, fresh = (load_quads(build, "hpsv2", split, tokenizer) for split in ("train", "heldout"))
    seeded(build, "hpsv2")
    model = open_clip.CLIP(**config())
    features = open_clip_features(model)
    minutes = fit("hpsv2", model, features, data, all_kinds, hps_loss)
    model.eval()
    half = {
        key: value.half() if value.is_floating_point() else value for key, value in model.state_dict().items()
    }
    model.load_state_dict(half)
    measured = quality(features, fresh)
    facts = {
        "format": "open_clip config.json, checkpoint.pt (key state_dict), bpe.txt.gz; report the raw cosine",
        "trained": "HPS loss on pairs (clean over degraded, right over wrong) and contrastive on captions; "
        f"{CAPTIONS} train captions, a third of the pictures through the VAE",
        "seed": build.seed,
        "steps": STEPS,
        "minutes": round(minutes, 1),
        "parameters": parameters(model),
        **measured,
    }

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config(), indent=2) + "\n", encoding="utf-8")
        torch.save({"state_dict": half}, folder / "checkpoint.pt")
        write_open_clip_bpe(folder / "bpe.txt.gz")
        write_card(folder, "HPSv2 of the shapes world", facts)

    replace_folder(build.out / "hpsv2", write)
    print(f"[hpsv2] {measured}", flush=True)
