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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
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
    """Why there is no score. `what` continues the words "the reward function NAME". `name`: of the function, if there
    are several. `responses`: how many the call was about."""

    what: str
    why: str
    fix: str
    name: str = ""
    responses: int = 1


class Lost(Refused):
    """The call took too long, or ended its process, so nothing came back."""


Outcome = Scored | Refused
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Of a reward function, in the order in which it is usually written. Backends pass them by name, in any order."""
OF_ALL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The same of a function that scores all answers of a batch at once, as verl's batch manager passes them."""


def scores_all(function: Callable[..., Any]) -> bool:
    """Return whether the function scores all answers of a batch at once: it has a parameter `solution_strs`."""
    try:
        return OF_ALL[1] in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def of_all(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the arguments of a function that scores all answers at once. `rows`: those of each answer."""
    return {many: [row[one] for row in rows] for one, many in zip(PARAMETERS, OF_ALL, strict=True)}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Return the outcome of `function(**arguments)`, which may be async.

    Catches every exception, also `SystemExit` and `KeyboardInterrupt`, so it is only for a process of its own."""
    try:
        return outcome_of(awaited(function(**arguments)))
    except BaseException as error:
        return lacks_parameters(error, arguments) or raised(error)


def call_all(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Outcome | list[Outcome] | Refused:
    """Return the outcome of each answer of `function(**arguments)`, which scores all at once and may be async.

    With the arguments of a single answer, return its outcome."""
    if OF_ALL[1] not in arguments:
        outcomes = call_all(function, of_all([arguments]))
        return outcomes[0] if isinstance(outcomes, list) else outcomes
    count = len(arguments[OF_ALL[1]])
    try:
        result = awaited(function(**arguments))
        plain = isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable)
        values = None if plain else list(result)
    except BaseException as error:
        return lacks_parameters(error, arguments) or raised(error)
    if values is None or len(values) != count:
        what = shortened(result) if values is None else f"{len(values)} scores"
        return Refused(
            f"returned {what} for {count} responses",
            "a function with the parameter solution_strs scores all responses at once",
            "return a list with a number, or a dict with one under 'score', for each response in order",
        )
    return [outcome_of(value) for value in values]


@cache
def event_loop() -> Any:
    """Return the event loop of this process. All calls share it, because clients of servers stay bound to theirs."""
    import asyncio  # most functions do without it

    return asyncio.new_event_loop()


def awaited(result: Any) -> Any:
    """Return `result`, or what it is when it is awaited."""
    return (
        event_loop().run_until_complete(_await(result)) if inspect.isawaitable(result) else result
    )


async def _await(result: Any) -> Any:
    return await result


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
