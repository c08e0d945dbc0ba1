"""Time limits for calls of a user's functions in the trainer's own process: tools, and environments that are callables.

TRL calls tools in the main thread, without a limit, and a tool that hangs ends the run. Another thread would not do:
many libraries may be used only in the thread that opened them (sqlite3, browsers), and a thread cannot be stopped. So
an alarm interrupts the main thread, and the call really ends. It reaches every Python code, a wait for the network and
a regular expression, but not a loop in C code that asks for no signals. Coroutines run on TRL's event loop and are
cancelled.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, Protocol

from trl.trainer.utils import start_event_loop_in_daemon

from qarl.errors import UserError

AGAIN_S = 1.0
"""Seconds after which a call that has caught the first alarm gets another one."""
PING_S = 1.0
"""Seconds in which an event loop must answer, or it is given up because a coroutine blocks it."""


class TooLong(BaseException):
    """A call took longer than its limit."""


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TooLong in the block after `seconds`. None: no limit. Raise UserError outside of the main thread."""
    if seconds is None:
        yield
        return
    if not in_main_thread():
        raise UserError(
            "a call of a tool or environment cannot be limited in time",
            where="turn_timeout_s",
            why="the limit is an alarm, which only the main thread of a process gets",
            fix="train in the main thread, or set turn_timeout_s=None",
        )
    is_over = False

    def alarm(*_: object) -> None:
        if not is_over:
            raise TooLong

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, alarm)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            is_over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = left - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(rest, 1e-3), interval)


class HasLoop(Protocol):
    """What has an event loop in a thread of its own, as `GRPOTrainer` does."""

    async_loop: asyncio.AbstractEventLoop


class OwnLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.async_loop = started_loop()


def started_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a new daemon thread."""
    _, loop, ready = start_event_loop_in_daemon(name="qarl-turns")
    ready.wait()
    return loop


def gathered(
    owner: HasLoop, coroutines: Sequence[Coroutine[Any, Any, Any]], seconds: float | None
) -> list[Any]:
    """Run `coroutines` together on the owner's event loop. Return what each returned, or the exception that it raised:
    TooLong after `seconds`. A loop that a coroutine blocks is replaced by a new one."""
    if not coroutines:
        return []

    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(limited, coroutines)))

    async def limited(coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await asyncio.wait_for(_outcome(coroutine), seconds)
        except TimeoutError:  # only of `wait_for`
            return TooLong()

    future = asyncio.run_coroutine_threadsafe(together(), owner.async_loop)
    try:
        return future.result(None if seconds is None else seconds + PING_S)
    except FutureTimeout:
        owner.async_loop = started_loop()
        return [TooLong()] * len(coroutines)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what the coroutine returned or raised. SystemExit would end the loop."""
    try:
        return await coroutine
    except (Exception, SystemExit) as error:
        return error
