"""The verifier as a reward."""

import pytest
import torch

from jaggrl.errors import UserError
from jaggrl.rewards.base import RewardError, WeightedReward
from jaggrl.rewards.shapes_verifier import ShapesVerifier
from tests.rewards.tiny import pictures, prompts_of


def square_on_white() -> torch.Tensor:
    """One red square on white (1, 3, 64, 64)."""
    media = torch.full((1, 3, 64, 64), 0.97)
    media[0, :, 20:44, 20:44] = torch.tensor([0.86, 0.12, 0.14]).view(3, 1, 1)
    return media


CAPTIONS = [
    ("a red square on a white background", 1.0, 1.0),  # background, count, shape, colour
    ("a blue square on a white background", 0.75, 0.0),
    ("a blue circle on a white background", 0.5, 0.0),
    ("a blue circle on a black background", 0.25, 0.0),
    ("a square on a white background", 1.0, 1.0),
]


@pytest.mark.parametrize("mode", ["fraction", "all"])
def test_values_by_mode(mode):
    texts, fraction, every = zip(*CAPTIONS, strict=True)
    mix = WeightedReward({"v": ShapesVerifier(mode)}, {"v": 1}, batch_size=2)
    got = mix.score(square_on_white().expand(len(texts), -1, -1, -1), prompts_of(*texts)).total_B
    assert got.tolist() == list(fraction if mode == "fraction" else every)


def test_card_and_modes():
    assert ShapesVerifier().card.range == (0.0, 1.0) and len(ShapesVerifier().card.sha256) == 64
    assert ShapesVerifier("all").card.scale != ShapesVerifier("fraction").card.scale
    with pytest.raises(UserError, match="unknown shapes_verifier mode 'al': did you mean 'all'"):
        ShapesVerifier("al")


def test_captions_of_another_world_are_refused_before_training():
    reward = ShapesVerifier()
    reward.check_prompts(prompts_of(*(text for text, _, _ in CAPTIONS)))
    with pytest.raises(
        UserError, match="prompt line 2: .*a photo of a cat.*reward.eval, or use prompts=shapes"
    ) as error:
        reward.check_prompts(prompts_of("a red square on a white background", "a photo of a cat"))
    assert "\n" not in str(error.value)


def test_pictures_of_another_size_are_refused():
    with pytest.raises(RewardError, match="reward 'v' failed: ValueError: picture has shape"):
        WeightedReward({"v": ShapesVerifier()}, {"v": 1}).score(
            pictures(1, 32, 32), prompts_of(CAPTIONS[0][0])
        )
