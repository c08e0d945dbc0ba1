"""Run a command of QaRL: handle `--help`, `--version`, errors and Ctrl-C, and return an exit code.

The exit code is right even if a stream is a closed pipe or a file on a full disk. This module imports almost nothing,
so Ctrl-C is also handled during a command's slow imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from qarl import __version__
from qarl.errors import UserError

TYPE_CHECKING = False  # importing typing would take longer than all other imports together
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

HELP = ("-h", "--help")
VERSION = "--version"
INTERRUPTED = 130
Command = Callable[[list[str]], int]
Describe = Callable[[list[str]], str]


def say(text: str) -> None:
    """Print to stderr. Ignore failures (stream closed, disk full)."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a note for the user to stderr."""
    say(f"note: {text}")


def run_command(command: Command, argv: Sequence[str] | None, *, describe: Describe) -> int:
    """Run `command` with `argv` (None: the process's own arguments). Return the exit code.

    After a `UserError`, or if standard output cannot be written, print one message and return 2. After Ctrl-C, return
    130. Show no traceback.

    `describe`: a function that returns the help text. Its argument: the words other than `--help` and key=value.
    """
    if argv is not None:
        return _written(command, list(argv), describe)
    interrupts = _Interrupts()
    try:
        try:
            return _written(command, sys.argv[1:], describe)
        except BaseException:
            # A library may turn KeyboardInterrupt into a different exception, especially during its import.
            if not interrupts.came:
                raise
            say("interrupted")
            return INTERRUPTED
        finally:
            interrupts.leave_at_once()
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being handled
        return INTERRUPTED


class _Interrupts:
    """Handle Ctrl-C in a process that runs one command.

    During the command, Ctrl-C raises KeyboardInterrupt, as usual. After `leave_at_once`, it ends the process
    immediately, so that Python shows no traceback during its exit.
    """

    def __init__(self) -> None:
        self.came = False
        self.handles = False
        # In a background job the shell makes the process ignore SIGINT. Do not change that.
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
        os.write(2, b"interrupted\n")  # not print, because Ctrl-C may have interrupted a print
    os._exit(INTERRUPTED)


def _written(command: Command, arguments: list[str], describe: Describe) -> int:
    try:
        code = _ended(command, arguments, describe)
        sys.stdout.flush()
        return code
    except OSError:
        try:
            print(flush=True)  # find out whether standard output is the problem
        except OSError as lost:
            # Otherwise Python would flush again at its exit, fail, and replace the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(lost, BrokenPipeError) and _wants_help(arguments):
                return 0  # --help was piped into a pager, and the user has closed it
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
