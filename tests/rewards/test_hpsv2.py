"""HPSv2: equal to the reference package on the same weights, and honest about every broken file."""

import gzip
import importlib
import json
import math
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.tokenizer import default_bpe
from PIL import Image

from jaggrl.errors import UserError
from jaggrl.rewards.base import WeightedReward
from jaggrl.rewards.hpsv2 import HPSv2, preprocess
from tests.rewards.tiny import IMAGE_SIZE, OPEN_CLIP, pictures, prompts_of

PROMPTS = ["a red circle", "a photo of a cat, 2 dogs & 1 'bird'", "一只猫 on a mat", "long " * 90]


@pytest.fixture(scope="module")
def reward(hpsv2_files):
    return HPSv2(str(hpsv2_files / "checkpoint.pt"), str(hpsv2_files / "config.json"))


@pytest.fixture(scope="module")
def reference(package, hpsv2_files):
    """The package's own ``score`` on the tiny model."""
    scorer, theirs = package
    constants = importlib.import_module("hpsv2.src.open_clip.constants")
    scorer.model_dict["model"] = theirs.CLIP(**OPEN_CLIP, output_dict=True)
    scorer.model_dict["preprocess_val"] = theirs.image_transform(
        IMAGE_SIZE,
        is_train=False,
        mean=constants.OPENAI_DATASET_MEAN,
        std=constants.OPENAI_DATASET_STD,
        resize_longest_max=True,
    )
    return lambda image, text: float(scorer.score(image, text, cp=str(hpsv2_files / "checkpoint.pt"))[0])


def test_the_published_checkpoint_fits_tensor_by_tensor(package):
    """ViT-H-14 has the same tensors here as in the package that wrote HPS_v2.1_compressed.pt."""
    shapes = []
    for library in (open_clip, package[1]):
        with torch.device("meta"):
            model = library.CLIP(**library.get_model_config("ViT-H-14"))
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]
    assert sum(shape.numel() for shape in shapes[0].values()) == 986_109_441


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("height", "width"), [(32, 32), (96, 40), (17, 45), (7, 300), (1, 1)])
def test_scores_equal_the_reference_package(reward, reference, height, width):
    media = pictures(len(PROMPTS), height, width, seed=height)
    want = []
    for picture, text in zip(media, PROMPTS, strict=True):
        array = (picture * 255).round().byte().permute(1, 2, 0).numpy()
        want.append(reference(Image.fromarray(array), text))
    got = WeightedReward({"hpsv2": reward}, {"hpsv2": 1}).score(media, prompts_of(*PROMPTS)).total_B
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=0)
    assert got.unique().numel() == len(got), "the tiny model tells pictures apart"


def test_preprocessing_by_hand():
    from open_clip.constants import OPENAI_DATASET_MEAN as MEAN
    from open_clip.constants import OPENAI_DATASET_STD as STD

    out = preprocess(torch.ones(1, 3, 16, 32), 32)  # no scaling; eight black rows above and below
    for channel in range(3):
        black, white = -MEAN[channel] / STD[channel], (1 - MEAN[channel]) / STD[channel]
        rows = out[0, channel, :, 0]
        assert rows.tolist() == pytest.approx([black] * 8 + [white] * 16 + [black] * 8)
    assert preprocess(torch.ones(1, 3, 7, 4096), 32).shape == (1, 3, 32, 32)


def test_raw_cosine_and_card(reward, hpsv2_files):
    media, prompts = pictures(6), prompts_of(*"abcdef")
    scores = reward(media, prompts)
    assert scores.shape == (6,) and scores.dtype == torch.float32 and scores.abs().max() <= 1
    card = reward.card
    assert (card.name, card.version, card.scale, card.range) == ("hpsv2", "v2.1", "cosine", (-1.0, 1.0))
    assert len(card.sha256) == 64 and card.model_id.endswith("config.json")
    assert not any(p.requires_grad for p in reward.model.parameters()) and not reward.model.training
    one_by_one = torch.cat([reward(media[i : i + 1], prompts[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(one_by_one, scores, atol=1e-6, rtol=0)
    with torch.no_grad():
        reward.model.logit_scale.add_(1)
    torch.testing.assert_close(reward(media, prompts), scores, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_weights_keep_the_product_in_fp32(hpsv2_files, reward, dtype):
    low = HPSv2(str(hpsv2_files / "checkpoint.pt"), str(hpsv2_files / "config.json"), dtype=dtype)
    got, want = (r(pictures(4), prompts_of(*"abcd")) for r in (low, reward))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=0.02, rtol=0)


def test_long_prompts_keep_their_end_token_and_are_counted(hpsv2_files, caplog):
    reward = HPSv2(str(hpsv2_files / "checkpoint.pt"), str(hpsv2_files / "config.json"))
    letters = "".join(chr(97 + i * 7919 % 26) for i in range(1_000_000))
    texts = ["x " * 74, "x " * 75, "x " * 76, "x " * 200, "x " * 600, "word " * 200_000, letters]
    scores = reward(pictures(1).expand(len(texts), -1, -1, -1), prompts_of(*texts))
    assert scores.isfinite().all()
    assert scores[1] == scores[2] == scores[3] == scores[4], "77 tokens: start, 75 words, end"
    assert (scores[0] - scores[1]).abs() < 0.02
    assert (reward.tokenizer(texts[1:5]).argmax(1) == 76).all()
    reward(pictures(1), prompts_of("x " * 300))
    assert len(reward.truncation.cut) == 6
    assert len([r for r in caplog.records if "sees 77 tokens" in r.message]) == 1


def test_own_vocabulary(hpsv2_files, tmp_path):
    merges = gzip.decompress(Path(default_bpe()).read_bytes()).decode().split("\n")[:101]
    (tmp_path / "bpe.txt.gz").write_bytes(gzip.compress("\n".join(merges).encode()))
    text = {**OPEN_CLIP["text_cfg"], "vocab_size": 512 + 100 + 2, "context_length": 12}
    config = {**OPEN_CLIP, "text_cfg": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"state_dict": open_clip.CLIP(**config).half().state_dict()}, tmp_path / "small.pt")
    files = {"checkpoint": str(tmp_path / "small.pt"), "model": str(tmp_path / "config.json")}
    reward = HPSv2(**files, bpe=str(tmp_path / "bpe.txt.gz"))
    assert reward.tokens == 12 and math.isfinite(reward(pictures(1), prompts_of("a red circle")))
    with pytest.raises(UserError, match="49408 tokens, the model 614"):
        HPSv2(**files)


def test_published_architecture_by_name(monkeypatch, hpsv2_files):
    """ViT-H-14 is asked of open_clip by name, and built without any weights of its own."""
    asked = []
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: asked.append(name) or OPEN_CLIP)
    reward = HPSv2(str(hpsv2_files / "checkpoint.pt"))
    assert asked == ["ViT-H-14"] and reward.card.model_id == "ViT-H-14"


def test_missing_files_are_named_all_at_once_with_the_remedy(tmp_path):
    config = {
        "checkpoint": str(tmp_path / "no.pt"),
        "model": str(tmp_path / "no.json"),
        "bpe": str(tmp_path / "no.gz"),
    }
    with pytest.raises(
        UserError, match=r"hpsv2 needs .*no\.pt and .*no\.json and .*no\.gz \(get them with: hf download x\)"
    ):
        HPSv2(**config, fetch="hf download x")
    assert len(HPSv2.missing(config)) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no checkpoint with a key 'state_dict'"),
        (b"not a pickle", "no checkpoint"),
        ({"model": {}}, "no checkpoint"),
        ([1, 2], "no checkpoint"),
        ({"state_dict": {}}, "does not fit the architecture"),
        ({"state_dict": {"visual.proj": torch.zeros(3, 3)}}, "does not fit the architecture"),
        ({"state_dict": pytest.raises}, "no checkpoint"),
    ],
)
def test_broken_checkpoints(hpsv2_files, tmp_path, content, says):
    file = tmp_path / "broken.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(UserError, match=f"broken.pt .*{says}|{says}") as error:
        HPSv2(str(file), str(hpsv2_files / "config.json"))
    assert "\n" not in str(error.value)


def test_truncated_checkpoint_bad_config_and_unknown_names(hpsv2_files, tmp_path):
    whole = (hpsv2_files / "checkpoint.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.pt is no checkpoint"):
        HPSv2(str(tmp_path / "cut.pt"), str(hpsv2_files / "config.json"))
    checkpoint = str(hpsv2_files / "checkpoint.pt")
    for text, says in (
        ("{", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"a": 1}', "not an open_clip CLIP config"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=says):
            HPSv2(checkpoint, str(tmp_path / "bad.json"))
    with pytest.raises(UserError, match="did you mean 'ViT-H-14'"):
        HPSv2(checkpoint, "ViT-H14")
    with pytest.raises(UserError, match="unknown dtype 'fp32': did you mean|choose one of"):
        HPSv2(checkpoint, str(hpsv2_files / "config.json"), dtype="fp32")
