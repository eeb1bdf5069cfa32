"""The policy ratio: its clip, GRPO-Guard's correction, and what the log wants to know of it."""

import torch
from torch import Tensor

from jaggrl.diffusion.kernels import mean_d


def clipped_loss(ratio_B: Tensor, advantage_B: Tensor, clip_range: float) -> Tensor:
    """Eq. (4) per sample: ``max(-A rho, -A clip(rho, 1 - eps, 1 + eps))``."""
    clipped = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped)


def guarded_log_ratio(log_ratio_B: Tensor, mean: Tensor, mean_old: Tensor, std_B: Tensor) -> Tensor:
    """GRPO-Guard, per sample: ``s [log_ratio + mean_d(mean - mean_old)^2 / (2 s^2)]``.

    It equals ``mean_d[xi (mean - mean_old)]`` with ``xi = (z' - mean_old) / s``, the noise of the rollout.
    """
    drift_B = mean_d((mean - mean_old) ** 2)
    return std_B * (log_ratio_B + drift_B / (2 * std_B**2))


def ratio_stats(
    ratio_B: Tensor, advantage_B: Tensor, policy_B: Tensor, clip_range: float
) -> dict[str, Tensor]:
    """Ratio and clip shares; clipping is one-sided per sign of the advantage."""
    high = (ratio_B > 1 + clip_range) & (advantage_B > 0)
    low = (ratio_B < 1 - clip_range) & (advantage_B < 0)
    return {
        "ratio_mean": ratio_B.mean(),
        "ratio_deviation_max": (ratio_B - 1).abs().max(),
        "clip_high": high.float().mean(),
        "clip_low": low.float().mean(),
        "policy_loss": policy_B.mean(),
    }


def cache_stats(log_ratio_B: Tensor) -> dict[str, Tensor]:
    """How far the rollout's cached policy is from the network of the same parameters."""
    return {
        "cache_ratio_mean": log_ratio_B.exp().mean(),
        "cache_log_ratio_abs": log_ratio_B.abs().mean(),
        "cache_ratio_deviation_max": (log_ratio_B.exp() - 1).abs().max(),
    }
