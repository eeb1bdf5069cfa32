"""Feature caches of diffusers: on some steps of a trajectory features are extrapolated instead of computed.

A rollout under a cache is the rollout of another behaviour policy, the cached network: velocities and log-probabilities
that it records are that policy's, the ratio of the first update differs from 1 and corrects for it, and stored
velocities of predicted steps never count as fresh. Evaluation has no cache.

Only schedules that depend on the step alone are offered, so that a sample depends neither on its micro-batch nor on its
rank. FirstBlockCache and SeaCache decide by a mean over the micro-batch; MagCache needs a calibration of each model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from jaggrl.errors import UserError, unknown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TaylorSeer:
    """TaylorSeer (arXiv:2503.06923): features as a Taylor polynomial in the step, by finite differences.

    Raises:
        UserError: a value that predicts nothing, or from nothing.
    """

    interval: int = 2
    """After the warm-up one step of so many is computed, the others are predicted."""
    warmup: int = 2
    """The first steps, all computed."""
    order: int = 1
    """Of the polynomial; 0 reuses the last features."""
    lite: bool = False
    """Predict the network's output alone and skip all blocks, instead of every attention's output."""
    dtype: str = "fp32"
    """Of the cached features: fp32 or bf16."""

    def __post_init__(self) -> None:
        for name, least in {"interval": 2, "warmup": 1, "order": 0}.items():
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(
                    f"rollout.cache.{name}={value!r} must be a whole number of at least {least}; "
                    "rollout_cache=null turns the cache off"
                )
        if self.dtype not in DTYPES:
            raise unknown("rollout.cache.dtype", self.dtype, DTYPES)

    def computed(self, step: int) -> bool:
        """Whether a step of a trajectory is computed, alike for all samples and ranks."""
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0

    @contextmanager
    def trajectory(self, network: Any) -> Iterator[None]:
        """One trajectory from its first step on; the features are forgotten at the end.

        Raises:
            UserError: the network is none of those that diffusers can cache.
        """
        from diffusers import TaylorSeerCacheConfig  # only runs with a cache need it

        if not hasattr(network, "enable_cache"):
            raise UserError(f"{type(network).__name__} has no feature caches; use rollout_cache=null")
        network.enable_cache(
            TaylorSeerCacheConfig(
                cache_interval=self.interval,
                disable_cache_before_step=self.warmup,
                max_order=self.order,
                taylor_factors_dtype=DTYPES[self.dtype],
                use_lite_mode=self.lite,
            )
        )
        try:
            with network.cache_context("rollout"):
                yield
        finally:
            network.disable_cache()


def flops(call: Callable[[], object]) -> int:
    """FLOPs of matrix products, convolutions and attention, attention on the CPU (which torch leaves out) too."""
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={on_cpu: _attention}) as counter:
        call()
    return int(counter.get_total_flops())


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of one attention, from shapes."""
    return int(sdpa_flop_count(query, key, value))
