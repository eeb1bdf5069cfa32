"""The weighted mix: what rewards may return, what media may be, and what is refused."""

import numpy as np
import pytest
import torch

from jaggrl.errors import UserError
from jaggrl.rewards.base import Reward, RewardCard, RewardError, WeightedReward, as_pictures, score_parts
from tests.rewards.tiny import pictures, prompts_of

CARD = RewardCard("stub", "stub", "", "1", "number", (0.0, 1.0))


class Stub(Reward):
    """A reward that answers with whatever ``answer(media, prompts)`` gives, and notes the batch sizes."""

    card = CARD

    def __init__(self, answer=lambda media, prompts: media.mean((1, 2, 3))):
        self.answer = answer
        self.sizes: list[int] = []

    def __call__(self, media_B, prompts):
        self.sizes.append(len(prompts))
        return self.answer(media_B, prompts)


def test_total_is_the_weighted_sum_of_raw_values():
    media, prompts = pictures(5), prompts_of(*"abcde")
    mean, red = Stub(), Stub(lambda m, p: m[:, 0].amax((1, 2)) * 100)
    mix = WeightedReward(
        {"mean": mean, "red": red, "off": Stub()}, {"mean": 1, "red": -0.5, "off": 0}, batch_size=2
    )
    scores = mix.score(media, prompts)
    assert set(scores.parts) == set(mix.weights) == {"mean", "red"}
    torch.testing.assert_close(scores.parts["mean"], media.mean((1, 2, 3)))
    torch.testing.assert_close(scores.total_B, scores.parts["mean"] - 0.5 * scores.parts["red"])
    assert mean.sizes == red.sizes == [2, 2, 1]
    torch.testing.assert_close(scores.parts, score_parts({"mean": mean, "red": red}, media, prompts, 100))


@pytest.mark.parametrize(
    "answer",
    [
        lambda m, p: [0.0, 1.0, 2.0],
        lambda m, p: np.arange(3),
        lambda m, p: np.arange(3.0)[:, None],
        lambda m, p: torch.arange(3, dtype=torch.half),
        lambda m, p: torch.arange(3.0, dtype=torch.float64, requires_grad=True),
        lambda m, p: [torch.tensor(float(i)) for i in range(3)],
    ],
)
def test_every_sensible_answer_becomes_fp32_of_shape_b(answer):
    got = WeightedReward({"stub": Stub(answer)}, {"stub": 1}).score(pictures(3), prompts_of(*"abc")).total_B
    assert got.dtype == torch.float32 and not got.requires_grad
    assert got.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda m, p: torch.zeros(2), r"returned \(2,\)"),
        (lambda m, p: torch.zeros(3, 3), r"returned \(3, 3\)"),
        (lambda m, p: torch.tensor(1.0), r"returned \(\)"),
        (lambda m, p: None, "failed: "),
        (lambda m, p: ["good", "bad", "ugly"], "failed: "),
        (lambda m, p: torch.zeros(3, dtype=torch.complex64), r"returned \(3,\) of torch.complex64"),
        (lambda m, p: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_bad_answer_names_the_reward(answer, says):
    with pytest.raises(RewardError, match=f"reward 'stub' {says}"):
        WeightedReward({"stub": Stub(answer)}, {"stub": 1}).score(pictures(3), prompts_of(*"abc"))


def test_the_cause_of_a_failure_is_kept_and_memory_is_explained():
    def full(media, prompts):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refuse(media, prompts):
        raise UserError("no such thing")

    with pytest.raises(RewardError) as error:
        WeightedReward({"stub": Stub(lambda m, p: {}["x"])}, {"stub": 1}).score(pictures(1), prompts_of("a"))
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(UserError, match="'stub' ran out of memory: lower reward.batch_size .* 1 pictures"):
        WeightedReward({"stub": Stub(full)}, {"stub": 1}).score(pictures(1), prompts_of("a"))
    with pytest.raises(UserError, match="no such thing"):
        WeightedReward({"stub": Stub(refuse)}, {"stub": 1}).score(pictures(1), prompts_of("a"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_failed_score_fails_the_total_of_that_sample_only(bad):
    mix = WeightedReward(
        {"a": Stub(lambda m, p: [1.0, bad, 2.0]), "b": Stub(lambda m, p: [1.0, 1.0, 1.0])}, {"a": 1, "b": 1}
    )
    scores = mix.score(pictures(3), prompts_of(*"abc"))
    assert scores.total_B.isnan().tolist() == scores.parts["a"].isnan().tolist() == [False, True, False]
    assert scores.total_B[[0, 2]].tolist() == [2.0, 3.0] and scores.parts["b"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "no reward a weight"),
        ({"hpsv2": 0, "clipscore": 0.0}, "no reward a weight"),
        ({"hpsv": 1}, "unknown reward 'hpsv': did you mean 'hpsv2'"),
        ({"hpsv2": float("nan")}, "hpsv2=nan is not a finite number"),
        ({"hpsv2": float("inf")}, "not a finite number"),
        ({"hpsv2": "1"}, "not a finite number"),
        ({"hpsv2": None}, "not a finite number"),
        ({"hpsv2": True}, "not a finite number"),
    ],
)
def test_bad_weights_are_refused(weights, says):
    with pytest.raises(UserError, match=says):
        WeightedReward({"hpsv2": Stub(), "clipscore": Stub()}, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_media_are_rounded_to_8_bit_levels(dtype):
    levels = torch.arange(256).float() / 255
    media = levels.repeat(1, 3, 1, 1)
    got, broken = as_pictures(media.to(dtype))
    assert got.dtype == torch.float32 and not broken.any()
    # bfloat16 has fewer levels than a PNG above 0.5.
    torch.testing.assert_close(got, media, atol=1 / 255 if dtype == torch.bfloat16 else 1e-7, rtol=0)
    torch.testing.assert_close(as_pictures((media * 255).to(torch.uint8))[0], media, atol=0, rtol=0)
    assert as_pictures(media + 0.005)[0].max() == 1 and as_pictures(media - 0.005)[0].min() == 0


def test_a_saved_picture_scores_what_it_scored_in_training(tmp_path):
    from PIL import Image

    media = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    Image.fromarray((as_pictures(media)[0][0] * 255).round().byte().permute(1, 2, 0).numpy()).save(
        tmp_path / "a.png"
    )
    saved = torch.from_numpy(np.array(Image.open(tmp_path / "a.png"))).permute(2, 0, 1)[None]
    mix = WeightedReward({"mean": Stub()}, {"mean": 1})
    assert torch.equal(mix.score(media, prompts_of("a")).total_B, mix.score(saved, prompts_of("a")).total_B)


@pytest.mark.parametrize(
    ("media", "says"),
    [
        (torch.rand(1, 3, 8, 8) * 2 - 1, "range from -"),
        (torch.rand(1, 3, 8, 8) * 255, "range from .* or give uint8"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.bool), "dtype torch.bool"),
        (torch.zeros(1, 8, 8, 3), "shape .*decode to RGB"),
        (torch.zeros(1, 4, 8, 8), "shape .*decode to RGB"),
        (torch.zeros(1, 1, 8, 8), "shape .*decode to RGB"),
        (torch.zeros(3, 8, 8), "shape .*decode to RGB"),
        (torch.zeros(1, 3, 0, 8), "shape .*decode to RGB"),
        (torch.zeros(1, 3, 2, 8, 8), "shape .*decode to RGB"),
    ],
)
def test_media_that_are_not_pictures_are_refused(media, says):
    with pytest.raises(UserError, match=says):
        WeightedReward({"stub": Stub()}, {"stub": 1}).score(media, prompts_of("a"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_picture_with_broken_pixels_fails_alone(bad):
    media = pictures(3)
    want = media.mean((1, 2, 3))
    media[1, 2, 0, 0] = bad
    got = WeightedReward({"mean": Stub()}, {"mean": 1}).score(media, prompts_of(*"abc")).total_B
    assert got.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])


def test_counts_must_agree_and_an_empty_share_is_fine():
    mix = WeightedReward({"mean": Stub()}, {"mean": 1})
    with pytest.raises(ValueError, match="3 pictures but 2 prompts"):
        mix.score(pictures(3), prompts_of("a", "b"))
    assert mix.score(pictures(3)[:0], []).total_B.shape == (0,)
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        WeightedReward({"mean": Stub()}, {"mean": 1}, batch_size=0).score(pictures(1), prompts_of("a"))


def test_prompt_checks_reach_the_rewards_of_the_mix():
    class Picky(Stub):
        def check_prompts(self, prompts):
            raise UserError("cannot judge that")

    WeightedReward({"stub": Stub(), "picky": Picky()}, {"stub": 1}).check_prompts(prompts_of("a"))
    with pytest.raises(UserError, match="cannot judge that"):
        WeightedReward({"stub": Stub(), "picky": Picky()}, {"picky": 1}).check_prompts(prompts_of("a"))
