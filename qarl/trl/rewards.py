"""Refuses rewards that TRL would train on as if they were 0.

A reward function may return None for a response that it does not score. TRL stores None as NaN and leaves NaN out of
every mean and sum, so it cannot tell a reward that became NaN from one that was not meant. A response without any
reward gets the advantage 0. If a reward function fails in this way, TRL warns and trains to the end with a loss of 0.
So a number that is not finite is an error here, and so is a response that no reward function scored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from qarl.errors import UserError


def checked_functions(reward_funcs: Any) -> Any:
    """Return the argument `reward_funcs` of `GRPOTrainer` with functions that raise UserError for NaN and Inf.

    Names and folders of reward models, and models, are returned as they are."""
    if isinstance(reward_funcs, list):
        return [checked_functions(one) for one in reward_funcs]
    if not callable(reward_funcs) or isinstance(reward_funcs, torch.nn.Module):
        return reward_funcs
    return _checked(reward_funcs)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    name = get_callable_name(function)

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        return check_finite(name, function(**given), given)

    @functools.wraps(function)
    async def call_async(**given: Any) -> Any:
        return check_finite(name, await function(**given), given)

    checked = call_async if is_async_callable(function) else call
    checked.__name__ = name
    return checked


def check_finite(name: str, rewards: Sequence[Any], given: dict[str, Any]) -> Sequence[Any]:
    """Return what the reward function `name` returned. Raise UserError if a reward is NaN or Inf.

    `given`: the function's arguments, of which `prompts` and `trainer_state` are named in the error."""
    for prompt, reward in zip(given["prompts"], rewards, strict=False):  # TRL refuses another number of rewards
        if reward is not None and not math.isfinite(reward):
            raise UserError(
                f"the reward function {name!r} returned {float(reward)}",
                where=f"step {given['trainer_state'].global_step}, prompt {_shown(prompt)}",
                why="a NaN or Inf makes the mean and all advantages of its group useless",
                fix="return a finite number, or None if this function does not apply to the response",
            )
    return rewards


def check_scored(rewards: torch.Tensor, names: Sequence[str], prompts: Sequence[Any], step: int) -> None:
    """Raise UserError if no reward function scored a response, or if a reward is Inf.

    Args:
        rewards: FP32 [responses of all processes, functions]. NaN where a function did not score the response.
        names: the functions' names. `prompts`: those of this process, one for each of its responses.
    """
    unscored = rewards.isnan().all(1) | rewards.isinf().any(1)
    if not unscored.any():
        return
    named = [prompt for prompt, bad in zip(prompts, unscored.tolist(), strict=False) if bad]
    raise UserError(
        f"{int(unscored.sum())} of {len(rewards)} responses have no reward",
        where=f"step {step}, prompt {_shown(named[0])}" if len(rewards) == len(prompts) else f"step {step}",
        why=f"the reward functions ({', '.join(names)}) returned None, or a reward model returned NaN or Inf; TRL "
        "would give these responses the advantage 0",
        fix="return a number for every response from at least one reward function",
    )


def _shown(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 200 else f"{text[:200]}..."
