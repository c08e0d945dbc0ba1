"""Score a response with the scorer of its task in reasoning-gym: `reward.function=reasoning_gym`.

Everything that the scorer needs is in the row's `extra_info`, as `qarl data reasoning_gym` writes it: the task and its
parameters, the entry, and how the answer is found in a response. So the score is the same in every backend.

It departs from the library in two points. Some of its scorers raise an exception for text that is no answer, such as
`prime_factorization` for a word. And some evaluate what the response states, such as `countdown`, so 9**9**9**9 keeps
them busy for ever. Both score 0, or one response of a model could end a run. The limit is in seconds of the processor,
a hundred times what a scorer needs, so no score depends on how busy the machine is. If a scorer fails for all
responses, no ground truth is right either, and the check of ground truths, before a run, says so.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FrameType
from typing import Any

from qarl.data.answer_forms import last_number
from qarl.data.entry_text import from_text
from qarl.data.reasoning_gym_tasks import library, make_dataset
from qarl.errors import UserError

TASK = "task"
PARAMETERS = "parameters"
ENTRY = "entry"
ANSWER_IN = "answer_in"
KEYS = (TASK, PARAMETERS, ENTRY, ANSWER_IN)
"""What the scorer reads of a row's `extra_info`; all are texts."""
CPU_SECONDS = 2.0
_AGAIN_SECONDS = 0.05
_CACHED = 64


def in_tags(response: str) -> str | None:
    """Return the content of the last <answer>...</answer>, as the library's `extract_answer` does, or None."""
    answer: str | None = library("utils").extract_answer(response)
    return answer


def last_line(response: str) -> str:
    """Return the last line that has any text, or empty text."""
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def tags_or_whole(response: str) -> str:
    """Return the content of the last <answer>...</answer>, or the whole response if it has none."""
    tagged = in_tags(response)
    return response.strip() if tagged is None else tagged


WAYS: Mapping[str, Callable[[str], str | None]] = {
    "auto": tags_or_whole,
    "tags": in_tags,
    "last_line": last_line,
    "last_number": last_number,
    "whole": str.strip,
}
"""Ways to find the answer in a response: values of `answer_in`."""


def score(response: str, extra_info: Mapping[str, Any] | None) -> float:
    """Return the score of the library, usually from 0 to 1, for the answer in `response`.

    Raise UserError if `extra_info` is not what `qarl data reasoning_gym` writes."""
    info = extra_info or {}
    missing = [key for key in KEYS if not isinstance(info.get(key), str)]
    if missing:
        raise UserError(
            f"a row has no {missing[0]} for reasoning-gym's scorer",
            where="extra_info",
            why=f"the reward function reasoning_gym reads {', '.join(KEYS)} there",
            fix="write the data with `qarl data reasoning_gym`, or choose another reward function",
        )
    answer = WAYS[info[ANSWER_IN]](response)
    dataset = _dataset(info[TASK], info[PARAMETERS])
    return score_of(dataset, answer, from_text(info[ENTRY]))


def score_of(dataset: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """Return the library's score of `answer`, or 0 if its scorer raises an exception or takes `CPU_SECONDS`."""
    limit = _Limit(CPU_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about answers that cannot be read
            with limit:
                found = float(dataset.score_answer(answer, entry))
    except (Exception, _TooLong):  # an answer that cannot be read; scorers raise many types for it
        return 0.0
    return 0.0 if limit.is_over else found


class _TooLong(BaseException):
    """Raised in a scorer that has used its time."""


class _Limit:
    """A context that raises `_TooLong` after `cpu_seconds`, and again while the block goes on. `is_over`: whether it
    did. Only a main thread, as a reward's, has such a limit.

    A scorer may have `except:` around slow code, which catches `_TooLong`, too. So it is raised again in the next line
    that is executed, which is inside that `except`, so that it is not caught there. If the block still goes on, both
    happen again every `_AGAIN_SECONDS` of processor time."""

    def __init__(self, cpu_seconds: float) -> None:
        self.is_over = False
        self._seconds = cpu_seconds
        self._has_timer = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._has_timer:
            self._block = sys._getframe(1)
            self._tracer = sys.gettrace()
            self._handler = signal.signal(signal.SIGVTALRM, self._end)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds, _AGAIN_SECONDS)

    def __exit__(self, *exception: object) -> None:
        try:
            self._stop()
        finally:  # the timer may have interrupted this
            self._stop()

    def _stop(self) -> None:
        if self._has_timer:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._handler)
            if self.is_over:
                sys.settrace(self._tracer)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        self.is_over = True
        while frame is not None and frame is not self._block:
            frame.f_trace = _raise_in_line
            frame = frame.f_back
        sys.settrace(_trace_no_more)  # lets Python call the functions that are set above
        raise _TooLong


def _raise_in_line(frame: FrameType, event: str, argument: object) -> None:
    if event == "line":
        raise _TooLong  # after which Python traces nothing


def _trace_no_more(frame: FrameType, event: str, argument: object) -> None:
    """Let functions that are called from now on be as they are."""


@lru_cache(maxsize=_CACHED)
def _dataset(task: str, parameters: str) -> Any:
    return make_dataset(task, json.loads(parameters))
