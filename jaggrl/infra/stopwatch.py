"""Seconds per stage without host syncs: wall clock on CPU, CUDA events on GPU (read once per step)."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Named stages, summed until ``collect``; stages may nest (the inner one counts in both)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage."""
        if not self._cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[stage] += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((stage, begin, end))

    def collect(self) -> dict[str, float]:
        """Seconds by stage since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
            for stage, begin, end in self._events:
                self._seconds[stage] += begin.elapsed_time(end) / 1000
            self._events = []
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
