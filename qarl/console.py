"""Run a command of QaRL: handle `--help`, `--version`, errors, Ctrl-C and SIGTERM, and return an exit code.

This module imports almost nothing, so Ctrl-C is also handled during a command's slow imports.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from qarl import __version__
from qarl.errors import UserError
from qarl.hangup import HUNG_UP, hang_up, interrupted_code
from qarl.progress import live

TYPE_CHECKING = False  # importing typing would take longer than all other imports together
if TYPE_CHECKING:
    from pathlib import Path
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import NoReturn

HELP = ("-h", "--help")
VERSION = "--version"
READER_LEFT = 141
"""What shells report of a program that SIGPIPE has ended."""
Command = Callable[[list[str]], int]
Describe = Callable[[list[str]], str]


def say(text: str) -> None:
    """Print to stderr. Ignore failures (stream closed, disk full)."""
    live.clear()
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a note for the user to stderr."""
    say(f"note: {text}")


def tell(text: str) -> None:
    """Print to standard output."""
    live.clear()
    print(text, flush=True)


@contextmanager
def stage(doing: str, *, imports: bool = False, quiet: bool = False) -> Iterator[None]:
    """Say on stderr what a run is `doing` before its first step, and how long it took.

    `quiet`: whether other programs write to the terminal meanwhile, so that there must be no live line.
    `imports`: whether most of this is importing. Then Python's garbage collector pauses: imports create many objects
    and little garbage, and take an eighth longer while it runs."""
    begun = time.perf_counter()
    paused = imports and gc.isenabled()
    say(f"{doing} ...")
    if paused:
        gc.disable()
    try:
        with live.phase(doing, quiet=quiet):
            yield
    finally:
        if paused:
            gc.enable()
    say(f"{doing}: {time.perf_counter() - begun:.1f} s")


def fit_terminal(text: str, longest: int = 100) -> str:
    """Return `text` with its long lines wrapped to the terminal. A line's rest is indented as its last column."""
    import functools
    import re
    import shutil
    import textwrap

    width = max(40, min(longest, shutil.get_terminal_size((longest, 24)).columns))
    fill = functools.partial(
        textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False
    )
    columns = (
        (line, len(re.sub(r"^( *(\S+ {2,})?).*", r"\1", line))) for line in text.splitlines()
    )
    return "\n".join(
        fill(line, subsequent_indent=" " * min(column, width // 2)) for line, column in columns
    )


def summary_text(
    name: str, folder: Path, summary: Mapping[str, object], *, report: bool, argv: Sequence[str]
) -> str:
    """Return the lines that a run prints at its end. `summary`: the content of summary.json. `folder`: the run's.
    `argv`: the arguments of `qarl train` that resume the run if it is unfinished and has a checkpoint
    (`qarl.trainer.repeat`)."""
    import shlex

    lines = [f"\n{name}: {summary['steps']} steps, written to {folder}"]
    shown = {key: value for key, value in summary.items() if value is not None}
    shown.pop("steps", None)
    if report:
        shown["report"] = folder / "report.html"
    if not summary.get("finished"):
        saved = any((folder / "checkpoints").glob("*step_*"))
        shown["to resume"] = (
            shlex.join(["qarl", "train", *argv])
            if saved
            else "not possible: there is no checkpoint"
        )
    lines += [
        f"  {key:36} {f'{value:.4g}' if isinstance(value, float) else value}"
        for key, value in shown.items()
    ]
    return "\n".join(lines)


def entry(
    command: Command, about: str | None, describe: Describe | None = None
) -> tuple[Callable[..., int], Describe]:
    """Return a module's `main`, which runs `command` and returns the exit code, and its `describe`. Without an argument
    `main` takes the process's own.

    `about`: the docstring of the module, which is its help. `describe`: what returns the help if that is more."""
    told = describe or (lambda topics: (about or "").strip())
    return lambda argv=None: run_command(command, argv, describe=told), told


def run_command(command: Command, argv: Sequence[str] | None, *, describe: Describe) -> int:
    """Run `command` with `argv` (None: the process's own arguments). Return the exit code.

    Arguments that are not written KEY=VALUE are refused first (`qarl.command_line`).
    After a `UserError`, print one message and return 2. After Ctrl-C or SIGTERM, return 130, and 129 after SIGHUP: in
    both cases the command first removes unfinished work. If nobody reads the output any more, return 141. Show no
    traceback.

    `describe`: a function that returns the help text. Its argument: the words other than `--help` and key=value.
    """
    handled = _unhandled_signals() if argv is None else []
    for number in handled:
        signal.signal(number, _interrupt)
    if handled:
        sys.unraisablehook = _again_if_lost
    try:
        return _run(command, list(sys.argv[1:] if argv is None else argv), describe)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            return HUNG_UP if interrupted_code() == HUNG_UP else READER_LEFT
        # A library may turn KeyboardInterrupt into a different exception, especially during its import.
        if _comes_of_interrupt(error) or (_Pressed.once and not isinstance(error, UserError)):
            _say_interrupted()
            return interrupted_code()
        if isinstance(error, UserError):
            say(f"error: {error}")
            return 2
        raise
    finally:
        _flush()
        for number in handled:
            signal.signal(number, _leave)  # or Python would show a traceback during its exit


def _unhandled_signals() -> list[signal.Signals]:
    """Return the signals that would end this process by Python's own handlers, or without any.

    A shell makes its background jobs ignore SIGINT, and nohup SIGHUP: these stay as they are."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    own = (signal.SIG_DFL, signal.default_int_handler)
    return [number for number in numbers if signal.getsignal(number) in own]


def _flush() -> None:
    """Write what standard output still buffers. Its reader, such as `head`, may have seen enough."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python would fail again at its exit


def _reader_has_left() -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Pressed:
    """The first signal that this process has received. `once`: whether it has raised KeyboardInterrupt. `number`: the
    signal's number. `announced`: whether the message has been written."""

    once = False
    number: int = signal.SIGINT
    announced = False


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """The first signal raises KeyboardInterrupt, as Ctrl-C usually does. Every later one ends the process at once, also
    where a part of the program has set this handler again; but not SIGHUP, which is often sent twice."""
    if signum == signal.SIGHUP:
        hang_up()
        if _Pressed.once:
            return
    if _Pressed.once:
        _leave(signum, frame)
    _Pressed.once = True
    _Pressed.number = signum
    raise KeyboardInterrupt


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    if not _Pressed.announced:
        words = f"{live.erasure()}interrupted\n"
        os.write(2, words.encode())  # not print, because Ctrl-C may have interrupted a print
    os._exit(interrupted_code())


def _say_interrupted() -> None:
    """Say it once, whatever is pressed meanwhile."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    say("interrupted")
    _Pressed.announced = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """Return whether `error` is a KeyboardInterrupt, or what a library has raised in its place."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _again_if_lost(lost: UnraisableHookArgs) -> None:
    """Raise a KeyboardInterrupt again that came in a `__del__` or a callback, where Python shows a traceback and goes
    on. Everything else is shown as usual."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import threading

    def press() -> None:
        _Pressed.once = False
        signal.pthread_kill(main_thread, _Pressed.number)

    main_thread = threading.main_thread().ident or 0

    threading.Timer(0.01, press).start()  # after the callback, which would lose it again


def _run(command: Command, arguments: list[str], describe: Describe) -> int:
    if VERSION in arguments:
        print(f"qarl {__version__}")
    elif any(word in arguments for word in HELP):
        print(
            fit_terminal(
                describe([word for word in arguments if word not in HELP and "=" not in word])
            )
        )
    else:
        from qarl.command_line import check_words

        check_words(arguments)
        return command(arguments)
    return 0
