"""The engines of this process that are not closed.

vLLM hides its objects from the garbage collector until its engine is shut down. Without `close_all` at the end of the
process, objects in reference cycles would outlive the interpreter, and nanobind would report each of them as leaked.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()
"""`RolloutEngine`s."""


def add(engine: Any) -> None:
    """Add a `RolloutEngine`, which is closed at the end of the process at the latest."""
    _close_at_exit()
    ENGINES.add(engine)


@cache
def _close_at_exit() -> None:
    """Register `close_all` with `atexit`, once. Python runs it before vLLM's exit functions, registered earlier."""
    atexit.register(close_all)


def close_all() -> None:
    for engine in list(ENGINES):
        with suppress(Exception):  # the engine may be broken, and it is too late to repair it
            engine.close()
    gc.unfreeze()
    gc.collect()
