"""End a local run after its current step at Ctrl-C or SIGTERM.

A step cannot be cut short without losing it. So the first signal lets the step end, which includes its evaluation, and
a second one interrupts it. Outside a step there is nothing to save, and the first signal interrupts at once.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = "press Ctrl-C again to stop now"


class Stop:
    """A context in which signals end the run. It is true once the run must end.

    `work`: what the first signal lets end and the message names, such as "after step 3". None: nothing, so the first
    signal raises KeyboardInterrupt. `work` does not matter to the second signal, which always does."""

    def __init__(self) -> None:
        self.work: str | None = None
        self._came = False
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._came

    def __enter__(self) -> Stop:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell ignores SIGINT in its background jobs
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if again or self.work is None:
            if callable(previous := self._previous[number]):
                previous(number, frame)
            raise KeyboardInterrupt
        with suppress(OSError):  # not print, because the signal may have interrupted a print
            os.write(2, f"\n{self.work}; {_AGAIN}\n".encode())
