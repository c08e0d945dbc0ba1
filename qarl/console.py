"""Run a command of QaRL: handle `--help`, `--version`, errors and Ctrl-C, and return an exit code.

The exit code is right even if a stream is a closed pipe or a file on a full disk. This module imports almost nothing,
so Ctrl-C is also handled during a command's slow imports.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from qarl import __version__
from qarl.errors import UserError

TYPE_CHECKING = False  # importing typing would take longer than all other imports together
if TYPE_CHECKING:
    from pathlib import Path
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


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Say on stderr what a run is `doing` before its first step, and how long it took."""
    begun = time.perf_counter()
    say(f"{doing} ...")
    yield
    say(f"{doing}: {time.perf_counter() - begun:.1f} s")


def terminal_width(longest: int = 100) -> int:
    """Return the width for text: that of the terminal, but at most `longest` and at least 40."""
    import shutil

    return max(40, min(longest, shutil.get_terminal_size((longest, 24)).columns))


def fit_terminal(text: str) -> str:
    """Return `text` with its long lines wrapped to the terminal. A line's rest is indented as its last column."""
    import re
    import textwrap

    width = terminal_width()
    lines = []
    for line in text.splitlines():
        column = re.match(r" *(\S+ {2,})?", line)
        indent = " " * min(column.end() if column else 0, width // 2)
        wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += [line] if len(line) <= width else wrapped
    return "\n".join(lines)


def show(text: str) -> None:
    """Print the result of a run. A reader that has closed standard output, as `| head` does, has seen enough."""
    with suppress(BrokenPipeError):
        print(text, flush=True)


def summary_text(name: str, folder: Path, summary: Mapping[str, object], *, report: bool, argv: Sequence[str]) -> str:
    """Return the lines that a run prints at its end. `summary`: the content of summary.json. `folder`: the run's.
    `argv`: the arguments of `qarl train`, which resume the run if it is unfinished and has a checkpoint."""
    import shlex

    lines = [f"\n{name}: {summary['steps']} steps, written to {folder}"]
    shown = {key: value for key, value in summary.items() if value is not None and key != "steps"}
    if report:
        shown["report"] = folder / "report.html"
    if not summary.get("finished"):
        saved = any((folder / "checkpoints").glob("*step_*"))
        again = [argument for argument in argv if argument != "trainer.resume_mode=disable"]
        shown["to resume"] = shlex.join(["qarl", "train", *again]) if saved else "not possible: there is no checkpoint"
    lines += [f"  {key:36} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in shown.items()]
    return "\n".join(lines)


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
    code: int | None = None
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
            if isinstance(lost, BrokenPipeError) and (code is not None or _wants_help(arguments)):
                return code or 0  # the reader, such as a pager, has closed it, and the command has ended
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
            print(fit_terminal(describe([word for word in arguments if word not in HELP and "=" not in word])))
            return 0
        return command(arguments)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        say(f"error: the path is too long for this file system\n  where: {str(error.filename)[:300]}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
