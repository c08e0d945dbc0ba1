"""What a call of a reward function leads to: a score, or a refusal in words.

Both are plain data, because they travel from a worker process to the trainer. So whatever must look at the function's
own objects (its result, its exception) is done here, in the process that called it.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import struct
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from qarl.data.worker_roles import EVERY_RESPONSE
from qarl.errors import shortened

LONGEST_MESSAGE = 500
"""Characters of an exception's message that are shown."""


class Scored(NamedTuple):
    """`score`: a number that FP32 holds. `more`: the function's dict, if it returned one, or None."""

    score: float
    more: dict[Any, Any] | None = None


class Refused(NamedTuple):
    """Why there is no score. `what` continues the words "the reward function NAME"."""

    what: str
    why: str
    fix: str


class Lost(Refused):
    """The call took too long, or ended its process, so nothing came back."""


Outcome = Scored | Refused
ASYNC = Refused(
    "is async",
    "a reward function is called without an event loop, so nothing would await its result",
    "write `def` instead of `async def`, and call asyncio.run(...) inside it for what must be awaited",
)


PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Of a reward function, in the order in which it is usually written. Backends pass them by name, in any order."""


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Return the outcome of `function(**arguments)`.

    Catches every exception, also `SystemExit` and `KeyboardInterrupt`, so it is only for a process of its own."""
    try:
        return outcome_of(function(**arguments))
    except BaseException as error:
        return lacks_parameters(error, arguments) or raised(error)


def lacks_parameters(error: BaseException, arguments: Mapping[str, Any]) -> Refused | None:
    """Return the refusal of a function that does not take the `arguments`, or None for any other error.

    `error`: caught in the function that made the call."""
    trace = error.__traceback__
    if not isinstance(error, TypeError) or trace is None or trace.tb_next is not None:
        return None
    usual = [name for name in PARAMETERS if name in arguments]
    others = [name for name in arguments if name not in PARAMETERS]
    named = ", ".join([*others, *usual])
    fix = f"give it the parameters {named}, or **kwargs"
    return Refused("raised TypeError", str(error), fix)


def outcome_of(result: Any) -> Outcome:
    """Return the score in the `result` of a reward function, or the refusal of a result that has none."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # otherwise Python warns that it was never awaited
        return ASYNC
    score: Any = result.get("score") if isinstance(result, Mapping) else result
    if not is_number(score):
        why = (
            "a reward must be a finite number that FP32 can hold, or a dict with one under 'score'"
        )
        fix = "make it return a number for every response, even an empty or garbled one"
        return Refused(f"returned {shortened(result)}", why, fix)
    if not isinstance(result, Mapping):
        return Scored(float(score))
    more = {key: _plain(value) for key, value in result.items()}
    try:
        check_can_travel(more)
    except Exception as error:  # pickle calls the code of the objects
        why = f"the values beside 'score' must be numbers, text, NumPy arrays, or lists and dicts of these ({error})"
        return Refused(f"returned {shortened(result)}", why, "convert them, or leave them out")
    return Scored(float(score), more)


def raised(error: BaseException) -> Refused:
    """Return the refusal of an exception. It names the last line of the user's code that the traceback passes."""
    try:
        message = str(error)
    except Exception:  # the user's class
        message = "its message cannot be shown"
    location = _location(error.__traceback__)
    fix = EVERY_RESPONSE
    if isinstance(error, BdbQuit):
        message = "a debugger has no terminal in the process that calls the function"
        fix = "remove breakpoint() or pdb.set_trace() from it"
    return Refused(f"raised {type(error).__name__}", f"{message[:LONGEST_MESSAGE]}{location}", fix)


def _location(trace: TracebackType | None) -> str:
    """Return file, line and source of the last frames: of the innermost, and of the innermost outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != __file__]
    if not frames:
        return ""
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not _of_python(frame.filename)
    ]
    last = (own or frames)[-1]
    inner = frames[-1]
    text = f" (at {last.filename}, line {last.lineno}, in {last.name}: {last.line}"
    if inner is not last:
        text += f"; inside it {inner.filename}, line {inner.lineno}, in {inner.name}"
    return text + ")"


def _of_python(filename: str) -> bool:
    return filename.startswith((os.path.dirname(os.__file__), "<frozen"))


def is_number(score: Any) -> bool:
    """Return whether `score` is a finite number in the range of FP32, which the advantages are computed in."""
    if isinstance(score, str | bytes | bytearray):
        return False
    try:
        number = float(score)
        struct.pack("<f", number)  # OverflowError beyond FP32
    except Exception:  # `float` calls the code of the object
        return False
    return number - number == 0.0  # neither NaN nor Inf


def _plain(value: Any) -> Any:
    """Return tensors as NumPy arrays, or as numbers if they have no dimension. Everything else stays as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if value.ndim == 0:
        return value.item()
    return value.float().numpy() if value.is_floating_point() else value.numpy()


def check_can_travel(value: Any) -> None:
    """Raise an exception unless the trainer's process can read `value`, which does not have the user's classes."""
    _PlainReader(io.BytesIO(pickle.dumps(value))).load()


class _PlainReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        if root == "numpy" or root in sys.stdlib_module_names:
            return super().find_class(module, name)
        raise TypeError(f"{module}.{name} is a class that only the reward's process knows")
