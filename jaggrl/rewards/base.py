"""What a reward is, and the weighted mix of several.

Raw values are stored and reported everywhere (a cosine is about 0.3, never 30 or 0.87): constant factors
cancel in the advantage of one reward but not in a weighted sum, and scaled numbers cannot be compared.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jaggrl.errors import UserError, unknown
from jaggrl.prompts import Prompt
from jaggrl.rewards.text import Truncation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RewardError(RuntimeError):
    """A reward raised, or returned something that is not one number per picture."""


@dataclass(frozen=True)
class RewardCard:
    """What a number means: enough to tell whether two tables may be compared."""

    name: str
    model_id: str
    sha256: str
    """Of the file that holds the weights (or the rules)."""
    version: str
    scale: str
    range: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return vars(self) | {"range": list(self.range)}


class Reward(ABC):
    """A frozen judge of pictures.

    A subclass keeps its arguments plain, takes ``device``, and loads everything in its constructor:

    >>> class Redness(Reward):
    ...     def __init__(self, device="cpu"):
    ...         self.card = RewardCard("redness", "red channel", "", "1", "mean", (0.0, 1.0))
    ...     def __call__(self, media_B, prompts):
    ...         return media_B[:, 0].mean((1, 2))
    """

    card: RewardCard
    truncation: Truncation | None = None
    """Prompts scored so far whose end a text tower could not see; None without a text tower."""

    @abstractmethod
    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score pictures (B, 3, H, W), fp32 in [0, 1], each against its prompt: raw values (B,) in fp32.

        A non-finite value is a failed score: the sample is masked and counted, never trained on.
        """

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027  (a hook, not a duty)
        """Refuse, before training, prompts that this reward cannot judge (:class:`UserError`)."""

    @classmethod
    def missing(cls, config: Mapping[str, Any]) -> list[str]:
        """Files that a reward of these arguments lacks here, each with how to get it. Loads nothing."""
        return []


@dataclass(frozen=True)
class Scores:
    """What the mix says of B pictures."""

    total_B: Tensor
    """Weighted sum of the raw values, NaN where any part failed."""
    parts: Mapping[str, Tensor]
    """Raw values (B,) by reward name, NaN where that reward failed."""


class WeightedReward:
    """``total = sum_k weight_k * reward_k``, raw values, in micro-batches.

    A weight of 0 takes a reward out of the mix. Raises :class:`UserError` for an empty mix, a name without a
    reward, or a weight that is not a finite number.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], weights: Mapping[str, float], batch_size: int = 16
    ) -> None:
        self.weights = check_weights(weights, rewards)
        self.rewards = {name: rewards[name] for name in self.weights}
        self.batch_size = batch_size

    def score(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Scores:
        """Score pictures (B, 3, H, W); see :func:`score_parts` for what is accepted."""
        parts = score_parts(self.rewards, media_B, prompts, self.batch_size)
        total_B = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        return Scores(total_B, parts)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Let every reward of the mix refuse prompts it cannot judge."""
        for reward in self.rewards.values():
            reward.check_prompts(prompts)


def check_weights(weights: Mapping[str, float], known: Mapping[str, Any]) -> dict[str, float]:
    """The non-zero weights of a mix over the ``known`` names, or a :class:`UserError`."""
    mix = {}
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            wrong = f"reward.weights.{name}={weight!r} is not a finite number"
            raise UserError(f"{wrong}: give one, or 0 to leave the reward out")
        if weight and name not in known:
            raise unknown("reward", name, known)
        if weight:
            mix[name] = float(weight)
    if not mix:
        raise UserError("reward.weights gives no reward a weight: set one, as in 'reward.weights={hpsv2: 1}'")
    return mix


@torch.no_grad()
def score_parts(
    rewards: Mapping[str, Reward], media_B: Tensor, prompts: Sequence[Prompt], batch_size: int = 16
) -> dict[str, Tensor]:
    """Raw values (B,) of every reward: fp32, on the media's device, NaN where scoring failed.

    Pictures are first rounded to the 256 levels of a PNG, so that a saved sample scores what it scored in
    training. A picture with non-finite pixels fails; pictures of the wrong shape, range or dtype raise.
    """
    if batch_size < 1:
        raise UserError(f"reward.batch_size must be at least 1, not {batch_size}")
    pictures_B, broken_B = as_pictures(media_B)
    if len(prompts) != len(pictures_B):
        raise ValueError(f"{len(pictures_B)} pictures but {len(prompts)} prompts")
    parts = {}
    for name, reward in rewards.items():
        chunks = [torch.zeros(0, device=media_B.device)]
        for start in range(0, len(prompts), batch_size):
            rows = slice(start, start + batch_size)
            chunks.append(_score(name, reward, pictures_B[rows], prompts[rows]).to(media_B.device))
        scores_B = torch.cat(chunks)
        parts[name] = torch.where(scores_B.isfinite() & ~broken_B, scores_B, torch.nan)
    return parts


def _score(name: str, reward: Reward, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """One call of one reward, with its failures named and its answer checked."""
    try:
        answer = reward(media_B, prompts)
        scores = torch.as_tensor(answer)
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        remedy = f"lower reward.batch_size (it scored {len(prompts)} pictures at once)"
        raise UserError(f"reward {name!r} ran out of memory: {remedy}") from error
    except Exception as error:
        raise RewardError(f"reward {name!r} failed: {type(error).__name__}: {error}") from error
    if scores.shape == (len(prompts), 1):
        scores = scores[:, 0]
    if scores.shape != (len(prompts),) or scores.is_complex():
        got = f"{tuple(scores.shape)} of {scores.dtype} for {len(prompts)} pictures"
        raise RewardError(f"reward {name!r} returned {got}; it must return one number each")
    return scores.float()


def as_pictures(media_B: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures (B, 3, H, W) in fp32 on the levels k/255, and which of them have non-finite pixels (B,).

    Takes uint8, or any float dtype in [0, 1]. Everything else raises :class:`UserError`: a silent repair
    would hide a decoder that forgot its last step.
    """
    if media_B.dim() != 4 or media_B.shape[1] != 3 or not media_B[0:1].numel() and len(media_B):
        raise UserError(f"media of shape {tuple(media_B.shape)}: decode to RGB pictures (B, 3, H, W)")
    if media_B.dtype == torch.uint8:
        return media_B.float().contiguous() / 255, torch.zeros(
            len(media_B), dtype=torch.bool, device=media_B.device
        )
    if not media_B.is_floating_point():
        raise UserError(f"media of dtype {media_B.dtype}: give uint8, or floats in [0, 1]")
    media_B = media_B.float().contiguous()
    finite = media_B.isfinite()
    media_B = torch.where(finite, media_B, 0)
    if media_B.numel() and (media_B.min() < -0.01 or media_B.max() > 1.01):
        low, high = media_B.min().item(), media_B.max().item()
        raise UserError(f"media range from {low:.3g} to {high:.3g}: map them to [0, 1], or give uint8")
    return (media_B.clamp(0, 1) * 255).round() / 255, ~finite.flatten(1).all(1)


def needs(name: str, absent: Sequence[object], fetch: str | None) -> list[str]:
    """The one line of :meth:`Reward.missing` for these absent files, or nothing."""
    remedy = f" (get them with: {fetch})" if fetch else ""
    files = " and ".join(dict.fromkeys(map(str, absent)))
    return [f"{name} needs {files}{remedy}"] if absent else []


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a config's name, or a :class:`UserError`."""
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def sha256_of(file: Path) -> str:
    """Hash of a file's bytes, as reward cards quote it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
