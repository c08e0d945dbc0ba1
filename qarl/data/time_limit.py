"""Call a user's function, such as a reward, with a time limit: `call_within`.

In the main thread, a timer signal raises an exception inside the function. This interrupts endless loops, sleeps,
waiting for a socket, and slow regular expressions. The timer fires every second, in case the function catches the
exception. If the function sets an alarm itself (`signal.alarm`), the time is checked only when it returns.

Python delivers signals only to the main thread, but verl calls rewards in other threads. There, `call_within` runs the
function in a new thread and waits for it until the limit. Then it raises an error, and stops the new thread at its next
line of Python. If that thread is inside a C function, it continues as a daemon, which does not keep the process alive.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")
_AGAIN = 1.0
"""Seconds between two firings of the timer."""


class OutOfTimeError(Exception):
    """The function took longer than its limit."""


class _Stop(BaseException):
    """Raised inside the function to end it. `except Exception` in the function does not catch it."""


def call_within(seconds: float | None, function: Callable[[], Result]) -> Result:
    """Return `function()`, but stop it after `seconds` (None: no limit). Exceptions of the function are not caught.
    Raise OutOfTimeError if the function was stopped or returned too late."""
    if seconds is None:
        return function()
    if threading.current_thread() is not threading.main_thread():
        return _in_a_thread(seconds, function)
    started = time.monotonic()
    try:
        with _alarm(seconds):
            result = function()
    except _Stop:
        raise OutOfTimeError from None
    if time.monotonic() - started > seconds:
        raise OutOfTimeError
    return result


@contextmanager
def preserved_alarm() -> Iterator[None]:
    """Let the code inside use the alarm signal. Afterwards restore the caller's timer, less the time that has passed.

    Use this only in the main thread. If the caller's timer was due during the block, it fires right after the block.
    """
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            left = max(remaining - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Stop

    with preserved_alarm():
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _in_a_thread(seconds: float, function: Callable[[], Result]) -> Result:
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        raise OutOfTimeError
    result, error = outcome[0]
    if error is not None:
        raise error
    returned: Result = result
    return returned
