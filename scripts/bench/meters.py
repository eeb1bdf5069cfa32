"""Meters: FLOPs of a call, and the bytes that autograd keeps alive for its backward."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def flops(call: Callable[[], object]) -> int:
    """Multiply-adds count twice, as everywhere; matrix products and attention only."""
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return int(counter.get_total_flops())


class SavedBytes:
    """Bytes of storages that autograd holds for the backward, parameters excluded: now and at most.

    Use as a context manager around forward and backward. Of a checkpointed block its inputs count, not what it
    recomputes.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._skip = {p.untyped_storage().data_ptr() for p in parameters}
        self._alive: Counter[int] = Counter()
        self.now = 0
        self.most = 0
        self._hooks: Any = None

    def __enter__(self) -> "SavedBytes":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> "_Held":
        return _Held(tensor, self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """One more saved tensor of this storage."""
        key = storage.data_ptr()
        if key in self._skip:
            return
        if self._alive[key] == 0:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        self._alive[key] += 1

    def release(self, storage: torch.UntypedStorage) -> None:
        """One saved tensor of this storage less."""
        key = storage.data_ptr()
        if key in self._skip:
            return
        self._alive[key] -= 1
        if self._alive[key] == 0:
            self.now -= storage.nbytes()


class _Held:
    """A saved tensor that tells its meter when autograd drops it."""

    def __init__(self, tensor: Tensor, meter: SavedBytes) -> None:
        self.tensor, self._meter = tensor, meter
        meter.hold(tensor.untyped_storage())

    def __del__(self) -> None:
        self._meter.release(self.tensor.untyped_storage())
