"""Errors that a user can mend, and the exit codes of every door.

A door (``python -m jaggrl.train`` and its sisters) turns a :class:`UserError` into one line on stderr and
exit code 2; every other exception keeps its traceback, because it is ours to mend.
"""

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_OK = 0
EXIT_BAD_INPUT = 2  # a value or file the user gave cannot work
EXIT_PREEMPTED = 75  # stopped by a signal after a checkpoint: the same command goes on (EX_TEMPFAIL)
EXIT_INTERRUPTED = 130  # Ctrl-C


class UserError(Exception):
    """A value or file that cannot work: one line that names the value and the remedy."""

    rank: int | None = None
    """The rank that met it, once ranks are joined: the others may not have met it."""


def did_you_mean(name: str, choices: Iterable[str], *, limit: int = 12) -> str:
    """Remedy for an unknown name: the closest choice, or a bounded list of all of them.

    >>> did_you_mean("jag", ["exact", "jagg"])
    "did you mean 'jagg'?"
    """
    known = sorted({str(choice) for choice in choices})
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if not known:
        return "there are no choices"
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return "choose one of: " + ", ".join(known[:limit]) + more


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not among the choices: ``raise unknown("reward", "hps", REWARDS)``."""
    return UserError(f"unknown {kind} {name!r}: {did_you_mean(name, choices)}")
