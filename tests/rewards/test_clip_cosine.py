"""CLIPScore and PickScore: raw cosines, equal to transformers' own and to torchmetrics'."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from jaggrl.errors import UserError
from jaggrl.rewards.base import WeightedReward
from jaggrl.rewards.clip_cosine import features, local_folder
from jaggrl.rewards.clipscore import ClipScore
from jaggrl.rewards.pickscore import PickScore
from tests.rewards.tiny import pictures, prompts_of

TEXTS = ["a red circle", "a photo of a cat, 2 dogs & 1 'bird'", "一只猫 on a mat", "x " * 75]


@pytest.fixture(scope="module")
def reward(clip_folder):
    return ClipScore(str(clip_folder))


@pytest.fixture(scope="module")
def reference(clip_folder):
    return CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)


def as_pil(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (96, 40), (7, 4096), (1, 1)])
def test_scores_are_the_diagonal_of_the_logits_without_their_scale(reward, reference, height, width):
    model, processor = reference
    media = pictures(len(TEXTS), height, width, seed=height)
    images = [as_pil(picture) for picture in media]
    inputs = processor(
        text=TEXTS, images=images, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        want = model(**inputs).logits_per_image.diag() / model.logit_scale.exp()
    got = WeightedReward({"clipscore": reward}, {"clipscore": 1}).score(media, prompts_of(*TEXTS)).total_B
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert got.unique().numel() == len(got), "the tiny model tells pictures apart"


def test_pickscore_is_the_authors_score_without_its_scale(clip_folder, reference):
    """The snippet of the model's card: ``exp(logit_scale) * (text_embs @ image_embs.T)``."""
    model, processor = reference
    media = pictures(1)
    images = processor(images=[as_pil(media[0])], return_tensors="pt")
    text = processor(text=TEXTS[0], padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        image_embs, text_embs = (
            features(model.get_image_features(**images)),
            features(model.get_text_features(**text)),
        )
        image_embs, text_embs = (e / torch.norm(e, dim=-1, keepdim=True) for e in (image_embs, text_embs))
        want = model.logit_scale.exp() * (text_embs @ image_embs.T)[0]
    reward = PickScore(str(clip_folder), str(clip_folder))
    torch.testing.assert_close(reward(media, prompts_of(TEXTS[0])) * model.logit_scale.exp(), want)


def test_scores_equal_torchmetrics_over_100(reward, reference):
    """torchmetrics with its two faults mended from outside: outputs unwrapped, prompts short enough."""
    functional = pytest.importorskip("torchmetrics.functional.multimodal.clip_score")
    model, processor = reference
    unwrapped = SimpleNamespace(
        config=model.config,
        to=lambda device: unwrapped,
        get_image_features=lambda *a: features(model.get_image_features(*a)),
        get_text_features=lambda *a: features(model.get_text_features(*a)),
    )
    media = pictures(3)
    with torch.no_grad():
        want, _ = functional._clip_score_update(list((media * 255).byte()), TEXTS[:3], unwrapped, processor)
    torch.testing.assert_close(reward((media * 255).byte() / 255, prompts_of(*TEXTS[:3])), want / 100)


def test_both_forms_of_features_are_understood(reward, monkeypatch):
    """transformers 4 returns tensors from get_*_features, 5 returns outputs."""
    media, prompts = pictures(2), prompts_of("a", "b")
    want = reward(media, prompts)
    for name in ("get_image_features", "get_text_features"):
        real = getattr(reward.model, name)
        monkeypatch.setattr(reward.model, name, lambda real=real, **inputs: features(real(**inputs)))
    torch.testing.assert_close(reward(media, prompts), want)
    assert isinstance(reward.model.get_text_features(**reward._tokenize(["a"])), torch.Tensor)


def test_long_prompts_keep_their_end_token_and_are_counted(clip_folder, caplog):
    reward = ClipScore(str(clip_folder))
    letters = "".join(chr(97 + i * 7919 % 26) for i in range(1_000_000))
    counts = [72, 73, 74, 75, 76, 77, 198, 600]
    texts = ["x " * n for n in counts] + ["word " * 200_000, letters]
    scores = reward(pictures(1).expand(len(texts), -1, -1, -1), prompts_of(*texts))
    assert scores.isfinite().all()
    ids = reward._tokenize(texts)["input_ids"]
    assert ids.shape[1] == 77 and (ids[4:8, -1] == 49407).all() and (ids[4:8, -2] != 49407).all()
    torch.testing.assert_close(scores[3:8], scores[3].expand(5), atol=1e-6, rtol=0)
    jumps = (scores[1:8] - scores[:7]).abs()
    assert jumps.max() < 0.02, "smooth across the limit: a cut end token would jump"
    assert len(reward.truncation.cut) == 6
    assert len([r for r in caplog.records if "clipscore sees 77 tokens" in r.message]) == 1


def test_frozen_batch_invariant_raw_and_described(reward):
    media, prompts = pictures(5), prompts_of("a", "b " * 70, "c", "d e", "f")
    scores = reward(media, prompts)
    assert scores.shape == (5,) and scores.dtype == torch.float32 and scores.abs().max() <= 1
    one_by_one = torch.cat([reward(media[i : i + 1], prompts[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(one_by_one, scores, atol=1e-6, rtol=0)
    assert not any(p.requires_grad for p in reward.model.parameters()) and not reward.model.training
    assert (reward.card.name, reward.card.scale, reward.card.range) == ("clipscore", "cosine", (-1.0, 1.0))
    assert len(reward.card.sha256) == 64


def test_low_precision_weights_keep_the_product_in_fp32(clip_folder, reward):
    low = ClipScore(str(clip_folder), dtype="bfloat16")(pictures(4), prompts_of(*"abcd"))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, reward(pictures(4), prompts_of(*"abcd")), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("removed", "says"),
    [
        ("config.json", "needs .*config.json .get them with: hf download x"),
        ("model.safetensors", "needs .*model.safetensors"),
        ("processor_config.json", "needs .*preprocessor_config.json"),
    ],
)
def test_a_folder_with_a_file_missing(clip_folder, tmp_path, removed, says):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    (folder / removed).unlink()
    with pytest.raises(UserError, match=f"pickscore {says}"):
        PickScore(str(folder), fetch="hf download x")


def test_broken_folders_and_absent_ids(clip_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="clipscore cannot load .*fetch the folder again") as error:
        ClipScore(str(folder))
    assert "\n" not in str(error.value)
    for absent in ("openai/no-such-model-anywhere", "not a hub id//", str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match="clipscore needs "):
            ClipScore(absent)
        assert len(ClipScore.missing({"model": absent, "fetch": "x"})) == 1
    assert local_folder(str(clip_folder)) == clip_folder


def test_a_tower_that_would_pool_the_wrong_token_is_refused(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"eos_token_id": 49407', '"eos_token_id": 999'))
    with pytest.raises(UserError, match="end token 49407, the text tower pools at 999"):
        ClipScore(str(folder))
