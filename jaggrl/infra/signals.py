"""Stop requests: a signal sets a flag, the loop looks at it, saves and leaves with a documented code.

SIGTERM and SIGUSR1 (SLURM before the time limit) and the first Ctrl-C ask for a stop; a second Ctrl-C
interrupts at once. The handler does nothing but set the flag, so a signal in the middle of a checkpoint lets
the checkpoint finish. A signal may reach one rank only: the session takes the maximum over ranks of
:attr:`StopSignal.requested` after every forward before it acts.
"""

import signal
import threading
from types import FrameType, TracebackType

from jaggrl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(Exception):
    """Raised on all ranks, between two forwards, when one was asked to stop."""


class StopSignal:
    """Context that watches for stop requests.

    Example::

        with StopSignal() as stop:
            for step in steps:
                ...
                if any_rank(stop.requested):
                    save()
                    return stop.exit_code
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._received is not None

    @property
    def name(self) -> str:
        """Name of the first signal, for the log; ``another rank`` when this process received none."""
        return self._received.name if self._received else "another rank"

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, otherwise 75: stopped after a checkpoint, the same command continues."""
        return EXIT_INTERRUPTED if self._received is signal.SIGINT else EXIT_PREEMPTED

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in WATCHED:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received is signal.SIGINT and self._received is signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is None or received is signal.SIGINT:
            self._received = received
