"""How every command of QaRL ends: with one message and an exit code, whatever its streams are.

The streams may be a closed pipe or a full disk: the exit code still tells how the command ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from qarl.errors import UserError


def say(text: str) -> None:
    """Print to stderr, which may be closed or full: the exit code then has to do."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def run_command(command: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """The exit code of `command` with `argv` (None: the process's own arguments).

    A `UserError` is printed as one message and gives 2, and so does a standard output that cannot be written. Ctrl-C
    gives 130. None of them shows a traceback.
    """
    try:
        code = _ended(command, sys.argv[1:] if argv is None else list(argv))
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


def _ended(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        return command(arguments)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
