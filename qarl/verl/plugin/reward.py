"""The reward function as verl calls it: `reward.function` with the checks and the time limit of the local backend.

verl calls a custom reward in a thread of a Ray worker, without a time limit, and takes whatever it returns: NaN is
trained on, `SystemExit` ends the worker. So verl is given `score`, with the name of the user's function and the limit
as `reward_kwargs`. Its errors are ordinary exceptions that name the data source: verl logs them, and counts the prompt
as failed. The limit is as sharp as `qarl.data.time_limit` says of threads.

The built-in rewards have limits inside, and `math_verify` waits for a pool of processes here: time in its queue would
count. They are called without the clock.
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
    """The score of one response by the function named `function`; a dict, as verl takes it, if that returns one.

    `more`: what verl adds for rewards that ask a reward model.

    Raises:
        UserError: as `qarl.data.rewards.score_responses`.
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
