"""FSDP2 and the joint backward: which gathers it costs, and how to halve them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def units(network: nn.Module) -> list[FSDPModule]:
    """The FSDP2 units of a network; none when it is not sharded."""
    return [m for m in network.modules() if isinstance(m, FSDPModule)]


@contextmanager
def kept_gathered(network: nn.Module) -> Iterator[None]:
    """Keep every unit gathered between the graphs of one joint backward call, and reshard afterwards.

    Two graphs in one call pass every unit twice. By default FSDP2 reshards in between: two all-gathers per
    unit; here one. Memory: all parameters gathered at the midpoint (the unsharded gradients are there either
    way).
    """
    modules = units(network)
    for unit in modules:
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in modules:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


@contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    """Count FSDP2's collectives inside, by kind, for benchmarks and tests."""
    names = {  # torch >= 2.14, before
        "all_gathers": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatters": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }
    counts = dict.fromkeys(names, 0)
    originals: dict[str, Callable[..., Any]] = {}

    def counted(key: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return original(*args, **kwargs)

        return call

    for key, choices in names.items():
        name = next(c for c in choices if hasattr(dist, c))
        originals[name] = getattr(dist, name)
        setattr(dist, name, counted(key, originals[name]))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
