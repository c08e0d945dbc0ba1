"""The reward function that verl calls: `reward.function` with the checks and the time limit of the local backend.

verl calls a custom reward in a thread of a Ray worker, without a time limit, and accepts any result. It trains on NaN,
and `SystemExit` ends the worker. So verl calls `score` instead. `reward_kwargs` contain the name of the user's function
and the time limit. If `score` raises, verl logs the error and counts the prompt as failed.

Built-in rewards have no limit here, because they have their own. `math_verify` uses a pool of processes, and a limit
here would also count its time in the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from qarl.data.rewards import BUILTIN, RewardFn, call_reward, get_reward_fn, score_of

_LOADING = threading.Lock()


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    function: str,
    timeout_s: float | None,
    **more: Any,
) -> float | dict[str, Any]:
    """Score one response with the reward function `function`. Return the score, or the function's dict with `score`.

    `more`: other arguments that verl passes to a reward function. Raise the same UserErrors as
    `qarl.data.rewards.score_responses`.
    """
    with _LOADING:
        fn = _load(function)
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    } | more
    result = call_reward(fn, arguments, timeout_s=None if function in BUILTIN else timeout_s)
    number = score_of(fn, result, arguments)
    return {**result, "score": number} if isinstance(result, Mapping) else number


@cache
def _load(function: str) -> RewardFn:
    return get_reward_fn(function)
