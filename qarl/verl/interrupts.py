"""Ctrl-C, SIGTERM and SIGHUP in the program that starts verl: they are answered at once, and end the run in order.

Ray sets handlers of its own when it starts, and SIGTERM, which schedulers, `docker stop` and `timeout` send, would then
end the program in the middle of its last files: Ray's native handler prints the stack and aborts the program three
seconds later, and its Python handlers raise SystemExit (`ray/_private/node.py`, `ray/_private/worker.py`).
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from qarl.hangup import hang_up, signals_that_stop


@contextmanager
def answered_interrupt(what_resumes: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP say at once that the run stops and what a repeated command does. Ray
    needs a while to end. Yield a function to call when Ray has started: it sets the handlers again.

    verl's step cannot be finished from outside, so KeyboardInterrupt is raised. A SIGTERM while Ray starts meets Ray's
    handlers, whose SystemExit is answered here, too."""
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in signals_that_stop()}

    def answer() -> None:
        text = f"\nstopping verl now, in the middle of its step; if you repeat the command, {what_resumes()}\n"
        with suppress(OSError):  # not print, because the signal may have interrupted a print
            os.write(2, text.encode())

    def handle(number: int, frame: FrameType | None) -> None:
        if (
            number == signal.SIGHUP
        ):  # it is often sent twice, and the last files are still to be written
            del previous[number]
            signal.signal(number, signal.SIG_IGN)
            hang_up()
        else:
            signal.signal(number, previous[number])
        answer()
        raise KeyboardInterrupt

    def handle_all() -> None:
        for number in previous:
            signal.signal(number, handle)

    handle_all()
    try:
        yield handle_all
    except SystemExit as ended:
        if not _comes_of_ray(ended):
            raise
        signal.alarm(0)  # with which Ray's native handler would abort the program
        answer()
        raise KeyboardInterrupt from None
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _comes_of_ray(ended: SystemExit) -> bool:
    """Return whether a handler of Ray has raised it: with SIGTERM as its code, or with 1 inside Ray."""
    files = [frame.filename for frame in traceback.extract_tb(ended.__traceback__)]
    inside = bool(files) and "/ray/" in files[-1]
    return ended.code == signal.SIGTERM or (ended.code == 1 and inside)


class AfterStart:
    """An actor's class for `run_ppo`, which asks for the actor as soon as Ray runs: `started` is called before."""

    def __init__(self, actor_class: Any, started: Callable[[], None]) -> None:
        self._actor_class = actor_class
        self._started = started

    def remote(self) -> Any:
        self._started()
        return self._actor_class.remote()

    def options(self, **options: Any) -> AfterStart:
        return AfterStart(self._actor_class.options(**options), self._started)
