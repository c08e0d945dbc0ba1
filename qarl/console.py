"""How every command of QaRL starts and ends: help and version first, then one message and an exit code.

The streams may be a closed pipe or a full disk: the exit code still tells how the command ended. This module imports
almost nothing, so that a command can call `run_command` before it imports anything slow: Ctrl-C is then handled from
the first moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from qarl import __version__
from qarl.errors import UserError

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

HELP = ("-h", "--help")
VERSION = "--version"
INTERRUPTED = 130
Command = Callable[[list[str]], int]
Describe = Callable[[list[str]], str]


def say(text: str) -> None:
    """Print to stderr, which may be closed or full: the exit code then has to do."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def run_command(command: Command, argv: Sequence[str] | None, *, describe: Describe) -> int:
    """The exit code of `command` with `argv` (None: the process's own arguments).

    A `UserError` is printed as one message and gives 2, and so does a standard output that cannot be written. Ctrl-C
    gives 130. None of them shows a traceback. With argv=None that also holds for Ctrl-C while the process ends.

    Args:
        describe: gives the text for `--help`, from the arguments beside it that are not key=value.
    """
    if argv is not None:
        return _written(command, list(argv), describe)
    interrupts = _Interrupts()
    try:
        try:
            return _written(command, sys.argv[1:], describe)
        except BaseException:
            # A library may turn KeyboardInterrupt into another error, above all while it is being imported.
            if not interrupts.came:
                raise
            say("interrupted")
            return INTERRUPTED
        finally:
            interrupts.leave_at_once()
    except KeyboardInterrupt:  # a second one, while the first was dealt with
        return INTERRUPTED


class _Interrupts:
    """Ctrl-C in a process that belongs to one command. It raises KeyboardInterrupt, as without this class.

    Once the command has ended, nothing is left to clean up: `leave_at_once` makes Ctrl-C end the process there and
    then, without the traceback of whatever Python is doing at its exit.
    """

    def __init__(self) -> None:
        self.came = False
        self.handles = False
        # In a background job the shell has SIGINT ignored, and it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, self._interrupt)
                self.handles = True

    def leave_at_once(self) -> None:
        if self.handles:
            signal.signal(signal.SIGINT, _leave)

    def _interrupt(self, signum: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted\n")  # not print: it may be what was interrupted
    os._exit(INTERRUPTED)


def _written(command: Command, arguments: list[str], describe: Describe) -> int:
    try:
        code = _ended(command, arguments, describe)
        sys.stdout.flush()
        return code
    except OSError:
        try:
            print(flush=True)  # is it standard output?
        except OSError as lost:
            # Python would flush once more at its end, and end with a code of no meaning.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(lost, BrokenPipeError) and _wants_help(arguments):
                return 0  # --help was piped into a pager, and its reader has read enough
            say(f"error: standard output could not be written\n  why: {lost.strerror}")
            return 2
        raise


def _wants_help(arguments: list[str]) -> bool:
    return any(word in arguments for word in HELP)


def _ended(command: Command, arguments: list[str], describe: Describe) -> int:
    try:
        if VERSION in arguments:
            print(f"qarl {__version__}")
            return 0
        if _wants_help(arguments):
            print(describe([word for word in arguments if word not in HELP and "=" not in word]))
            return 0
        return command(arguments)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
