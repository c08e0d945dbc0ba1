"""Where and when a line of progress is written.

On a terminal it is one line that is written again twice a second and erased before anything else is printed: all lines
of QaRL pass `Display.clear`, and so do the records of `logging`. The cursor waits at the start of the line, so that
whatever does not pass it overwrites the line instead of following it. In a file, in a background job, with NO_COLOR or
CI in the environment and on a dumb terminal it is an ordinary line a minute, and none within a minute of another line.

A thread writes it, which runs while a phase is open. So the work itself only counts, and never waits for a display.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from qarl.progress import text
from qarl.progress.phases import Measure, Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

LOOK_SECONDS = 0.5
"""Seconds between two looks at what is done."""
QUIET_SECONDS = 1.0
"""Seconds without another line after which the live line appears, so that it does not flicker between quick steps."""
LINE_SECONDS = 60.0
"""Seconds without another line after which a file gets a line."""
ERASE = "\r\x1b[K"
"""Moves the cursor to the start of its line and erases the line."""
THREAD = "qarl-progress"
OTHER_WIDTH = 80
"""Columns of a terminal that does not say how many it has."""


class Display:
    """The open phases of a process, and the line that shows them on stderr.

    clock           returns seconds
    enabled         whether anything is shown
    lines_only      whether a terminal also gets a line a minute instead of the live line
    tokens_before   tokens of the last phase with the same name and number of responses
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] = os.environ,
        stream: Callable[[], TextIO] = lambda: sys.stderr,
    ) -> None:
        """`environment`: decides whether there is a live line. `stream`: returns where to write."""
        self.clock = clock
        self.enabled = True
        self.lines_only = False
        self.tokens_before: dict[tuple[str, int | None], int] = {}
        self._environment = environment
        self._stream = stream
        self._phases: list[Phase] = []
        self._lock = threading.RLock()  # a signal's handler may interrupt its own thread
        self._ended = threading.Event()
        self._wrote_at = 0.0
        self._drawn = False
        self._restore: Callable[[], None] = _nothing

    def phase(
        self,
        name: str,
        *,
        total: int | None = None,
        unit: str = "",
        measure: Measure | None = None,
        quiet: bool = False,
    ) -> Phase:
        """Return a context that lasts as long as the phase.

        `total`: number of units of work, or None if it is unknown. `unit`: what they are called, in the plural. Without
        it nothing is counted. `measure`: counts responses that are being sampled, instead of `Phase.advance`. `quiet`:
        whether other programs write to the terminal meanwhile, so that there must be no live line."""
        return Phase(self, name, total, unit, measure, quiet)

    def advance(self, count: int = 1) -> None:
        """Count `count` units of the innermost phase as done. Without a phase do nothing."""
        if self._phases:
            self._phases[-1].advance(count)

    def open(self, phase: Phase) -> None:
        """Show `phase`. Start the thread if this is the outermost."""
        with self._lock:
            self._phases.append(phase)
            if len(self._phases) > 1 or not self.enabled:
                return
            self._wrote_at = self.clock()
            self._ended = threading.Event()
            if self.is_live():
                self._restore = clear_before_records(self.clear)
        threading.Thread(target=self._watch, args=(self._ended,), name=THREAD, daemon=True).start()

    def close(self, phase: Phase) -> None:
        """Forget `phase` and all that are still open within it. After the outermost, leave the terminal as it was."""
        with self._lock:
            if phase in self._phases:
                del self._phases[self._phases.index(phase) :]
            if self._phases:
                return
            self._ended.set()
            self._restore()
            self._restore = _nothing
            self._erase()

    def clear(self) -> None:
        """Erase the live line. Call this before anything else is printed."""
        self._wrote_at = self.clock()
        if self._drawn:
            with self._lock:
                self._erase()

    def erasure(self) -> str:
        """Return what erases the live line, for a signal's handler, which must not wait for anything."""
        return ERASE if self._drawn else ""

    def look(self) -> None:
        """Count what is done, and write the line if it is time."""
        with self._lock:
            if not self._phases or not self.enabled:
                return
            self._phases[-1].measure()
            silence = self.clock() - self._wrote_at
            if self.is_live():
                if silence >= QUIET_SECONDS:
                    self._draw()
            elif silence >= LINE_SECONDS:
                self._erase()
                self._write(self.line(None) + "\n")
                self._wrote_at = self.clock()

    def line(self, width: int | None) -> str:
        """Return the line about the open phases, in at most `width` columns."""
        names = [phase.name for phase in self._phases]
        innermost = self._phases[-1]
        return text.line(names, innermost.elapsed(), innermost.figures(), width)

    def is_live(self) -> bool:
        """Return whether there is a live line now, and not a line a minute."""
        if self.lines_only or any(phase.quiet for phase in self._phases):
            return False
        environment = self._environment
        if any(environment.get(name) for name in ("NO_COLOR", "CI")):
            return False
        return environment.get("TERM", "") not in ("", "dumb") and is_ours(self._stream())

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # a display must not end a run
                self.enabled = False
                self.clear()
                why = f"{type(error).__name__}: {error}"
                self._write(f"note: no more progress is shown ({why})\n")

    def _draw(self) -> None:
        width = columns(self._stream())
        self._drawn = True
        self._write(f"{ERASE}{self.line(width - 1)}\r")

    def _erase(self) -> None:
        if self._drawn:
            self._write(ERASE)
            self._drawn = False

    def _write(self, words: str) -> None:
        stream = self._stream()
        with suppress(OSError, ValueError):  # closed, or no room on the disk
            stream.write(words)
            stream.flush()


def is_ours(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that this process may write to: not that of a job in the background."""
    try:
        descriptor = stream.fileno()
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def columns(stream: TextIO) -> int:
    """Return the width of a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or OTHER_WIDTH
    except (OSError, ValueError):
        return OTHER_WIDTH


def clear_before_records(clear: Callable[[], None]) -> Callable[[], None]:
    """Let `logging` call `clear` before every record that it makes. Return the function that undoes this.

    `logging.setLogRecordFactory` is the one place that all loggers pass, also those with handlers of their own."""
    import logging

    before = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        clear()
        return before(*args, **kwargs)

    def undo() -> None:
        if logging.getLogRecordFactory() is record:
            logging.setLogRecordFactory(before)

    logging.setLogRecordFactory(record)
    return undo


def _nothing() -> None:
    pass
