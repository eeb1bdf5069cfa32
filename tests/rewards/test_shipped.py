"""The shipped small scorers, read by the loaders of the published ones."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jaggrl.paths import resolve_path
from jaggrl.prompts import Prompt, load_prompts
from jaggrl.rewards.base import Reward, score_parts
from jaggrl.rewards.catalogue import build_rewards
from jaggrl.shapes.captions import parse
from jaggrl.shapes.render import draw
from jaggrl.shapes.scene import sample_scene
from tests.rewards.test_catalogue import compose_reward

WEIGHTS = resolve_path("package://jaggrl/shapes/weights")
TRAINED = ("hpsv2", "clipscore", "pickscore")
COUNT = 96


@pytest.fixture(scope="module")
def scorers() -> dict[str, Reward]:
    reward = compose_reward("+reward=hpsv2")
    return build_rewards(reward["catalogue"], reward["eval"])


@pytest.fixture(scope="module")
def heldout() -> list[Prompt]:
    return list(load_prompts("package://jaggrl/shapes/prompts/heldout.txt"))[:COUNT]


def drawn(prompts: list[Prompt], quality: str) -> torch.Tensor:
    """One rendering per caption (B, 3, 64, 64), of the same scenes whatever the quality."""
    scenes, flaws = np.random.default_rng(0), np.random.default_rng(1)
    images = [draw(sample_scene(parse(prompt.text), scenes), quality, flaws) for prompt in prompts]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).clamp(0, 1)


@pytest.fixture(scope="module")
def scores(scorers, heldout) -> dict[str, dict[str, torch.Tensor]]:
    """By kind of picture: right and clean, right and degraded, another caption's picture."""
    clean = drawn(heldout, "clean")
    kinds = {"clean": clean, "degraded": drawn(heldout, "degraded"), "other": clean.roll(1, 0)}
    return {kind: score_parts(scorers, media, heldout, 48) for kind, media in kinds.items()}


def test_every_scorer_scores_every_heldout_caption(scores):
    for parts in scores.values():
        assert list(parts) == [*TRAINED, "shapes_verifier"]
        assert all(values.isfinite().all() and values.abs().max() <= 1 for values in parts.values())
    assert (scores["clean"]["shapes_verifier"] == 1).float().mean() >= 0.98


@pytest.mark.parametrize("name", TRAINED)
def test_trained_scorers_tell_right_from_wrong(scores, name):
    right = scores["clean"][name] > scores["other"][name]
    assert right.float().mean() >= 0.9, f"{name}: {right.float().mean():.3f}"


@pytest.mark.parametrize("name", TRAINED)
def test_clean_over_degraded_as_often_as_the_card_says(scores, name):
    card = json.loads((WEIGHTS / name / "card.json").read_text())["heldout_pair_accuracy"]
    clean = (scores["clean"][name] > scores["degraded"][name]).float().mean()
    # 96 pairs: two standard errors are 0.1 at 0.5; the card's pictures are other ones, some through the VAE.
    assert clean == pytest.approx(card["clean_over_degraded"], abs=0.15)


@pytest.mark.parametrize("name", TRAINED)
def test_the_reward_card_quotes_the_hash_of_the_shipped_card(scorers, name):
    hashes = json.loads((WEIGHTS / name / "card.json").read_text())["sha256"]
    assert scorers[name].card.sha256 in hashes.values()
    assert scorers[name].truncation is not None and scorers[name].truncation.tokens == 77


def test_the_shipped_scorers_differ(scores):
    values = torch.stack([scores["clean"][name] for name in TRAINED])
    assert torch.corrcoef(values).fill_diagonal_(0).max() < 0.98


@pytest.mark.filterwarnings("ignore")
def test_shipped_hpsv2_equals_the_reference_package(package, scorers, heldout, scores, monkeypatch):
    scorer, theirs = package
    folder: Path = WEIGHTS / "hpsv2"
    config = json.loads((folder / "config.json").read_text())
    tokenizer = importlib.import_module("hpsv2.src.open_clip.tokenizer")
    constants = importlib.import_module("hpsv2.src.open_clip.constants")
    monkeypatch.setattr(tokenizer, "_tokenizer", tokenizer.SimpleTokenizer(str(folder / "bpe.txt.gz")))
    monkeypatch.setitem(scorer.model_dict, "model", theirs.CLIP(**config, output_dict=True))
    preprocess = theirs.image_transform(
        config["vision_cfg"]["image_size"],
        is_train=False,
        mean=constants.OPENAI_DATASET_MEAN,
        std=constants.OPENAI_DATASET_STD,
        resize_longest_max=True,
    )
    monkeypatch.setitem(scorer.model_dict, "preprocess_val", preprocess)
    images = (drawn(heldout[:12], "clean") * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pairs = zip(images, heldout[:12], strict=True)
    want = [
        scorer.score(Image.fromarray(i), p.text, cp=str(folder / "checkpoint.pt"))[0].item() for i, p in pairs
    ]
    got = scores["clean"]["hpsv2"][:12]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
