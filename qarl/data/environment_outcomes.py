"""What a call of an environment leads to. This runs in the worker process (`qarl.data.reward_process`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qarl.data.reward_outcomes import (
    LONGEST_MESSAGE,
    Refused,
    awaited,
    check_can_travel,
    is_number,
    lacks_parameters,
    raised,
)
from qarl.data.rewards import load_function
from qarl.data.worker_roles import ENVIRONMENT
from qarl.errors import shortened
from qarl.turns.loop import Failure
from qarl.turns.reply import FORMS, Reply, reply_of


def get_environment(spec: str) -> Callable[..., Any]:
    """Return the function that `spec` names. Raise UserError if there is no such module, file or function."""
    return load_function(spec, ENVIRONMENT)


def call_environment(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Reply | Failure | Refused:
    """Return the outcome of `function(**arguments)`, which may be async.

    Catches every exception, also `SystemExit` and `KeyboardInterrupt`, so it is only for a process of its own."""
    try:
        result = awaited(function(**arguments))
    except BaseException as error:
        return lacks_parameters(error, arguments) or failure_of(error)
    return outcome_of(result)


def failure_of(error: BaseException) -> Failure:
    """Return the failure of an exception. The model is told its type and message, and no path of this machine."""
    refused = raised(error)
    message = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
    return Failure(f"Error: {message}", f"{refused.what}: {refused.why}")


def outcome_of(result: Any) -> Reply | Refused:
    """Return the reply in the `result` of an environment, or the refusal of an invalid result."""
    try:
        reply = reply_of(result)
        check_can_travel(reply.messages)
    except Exception as error:  # also of the objects' own code
        return Refused(f"returned {shortened(result)}", str(error), FORMS)
    if reply.reward is not None and not is_number(reply.reward):
        why = "a reward is a finite number that FP32 can hold"
        return Refused(
            f"returned {shortened(result)}", why, "leave the reward out, or give a number"
        )
    return Reply(reply.messages, None if reply.reward is None else float(reply.reward))
