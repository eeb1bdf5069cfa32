"""Named copies of the trainable parameters: the reference, NFT's lagged policy, the EMA.

A shadow holds this rank's shards only, so that it costs the same share of memory as the parameters do. ``using``
exchanges parameters and shadow in place and back; under FSDP2 the root stays gathered after a forward, so that the
modules are resharded around the exchange.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local(parameter: Tensor) -> Tensor:
    """This rank's data of a parameter, sharing its storage but not its autograd version counter."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data


class Shadows:
    """Copies by name of a fixed list of parameters."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._copies: dict[str, list[Tensor]] = {}

    @property
    def names(self) -> Sequence[str]:
        """The shadows that exist."""
        return list(self._copies)

    def snapshot(self, name: str) -> None:
        """Make (or renew) a shadow of the present parameters."""
        self._copies[name] = [local(p).clone() for p in self._parameters]

    def lerp(self, name: str, decay: float) -> None:
        """``shadow <- decay * shadow + (1 - decay) * parameters``."""
        for copy, p in zip(self._copies[name], self._parameters, strict=True):
            copy.lerp_(local(p).to(copy.dtype), 1 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The parameters are the shadow's inside; no graph may be recorded there."""
        self._exchange(name)
        try:
            with torch.no_grad():
                yield
        finally:
            self._exchange(name)

    def _exchange(self, name: str) -> None:
        for copy, p in zip(self._copies[name], self._parameters, strict=True):
            data = local(p)
            mine = data.clone()
            data.copy_(copy)
            copy.copy_(mine)
        for module in self._network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Shadows as tensors that keep the parameters' sharding, for the checkpoint."""
        names = [n for n, p in self._network.named_parameters() if p.requires_grad]
        state: dict[str, dict[str, Tensor]] = {}
        for name, copies in self._copies.items():
            state[name] = {
                n: _like(copy, p) for n, copy, p in zip(names, copies, self._parameters, strict=True)
            }
        return state

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over what ``state_dict`` gave (loaded in place by the checkpoint)."""
        for name, copies in state.items():
            self._copies[name] = [local(t) for t in copies.values()]


def _like(copy: Tensor, parameter: Tensor) -> Tensor:
    """A shard wrapped as the DTensor its parameter is."""
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            copy,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return copy
