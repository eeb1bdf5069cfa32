"""The shipped weights: what their cards say of them is true, and plain diffusers and the scorers' loaders read them."""

import hashlib
import json

import numpy as np
import pytest
import torch

from jaggrl.shapes import WEIGHTS
from jaggrl.shapes.captions import parse, read_prompts
from jaggrl.shapes.verifier import verify

FOLDERS = ("flux", "hpsv2", "pickscore", "clipscore")


def card(name: str) -> dict:
    return json.loads((WEIGHTS / name / "card.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FOLDERS)
def test_card_names_every_weight_file_and_its_hash(name):
    found = {
        str(path.relative_to(WEIGHTS / name)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (WEIGHTS / name).rglob("*")
        if path.suffix in (".safetensors", ".pt")
    }
    assert found and card(name)["sha256"] == found
    assert {"title", "trained", "seed", "minutes", "steps"} <= set(card(name))


def test_shipped_weights_are_small():
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 20e6


def test_cards_promise_a_good_but_improvable_world():
    assert 0.30 <= card("flux")["verifier"]["heldout"]["all_hold"] <= 0.75
    # Chance is 0.5 for pairs and 1/32 for retrieval; the scorers are small on purpose, and no two agree.
    floors = {"hpsv2": (0.95, 0.93), "pickscore": (0.70, 0.75), "clipscore": (0.0, 0.75)}
    for name, (clean, right) in floors.items():
        accuracy = card(name)["heldout_pair_accuracy"]
        assert accuracy["clean_over_degraded"] > clean and accuracy["right_over_wrong_clean"] > right
        assert card(name)["heldout_retrieval_1_of_32"] > 0.6


def test_plain_flux_pipeline_draws_captions():
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(WEIGHTS / "flux")
    pipeline.set_progress_bar_config(disable=True)
    assert {module.dtype for module in (pipeline.transformer, pipeline.vae, pipeline.text_encoder)} == {
        torch.float32
    }
    texts = read_prompts("heldout")[:12]
    made = pipeline(
        texts,
        height=64,
        width=64,
        num_inference_steps=10,
        guidance_scale=3.5,
        max_sequence_length=20,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    verdicts = [verify(picture, parse(text)) for picture, text in zip(made, texts, strict=True)]
    assert np.mean([verdict.fraction for verdict in verdicts]) > 0.6


@pytest.mark.slow
def test_flux_passes_heldout_captions_as_its_card_says():
    from diffusers import FluxPipeline

    from scripts.shapes_world.evaluate import judge, sample

    pipeline = FluxPipeline.from_pretrained(WEIGHTS / "flux")
    pipeline.set_progress_bar_config(disable=True)
    texts = read_prompts("heldout")
    pictures = np.concatenate(
        [sample(pipeline, texts[i : i + 42], seed=100 + i) for i in range(0, len(texts), 42)]
    )
    # Other noise than the card's: binomial error of 252 pictures is 0.03.
    assert judge(pictures, texts)["all_hold"] == pytest.approx(
        card("flux")["verifier"]["heldout"]["all_hold"], abs=0.1
    )
