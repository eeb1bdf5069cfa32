"""The shapes world's rule-based verifier as a reward: ground truth that cannot be hacked, but sparse."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jaggrl.errors import UserError, unknown
from jaggrl.paths import resolve_path
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import Reward, RewardCard, sha256_of
from jaggrl.shapes.captions import parse
from jaggrl.shapes.verifier import Verdict, verify

MODES: dict[str, Callable[[Verdict], float]] = {
    "fraction": lambda verdict: verdict.fraction,
    "all": lambda verdict: float(verdict.all_hold),
}


class ShapesVerifier(Reward):
    """Share of the caption's parts that hold (``mode="fraction"``), or 1 if all do, else 0 (``mode="all"``).

    Takes 64x64 pictures and captions of the shapes grammar; other captions are refused by
    :meth:`check_prompts` before training starts. Runs on the CPU wherever the pictures are.
    """

    def __init__(self, mode: str = "fraction", device: str | torch.device = "cpu") -> None:
        if mode not in MODES:
            raise unknown("shapes_verifier mode", mode, MODES)
        self.value = MODES[mode]
        rules = sha256_of(resolve_path("package://jaggrl/shapes/verifier.py"))
        scale = {"fraction": "share of parts that hold", "all": "1 if all parts hold"}[mode]
        self.card = RewardCard("shapes_verifier", f"rules:{mode}", rules, "1", scale, (0.0, 1.0))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise :class:`UserError` for the first prompt that is not a shapes caption."""
        for prompt in prompts:
            try:
                parse(prompt.text)
            except ValueError as error:
                remedy = "take shapes_verifier out of reward.weights and reward.eval, or use prompts=shapes"
                raise UserError(f"shapes_verifier, prompt line {prompt.id}: {error}; {remedy}") from error

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Values (B,) in [0, 1] of pictures (B, 3, 64, 64)."""
        pictures = media_B.cpu().permute(0, 2, 3, 1).numpy()
        verdicts = [verify(picture, parse(p.text)) for picture, p in zip(pictures, prompts, strict=True)]
        return torch.tensor([self.value(verdict) for verdict in verdicts])
