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
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from qarl.config.reward import RewardConfig
from qarl.data.reward_workers import Reward
from qarl.data.scoring import refuse_batches, reward_of, scored
from qarl.errors import UserError
from qarl.verl import first_error


@cache
def find(function: str, workers: int, folder: str, functions: str = "[]") -> Reward:
    """Return one reward for each of its settings, so that its processes are reused. `functions`: as JSON."""
    keys = {"function": function, "functions": json.loads(functions), "workers": workers}
    return reward_of(RewardConfig(**keys), folder)


async def score(
    *,
    function: str,
    timeout_s: float | None,
    workers: int,
    folder: str,
    functions: Sequence[Mapping[str, Any]] = (),
    **arguments: Any,
) -> float | dict[str, Any]:
    """Score one response with the reward function `function`, or with several `functions` (`reward.functions`). Return
    the score, or a dict with `score` and what the functions returned.

    `arguments`: those that verl passes to a reward function, all by name. Raise the same UserErrors as
    `qarl.data.scoring.score_responses`.
    """
    arguments["data_source"] = str(arguments["data_source"])  # verl hands over NumPy's kind of text
    several = [json.dumps([dict(entry) for entry in functions])] if functions else []
    reward = find(function, workers, folder, *several)
    try:
        outcome = await asyncio.wrap_future(reward.submit(arguments, timeout_s))
        result = scored(reward.name, outcome, arguments, where=_row(arguments.get("extra_info")))
        refuse_batches(reward)
    except UserError as error:
        first_error.keep(error)
        raise
    return result.score if result.more is None else {**result.more, "score": result.score}


def reward_names(config: Any) -> list[str]:
    """Return the reward functions that verl's whole `config` names: as in `reward.function` if they are QaRL's."""
    function = config.reward.custom_reward_function
    ours = function.get("reward_kwargs") or {}
    if function.path == f"pkg://{score.__module__}":
        several = [str(entry["function"]) for entry in ours.get("functions") or ()]
        return several or [str(ours.get("function"))]
    if function.path == "pkg://qarl.data.rewards":
        return [str(function.name)]
    return [f"{function.path}:{function.name}"]


def _row(extra_info: Any) -> str:
    """Name the row by the index in `extra_info`, which verl's data files have. verl passes no other."""
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    return "" if index is None else f"row with index {index}, "
