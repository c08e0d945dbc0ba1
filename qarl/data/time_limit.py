"""A time limit on somebody else's function, such as a reward: `call_within`.

In the main thread it is a timer signal whose handler raises: that ends endless loops, sleeping, waiting for a socket
and regular expressions that backtrack for ever. It fires again every second, should the function swallow it. A timer
of the caller's is put back afterwards. A function that takes the alarm for itself (`signal.alarm`) ends ours: then its
running time is judged when it returns.

Elsewhere (verl scores responses in threads of a Ray worker) Python delivers no signal. The function runs in a thread
that is waited for no longer than the limit: the caller gets its error in time, whatever the function does. The thread
is told to stop, which ends it at its next line of Python; one that stays inside a C function is left behind, as a
daemon thread that does not keep the process alive. Only C code that never gives Python's lock back delays the error.
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
"""Seconds until the timer fires once more."""


class OutOfTimeError(Exception):
    """The function took longer than its limit."""


class _Stop(BaseException):
    """Raised inside the function; no `except Exception` of the function's holds it up."""


def call_within(seconds: float | None, function: Callable[[], Result]) -> Result:
    """`function()`, for at most `seconds`; None: without a limit. Whatever the function raises comes out as it is.

    Raises:
        OutOfTimeError: the function took longer, or returned too late.
    """
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
    """Lends the alarm to the code inside; the caller's timer resumes afterwards, less the time that took.

    Main thread only. A timer that would have run out meanwhile does so at once.
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
