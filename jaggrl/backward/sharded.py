"""FSDP2 and the joint backward: which gathers it costs, and how to halve them."""

from collections.abc import Iterator
from contextlib import contextmanager

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
