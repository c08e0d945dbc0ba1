"""The reward of a response in verl: `score` is the custom reward function of verl's config.

verl calls a custom reward in a thread of a Ray worker, without a time limit, and accepts any result: it trains on NaN,
and `SystemExit` ends the worker. So `score` is async, which verl awaits instead, and runs the user's function as every
backend does, in worker processes of the Ray worker (`qarl.data.reward_workers`). `reward_kwargs` contain the name of
the function, its limit, the number of processes and their folder.

If `score` raises, verl logs the error and counts the prompt as failed, without its cause; `qarl.verl.first_error` keeps
it.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from qarl.data.scoring import find_reward, scored
from qarl.errors import UserError
from qarl.verl import first_error

find = cache(find_reward)
"""One reward for each of its settings, so that its processes are reused."""


async def score(
    *, function: str, timeout_s: float | None, workers: int, folder: str, **arguments: Any
) -> float | dict[str, Any]:
    """Score one response with the reward function `function`. Return the score, or the function's dict with `score`.

    `arguments`: those that verl passes to a reward function, all by name. Raise the same UserErrors as
    `qarl.data.scoring.score_responses`.
    """
    arguments["data_source"] = str(arguments["data_source"])  # verl hands over NumPy's kind of text
    reward = find(function, workers, folder)
    try:
        outcome = await asyncio.wrap_future(reward.submit(arguments, timeout_s))
        result = scored(reward.name, outcome, arguments, where=_row(arguments.get("extra_info")))
    except UserError as error:
        first_error.keep(error)
        raise
    return result.score if result.more is None else {**result.more, "score": result.score}


def reward_name(config: Any) -> str:
    """Return the reward function that verl's whole `config` names: as in `reward.function` if it is one of QaRL's."""
    function = config.reward.custom_reward_function
    own = {f"pkg://{score.__module__}": (function.get("reward_kwargs") or {}).get("function")}
    own["pkg://qarl.data.rewards"] = function.name
    return str(own.get(function.path) or f"{function.path}:{function.name}")


def _row(extra_info: Any) -> str:
    """Name the row by the index in `extra_info`, which verl's data files have. verl passes no other."""
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    return "" if index is None else f"row with index {index}, "
