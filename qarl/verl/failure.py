"""Turns the error that ended a verl run into one message, if the user can do something about it.

verl's trainer is a Ray task. An error passes through several processes, and each of them wraps it in a Ray exception
with all tracebacks so far. The class of such an exception is a subclass of the wrapped error's class.
"""

from __future__ import annotations

from qarl.errors import UserError

RESUME = "run the same command again: it resumes from the last checkpoint (trainer.save_freq)"


def as_user_error(failure: BaseException) -> UserError | None:
    """Return the `UserError` that a worker raised, or a new one if a process died or hangs. Otherwise return None."""
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
