"""A stopwatch whose stages exclude the stages inside them, so that they add up to the whole."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from jaggrl.infra.stopwatch import Stopwatch

MARK = "stage:"
READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations that bring a value to the host: on a GPU each of them waits for the device."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Ledger(Stopwatch):
    """Takes the trainer's stopwatch's place: seconds of each stage without its inner stages.

    On a GPU the device is waited for at every change of stage, so that work counts where it was asked for; what
    overlapped before no longer does.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(device)
        self._now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.waits = True
        """Whether changes of stage wait for the device; off while waits are counted."""
        self._open: list[str] = []
        self._since = 0.0

    @property
    def stage(self) -> str:
        """The innermost open stage, or nothing."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Open a stage inside the present one."""
        self._turn()
        self._open.append(stage)
        self.calls[stage] += 1
        try:
            with record_function(MARK + stage):
                yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Book the time since the last change of stage."""
        if self._cuda and self.waits:
            torch.cuda.synchronize()
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, call: Callable[..., Any], stage: str | Callable[[], str]) -> Callable[..., Any]:
        """``call`` as a stage of its own, named now or at each call."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self(stage if isinstance(stage, str) else stage()):
                return call(*args, **kwargs)

        return wrapped

    def collect(self) -> dict[str, float]:
        """Nothing: the trainer's ``time/*`` would count nested stages twice."""
        return {}

    def clear(self) -> None:
        """Forget what was booked."""
        self.seconds.clear()
        self.calls.clear()


def counted(call: Callable[[], object], device: torch.device) -> dict[str, Counter[str]]:
    """Under torch.profiler: by stage, how many values were read by the host, casts and copies, operations, waits."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        call()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for event in profiler.events() or ():
        kind = _kind(event.name)
        if kind:
            found[_stage_of(event)][kind] += 1
    return found


def _kind(name: str) -> str:
    if name in READS:
        return "host_reads"
    if name in WAITS:
        return "device_waits"
    if name == "aten::_to_copy":
        return "casts"
    return "operations" if name.startswith("aten::") else ""


def _stage_of(event: Any) -> str:
    """The innermost stage around an event; the autograd engine's own thread is the backward's."""
    while event is not None:
        if event.name.startswith(MARK):
            return str(event.name[len(MARK) :])
        if event.name.startswith("autograd::engine"):
            return "update_bwd"
        event = event.cpu_parent
    return ""
