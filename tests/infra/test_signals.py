"""A signal only sets a flag; a second Ctrl-C interrupts; handlers are given back."""

import os
import signal
import threading

import pytest

from jaggrl.infra.signals import StopSignal


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_signal_sets_the_flag(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert (stop.name, stop.exit_code) == (number.name, code)
    assert signal.getsignal(number) is before


def test_repeated_term_is_one_request_and_second_interrupt_raises() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_rank_without_a_signal_leaves_with_the_preempted_code() -> None:
    with StopSignal() as stop:
        assert (stop.name, stop.exit_code) == ("another rank", 75)


def test_outside_the_main_thread_it_only_never_fires() -> None:
    seen = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
