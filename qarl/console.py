"""Output of a command whose streams may be a closed pipe or a full disk: the exit code still tells how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress


def say(text: str) -> None:
    """Print to stderr, which may be closed or full: the exit code then has to do."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def exit_code(command: Callable[[], int]) -> int:
    """That of `command`, or 2 where its standard output cannot be written."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except OSError:
        try:
            print(flush=True)  # is it standard output?
        except OSError as lost:
            # Python would flush once more at its end, and end with a code of no meaning.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say(f"error: standard output could not be written\n  why: {lost.strerror}")
            return 2
        raise
