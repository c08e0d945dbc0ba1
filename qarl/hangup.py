"""The terminal of a run is closed, or its SSH connection is lost: SIGHUP. What is still written must not fail.

A closed terminal often sends SIGHUP twice, from the shell and from the kernel. So a second one is no wish to hurry.
"""

from __future__ import annotations

import os
import select
import signal

INTERRUPTED = 130
HUNG_UP = 129
"""What shells report of a program that SIGHUP has ended."""
WORDS = "the terminal was closed (SIGHUP)"


class _HangUp:
    """`came`: SIGHUP has come in this process."""

    came = False


def hang_up() -> None:
    """Remember that SIGHUP came. Let standard output and standard error lead nowhere where nobody can read them.

    Files, and a terminal that is still there (`kill -HUP`), get what is written as before."""
    _HangUp.came = True
    for descriptor in (1, 2):
        if _is_dead(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def interrupted_code() -> int:
    """Return the exit code of a command that a signal has ended."""
    return HUNG_UP if _HangUp.came else INTERRUPTED


def signals_that_stop() -> list[signal.Signals]:
    """Return the signals that end a run, without those that the process ignores: a shell ignores SIGINT in its
    background jobs, and nohup SIGHUP."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _is_dead(descriptor: int) -> bool:
    """Return whether a write to `descriptor` fails: a terminal that is gone, or a pipe that nobody reads."""
    poll = select.poll()
    poll.register(descriptor, 0)
    dead = select.POLLERR | select.POLLHUP
    return any(event & dead for _, event in poll.poll(0))
