"""When and where a line of progress is written: with a clock of the test's own, into files and terminals."""

from __future__ import annotations

import io
import logging
import os
import pty
import select
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

import pytest

from qarl.console import note, say, stage, tell
from qarl.progress import live, screen
from qarl.progress.phases import Sampled
from qarl.progress.screen import ERASE, Display

TERMINAL = {"TERM": "xterm"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class OnlyWhenAsked(Display):
    """A display whose thread does not look, so that the test decides when."""

    def _watch(self, ended: threading.Event) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


def written_to(stream: TextIO, clock: Clock, environment: Mapping[str, str] = TERMINAL) -> Display:
    return OnlyWhenAsked(clock, environment, lambda: stream)


class Terminal:
    """A pseudo-terminal in the place of stderr, which is 60 columns wide."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def read(self) -> str:
        """Return what was written since the last call."""
        written = b""
        while select.select([self._master], [], [], 0.05)[0]:  # one read may return a part
            written += os.read(self._master, 65536)
        return written.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    opened = Terminal()
    monkeypatch.setattr(screen, "is_ours", lambda stream: os.isatty(stream.fileno()))
    monkeypatch.setattr(screen, "columns", lambda stream: 61)
    with opened.stream:
        yield opened


def test_a_file_gets_a_line_a_minute(file: io.StringIO, clock: Clock) -> None:
    display = written_to(file, clock)
    with (
        display.phase("step 3/100"),
        display.phase("update", total=8, unit="micro-batches") as update,
    ):
        for second in range(1, 151):
            clock.now += 1
            update.done = second // 30
            display.look()
    assert file.getvalue() == (
        "step 3/100, update (1 min 00 s): 2 of 8 micro-batches, about 3 min 00 s left\n"
        "step 3/100, update (2 min 00 s): 4 of 8 micro-batches, about 2 min 00 s left\n"
    )


def test_a_minute_counts_from_the_last_line_of_anything(file: io.StringIO, clock: Clock) -> None:
    display = written_to(file, clock)
    with display.phase("publishing"):
        clock.now += 59
        display.look()
        display.clear()
        clock.now += 59
        display.look()
        assert file.getvalue() == ""
        clock.now += 1
        display.look()
    assert file.getvalue() == "publishing (1 min 59 s)\n"


def test_quick_steps_say_nothing(file: io.StringIO, clock: Clock) -> None:
    display = written_to(file, clock)
    for number in range(10):
        with display.phase(f"step {number}"):
            clock.now += 50
            display.look()
    assert file.getvalue() == ""


def test_a_terminal_has_one_line_that_is_erased(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    with display.phase("step 1/2"), display.phase("update", total=4, unit="parts") as update:
        clock.now += 0.5
        display.look()
        assert terminal.read() == ""  # too early, or quick steps would flicker
        clock.now += 9.5
        update.advance()
        display.look()
        shown = "step 1/2, update (10 s): 1 of 4 parts, about 30 s left"
        assert terminal.read() == f"{ERASE}{shown}\r"
        display.clear()
        assert terminal.read() == ERASE
        display.clear()
        assert terminal.read() == ""
        clock.now += 10
        display.look()
        assert terminal.read().startswith(f"{ERASE}step 1/2, update (20 s)")
    assert terminal.read() == ERASE


def test_the_line_is_not_wider_than_the_terminal(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    with display.phase("evaluating 1000 prompts before the first step"), display.phase("sampling"):
        clock.now += 2
        display.look()
        text = terminal.read().removeprefix(ERASE).removesuffix("\r")
    assert text == "evaluating 1000 prompts before the first st…, sampling (2 s)"
    assert len(text) == 60


def test_an_error_leaves_the_terminal_clean(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    with pytest.raises(KeyboardInterrupt), display.phase("step 1/2"):
        clock.now += 2
        display.look()
        assert display.erasure() == ERASE
        raise KeyboardInterrupt
    assert terminal.read().endswith(ERASE)
    assert display.erasure() == ""


def test_an_outer_phase_closes_those_within(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    outer = display.phase("outer")
    with outer:
        display.phase("never closed").__enter__()
    clock.now += 100
    display.look()
    assert terminal.read() == ""


def test_a_record_of_logging_erases_the_line(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    factory = logging.getLogRecordFactory()
    logger = logging.Logger("a library's")
    logger.addHandler(logging.StreamHandler(terminal.stream))
    with display.phase("sampling"):
        clock.now += 2
        display.look()
        terminal.read()
        logger.warning("something")
        assert terminal.read().replace("\r\n", "\n") == f"{ERASE}something\n"
    assert logging.getLogRecordFactory() is factory


def test_every_line_of_the_console_erases_it_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "clear", lambda: os.write(2, b"erased "))
    say("to stderr")
    note("and a note")
    assert capfd.readouterr().err == "erased to stderr\nerased note: and a note\n"
    tell("to stdout")
    assert capfd.readouterr() == ("to stdout\n", "erased ")


def test_a_stage_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def phase(name: str, *, quiet: bool) -> AbstractContextManager[None]:
        opened.append((name, quiet))
        return nullcontext()

    monkeypatch.setattr(live, "phase", phase)
    with stage("loading", quiet=True), stage("reading"):
        pass
    assert opened == [("loading", True), ("reading", False)]


@pytest.mark.parametrize(
    "environment",
    [{}, {"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "xterm", "CI": "true"}],
)
def test_no_live_line(terminal: Terminal, clock: Clock, environment: dict[str, str]) -> None:
    display = written_to(terminal.stream, clock, environment)
    with display.phase("publishing"):
        clock.now += 59
        display.look()
        assert terminal.read() == ""
        clock.now += 1
        display.look()
        assert terminal.read().replace("\r\n", "\n") == "publishing (1 min 00 s)\n"


def test_no_live_line_beside_the_bars_of_others(terminal: Terminal, clock: Clock) -> None:
    display = written_to(terminal.stream, clock)
    with display.phase("loading", quiet=True), display.phase("reading"):
        clock.now += 59
        display.look()
        assert terminal.read() == ""
    display.lines_only = True
    with display.phase("sampling"):
        clock.now += 59
        display.look()
        assert terminal.read() == ""


def test_a_job_in_the_background_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal().stream as stream:
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp())
        assert screen.is_ours(stream)
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
        assert not screen.is_ours(stream)
    assert not screen.is_ours(io.StringIO())


def test_switched_off(file: io.StringIO, clock: Clock) -> None:
    display = written_to(file, clock)
    display.enabled = False
    with display.phase("publishing"):
        clock.now += 100
        display.look()
    assert file.getvalue() == ""


def test_responses_that_are_sampled(file: io.StringIO, clock: Clock) -> None:
    """The second phase knows the tokens of the first."""
    display = written_to(file, clock)
    # 8 responses of 50 tokens would be fewer than 600.
    counted = Sampled(2, 600, 100)
    for _ in range(2):
        with display.phase("sampling", total=8, unit="responses", measure=lambda: counted) as phase:
            clock.now += 60
            display.look()
            phase.sampled(1800)
    assert file.getvalue().splitlines() == [
        "sampling (1 min 00 s): 2 of 8 responses, 10 tokens/s, about 3 min 00 s left",
        "sampling (1 min 00 s): 2 of 8 responses, 10 tokens/s, about 2 min 00 s left",
    ]


def test_before_the_first_token_there_is_no_speed(file: io.StringIO, clock: Clock) -> None:
    display = written_to(file, clock)
    none = Sampled(0, 0, 0)
    with display.phase("sampling", total=8, unit="responses", measure=lambda: none):
        clock.now += 60
        display.look()
    assert file.getvalue() == "sampling (1 min 00 s): 0 of 8 responses\n"


def test_a_display_that_fails_does_not_end_the_work(
    file: io.StringIO, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LOOK_SECONDS", 0.01)
    display = Display(clock, TERMINAL, lambda: file)

    def fails() -> Sampled:
        raise RuntimeError("the engine was closed")

    with display.phase("sampling", total=8, unit="responses", measure=fails):
        deadline = time.monotonic() + 10
        while display.enabled and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "no more progress is shown (RuntimeError: the engine was closed)" in file.getvalue()


def test_a_closed_stream_is_no_error(file: io.StringIO, clock: Clock) -> None:
    file.close()
    display = written_to(file, clock)
    with display.phase("publishing"):
        clock.now += 100
        display.look()


def test_a_thread_runs_only_while_a_phase_is_open(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LOOK_SECONDS", 0.01)
    display = Display(environment=TERMINAL, stream=lambda: file)

    def running() -> int:
        return sum(thread.name == screen.THREAD for thread in threading.enumerate())

    with display.phase("publishing"), display.phase("within"):
        assert running() == 1
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running()
