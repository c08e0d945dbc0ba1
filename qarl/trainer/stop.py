"""Let a signal end a local run after its current step. verl's are answered in `qarl.verl.run`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from qarl.hangup import WORDS, hang_up, signals_that_stop
from qarl.progress import live

_AGAIN = "press Ctrl-C again to stop now"


class Stop:
    """A context in which Ctrl-C, SIGTERM or SIGHUP ends the run after its current step. It is true once the run must
    end.

    A step cannot be cut short without losing it. So the first signal lets the step end, which includes its evaluation,
    and a second one interrupts it. Outside a step there is nothing to save, and the first signal interrupts at once.

    `work`: what the first signal lets end and the message names, such as "after step 3". None: nothing, so the first
    signal raises KeyboardInterrupt. The second signal always raises it, except SIGHUP, which is often sent twice."""

    def __init__(self) -> None:
        self.work: str | None = None
        self._came = False
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._came

    def __enter__(self) -> Stop:
        for number in signals_that_stop():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self._came
        self._came = True
        answer = f"{self.work}; {_AGAIN}"
        if number == signal.SIGHUP:
            hang_up()
            if again:
                return
            answer = f"{WORDS}: {self.work}"
        if again or self.work is None:
            if callable(previous := self._previous[number]):
                previous(number, frame)
            raise KeyboardInterrupt
        with suppress(OSError):  # not print, because the signal may have interrupted a print
            os.write(2, f"{live.erasure()}\n{answer}\n".encode())
