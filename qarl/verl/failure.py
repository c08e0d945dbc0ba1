"""Turns the error that ended a verl run into one message, if the user can do something about it.

verl's trainer is a Ray task. An error passes through several processes, and each of them wraps it in a Ray exception
with all tracebacks so far. The class of such an exception is a subclass of the wrapped error's class.
"""

from __future__ import annotations

from pathlib import Path

from qarl.checkpoint.open import whole_and_torn
from qarl.errors import UserError

RESUME = "run the same command again"
"""The end of a worker's `fix`. A worker does not know the checkpoints, so the driver adds what the command will do."""


def as_user_error(failure: BaseException, checkpoints: Path) -> UserError | None:
    """Return the `UserError` that a worker raised, or a new one if a process died or hangs. Otherwise return None.

    `checkpoints`: the folder of the run's checkpoints. A `fix` that advises to run again says what the run then does.
    """
    found = _user_error(failure)
    if found is None or not (found.fix or "").endswith(RESUME):
        return found
    return UserError(found.what, where=found.where, why=found.why, fix=f"{found.fix}: {what_resumes(checkpoints)}")


def what_resumes(checkpoints: Path) -> str:
    """Return what a repeated command does with the complete checkpoints of verl in the folder `checkpoints`."""
    if whole := whole_and_torn(checkpoints)[0]:
        return f"it resumes after step {max(whole)}"
    return "it starts fresh, because there is no checkpoint yet (trainer.save_minutes, trainer.save_freq)"


def _user_error(failure: BaseException) -> UserError | None:
    import ray
    import zmq

    error = failure
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, UserError):
        return error
    if isinstance(error, zmq.Again):
        return UserError(
            "a rollout engine stopped answering while the trainer published weights to it",
            where="the socket between trainer and engine",
            why="the engine or its server has died or is stuck; QARL_PUBLISH_TIMEOUT is the limit in seconds",
            fix=RESUME,
        )
    if isinstance(error, ray.exceptions.RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = [line for line in lines if line.startswith(("class_name:", "pid:", "ip:", "name:"))]
        return UserError(
            "a process of the verl run died",
            where=", ".join(known) or lines[0][:200],
            why="something killed it, for example lack of memory (see the kernel's log and Ray's log of the worker)",
            fix=RESUME,
        )
    return None
