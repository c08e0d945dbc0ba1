"""Says what verl is doing before its first step, and answers Ctrl-C and SIGTERM.

verl's trainer starts in processes of Ray and says nothing of its progress. But each of its parts is a named actor of
Ray, so the names that exist tell how far the start is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from qarl.console import say

STAGES = (
    ("", "starting verl's task, which reads the data"),
    ("WorkerDict", "starting the trainer's processes and loading the model"),
    ("vllm_server_", "starting the rollout engines (vLLM)"),
    ("agent_loop_worker_", "publishing the weights, then the first evaluation or step"),
)
"""Part of the name of an actor, and what verl does once it exists, in order. Ray itself starts before them."""


class StartUp:
    """Call `look` from time to time, and `end` after the first step. `actors`: returns the names of Ray's actors, or
    None while Ray starts."""

    def __init__(self, actors: Callable[[], Sequence[str] | None] | None = None) -> None:
        self._actors = actors or _named_actors
        self._stage, self._begun, self._ended = -1, time.monotonic(), False
        say("starting Ray ...")

    def look(self) -> None:
        """Print a line if verl has come further."""
        names = None if self._ended else self._actors()
        if names is not None:
            reached = max(i for i, (part, _) in enumerate(STAGES) if not part or any(part in name for name in names))
            while self._stage < reached:
                self._next()
                say(f"{STAGES[self._stage][1]} ...")

    def end(self) -> None:
        """Print how long the last part took. Only the first call does so."""
        if not self._ended:
            self._ended = True
            self._next()

    def _next(self) -> None:
        doing = "starting Ray" if self._stage < 0 else STAGES[self._stage][1]
        now = time.monotonic()
        say(f"{doing}: {now - self._begun:.0f} s")
        self._stage, self._begun = self._stage + 1, now


def _named_actors() -> Sequence[str] | None:
    import ray

    with suppress(Exception):  # while Ray starts or ends
        if ray.is_initialized():
            names: list[str] = ray.util.list_named_actors()
            return names
    return None


@contextmanager
def answered_interrupt(what_resumes: Callable[[], str]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM say at once that the run stops and what a repeated command does. Ray needs a
    while to end.

    verl's step cannot be finished from outside, so KeyboardInterrupt is raised. `ray.init` replaces the handler of
    SIGTERM by one that raises SystemExit(SIGTERM) (ray/_private/worker.py), which is answered here, too."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def answer() -> None:
        text = f"\nstopping verl now, in the middle of its step; if you repeat the command, {what_resumes()}\n"
        with suppress(OSError):  # not print, because the signal may have interrupted a print
            os.write(2, text.encode())

    def handle(number: int, frame: FrameType | None) -> None:
        before = previous[signal.Signals(number)]
        signal.signal(number, before)
        answer()
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    handled = [number for number, before in previous.items() if before is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        answer()
        raise KeyboardInterrupt from None
    finally:
        for number in handled:
            signal.signal(number, previous[number])
