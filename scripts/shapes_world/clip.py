"""Stages `clipscore` and `pickscore`: transformers `CLIPModel` folders with their `CLIPProcessor`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from jaggrl.shapes.captions import parse
from scripts.shapes_world.common import Build, Progress, parameters, replace_folder, seeded, write_card
from scripts.shapes_world.preference import KINDS, Quads, accuracy, preference_loss, quads
from scripts.shapes_world.tokens import clip_tokenizer

CAPTIONS, TESTED, BATCH = 6_000, 1_200, 48
STEPS, PEAK_LR = 1500, 1e-3


@dataclass(frozen=True)
class TokenQuads:
    """Quads with the token ids of their captions, [N, T]."""

    quads: Quads
    ids: torch.Tensor


Features = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Pictures [B, 3, H, W] and token ids [B, T] to normalised features of both, [B, D] each."""
Choose = Callable[[int], torch.Tensor]
"""Batch size to the kinds of the pictures that each caption gets in a step, [B, K] indices into `KINDS`."""
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[str]], torch.Tensor]
"""Picture features [B, K, D], their kinds [B, K], caption features [B, D] and captions to a loss."""


Tokenize = Callable[[list[str]], torch.Tensor]
"""Captions to token ids [N, T]."""


def load_quads(
    build: Build, name: str, split: str, tokenize: Callable[[list[str]], torch.Tensor]
) -> TokenQuads:
    """A scorer's own pictures of a split, with token ids by its tokenizer."""
    found = quads(build, name, CAPTIONS if split == "train" else TESTED, split)
    return TokenQuads(found, tokenize(found.texts))


def new_clip(width: int, layers: int, patch: int) -> CLIPModel:
    """An untrained CLIP for 64x64 pictures with the small vocabulary; context 77, as the published ones."""
    tokenizer = clip_tokenizer()
    heads = width // 32
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 77,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": 64,
        "patch_size": patch,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def clip_features(model: CLIPModel) -> Features:
    """The two towers of a transformers CLIP, normalised."""

    def features(pixels: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        text = model.text_projection(model.text_model(input_ids=ids).pooler_output)
        return functional.normalize(image.float(), dim=-1), functional.normalize(text.float(), dim=-1)

    return features


def same_meaning(texts: list[str]) -> torch.Tensor:
    """Which captions of a batch mean the same, [B, B]: they are no negatives of each other."""
    meanings = [parse(text) for text in texts]
    return torch.tensor([[a == b for b in meanings] for a in meanings])


def contrastive(image: torch.Tensor, text: torch.Tensor, texts: list[str], scale: float) -> torch.Tensor:
    """CLIP's symmetric cross-entropy over a batch, [B, D] each; equal meanings are masked out."""
    logits = scale * image @ text.T
    logits = logits.masked_fill(same_meaning(texts) & ~torch.eye(len(texts), dtype=torch.bool), -1e4)
    target = torch.arange(len(texts))
    return 0.5 * (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target))


def fit(
    name: str, model: nn.Module, features: Features, data: TokenQuads, choose: Choose, loss_of: Loss
) -> float:
    """Train a scorer by AdamW on captions with some of their four pictures; returns the minutes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.05)
    progress, smooth = Progress(name), 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        index, kinds = torch.randint(len(data.ids), (BATCH,)), choose(BATCH)
        with torch.autocast("cpu", torch.bfloat16):
            image, text = features(data.quads.pixels(index, kinds).flatten(0, 1), data.ids[index])
        texts = [data.quads.texts[i] for i in index.tolist()]
        loss = loss_of(image.unflatten(0, kinds.shape), kinds, text, texts)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth += (loss.item() - smooth) / min(step + 1, 100)
        progress.show((step + 1) / STEPS, f"loss {smooth:.4f}")
    return progress.minutes()


@torch.no_grad()
def quality(features: Features, data: TokenQuads) -> dict[str, object]:
    """Held-out figures: pair accuracies, mean cosine per kind, retrieval of the caption among 32."""
    images, texts, count = [], [], len(data.ids)
    for part in torch.arange(count).split(32):
        kinds = torch.arange(4).expand(len(part), 4)
        image, text = features(data.quads.pixels(part, kinds).flatten(0, 1), data.ids[part])
        images.append(image.unflatten(0, kinds.shape))
        texts.append(text)
    image, text = torch.cat(images), torch.cat(texts)
    cosine = torch.einsum("nkd,nd->nk", image, text)
    hits = []
    for part in torch.arange(count).split(32):
        same = same_meaning([data.quads.texts[i] for i in part.tolist()])
        best = (image[part, 0] @ text[part].T).argmax(dim=1)
        hits.append(same[torch.arange(len(part)), best].float())
    means = [round(float(value), 4) for value in cosine.mean(dim=0)]
    return {
        "heldout_pair_accuracy": accuracy(cosine),
        "heldout_mean_cosine": dict(zip(KINDS, means, strict=True)),
        "heldout_retrieval_1_of_32": round(float(torch.cat(hits).mean()), 4),
    }


def token_ids(texts: list[str]) -> torch.Tensor:
    """Token ids [N, longest], padded with the end token, which the text tower cannot see."""
    ids: torch.Tensor = clip_tokenizer()(texts, padding=True, return_tensors="pt").input_ids
    return ids


def train_clipscore(build: Build) -> None:
    """CLIPScore form: contrastive on captions over pictures of any quality, wrong ones as negatives."""

    def choose(count: int) -> torch.Tensor:
        # A right and a wrong picture, each clean or degraded by chance, so that quality says nothing.
        return torch.stack([torch.randint(2, (count,)), 2 + torch.randint(2, (count,))], dim=1)

    def loss(image: torch.Tensor, kinds: torch.Tensor, text: torch.Tensor, texts: list[str]) -> torch.Tensor:
        score = torch.einsum("bkd,bd->bk", image, text)
        return contrastive(image[:, 0], text, texts, 30.0) + preference_loss(score[:, 0], score[:, 1], 30.0)

    model, about = partial(new_clip, 96, 3, 8), "contrastive on captions, blind to quality"
    _train(build, "clipscore", model, choose, loss, 30.0, about)


def train_pickscore(build: Build) -> None:
    """PickScore form: preference pairs of a mix of its own with soft labels, at scale 100."""

    def choose(count: int) -> torch.Tensor:
        # A right picture, and any that is worse.
        first = torch.randint(2, (count,))
        return torch.stack([first, first + 1 + (torch.rand(count) * (3 - first)).long()], dim=1)

    def loss(image: torch.Tensor, kinds: torch.Tensor, text: torch.Tensor, texts: list[str]) -> torch.Tensor:
        score = torch.einsum("bkd,bd->bk", image, text)
        # A mistake costs more than a degradation. People disagree on close pairs, so the labels are soft.
        utility = torch.tensor([1.5, 1.0, 0.5, 0.0])[kinds]
        target = torch.sigmoid(4.0 * (utility[:, 0] - utility[:, 1]))
        pairs = functional.binary_cross_entropy_with_logits(100.0 * (score[:, 0] - score[:, 1]), target)
        return pairs + 0.5 * contrastive(image[:, 0], text, texts, 50.0)

    model = partial(new_clip, 128, 2, 8)
    about = "pairs with soft labels (clean over degraded, right over wrong) and contrastive on captions"
    _train(build, "pickscore", model, choose, loss, 100.0, about)


def _train(
    build: Build,
    name: str,
    new: Callable[[], CLIPModel],
    choose: Choose,
    loss: Loss,
    scale: float,
    about: str,
) -> None:
    data, fresh = (load_quads(build, name, split, token_ids) for split in ("train", "heldout"))
    seeded(build, name)
    model = new()
    features = clip_features(model)
    minutes = fit(name, model, features, data, choose, loss)
    model.eval()
    model.logit_scale.data.fill_(math.log(scale))
    model.half().float()  # measure what ships
    measured = quality(features, fresh)
    facts = {
        "format": "transformers CLIPModel and CLIPProcessor; 64x64 pictures; report the raw cosine",
        "trained": f"{about}; {CAPTIONS} train captions, a third of the pictures through the VAE",
        "seed": build.seed,
        "steps": STEPS,
        "minutes": round(minutes, 1),
        "parameters": parameters(model),
        **measured,
    }
    size = {"shortest_edge": 64}, {"height": 64, "width": 64}
    processor = CLIPProcessor(CLIPImageProcessor(size=size[0], crop_size=size[1]), _long(clip_tokenizer()))

    def write(folder: Path) -> None:
        model.half().save_pretrained(folder)
        processor.save_pretrained(folder)
        write_card(folder, f"{name} of the shapes world", facts)

    replace_folder(build.out / name, write)
    print(f"[{name}] {measured}", flush=True)


def _long(tokenizer: object) -> object:
    tokenizer.model_max_length = 77  # type: ignore[attr-defined]
    return tokenizer
