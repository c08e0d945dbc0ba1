"""The program of a worker process: load one function, then call it for one response after another.

The function is a reward or an environment, as `role` of the first message says (`qarl.data.worker_roles`).

`qarl.data.reward_workers` starts this file as a script, so nothing of the trainer's own `__main__` runs here: neither a
script without `if __name__ == "__main__"` nor a notebook runs twice. It imports little, to start fast.

It is two processes. The one that was started is a guard: it waits for the other, its child, which runs the user's code
in its main thread, where alarms work. If the trainer dies, even by SIGKILL, Linux sends the guard a signal, and the
guard kills the whole process group: the child, even if it is stuck inside a C function, and what the child has started.

Messages, in the order in which they are sent:

    trainer  Setup          what to load
    worker   Loaded         or what was wrong
    trainer  arguments      of one response, a dict
    worker   STARTED        the arguments were read, and the call begins; the time limit counts from here
    worker   Outcome        (`qarl.data.reward_outcomes`)
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STARTED = b"started"
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(descriptor: int, trainer: int) -> None:
    """Guard a child that serves the connection `descriptor`. `trainer`: process id of the trainer."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(trainer, signal.SIGTERM)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with(guard, signal.SIGKILL)
        serve(descriptor)
        return
    os.close(descriptor)  # so that the connection ends with the child
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # as a shell does


def die_with(parent: int, number: int) -> None:
    """Let Linux send this process the signal `number` when its `parent` ends, and end now if it already has."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number))
    if os.getppid() != parent:
        os._exit(1)


def serve(descriptor: int) -> None:
    """Load the function that the first message names, then answer all others until the connection ends."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    setup = connection.recv()
    os.chdir(setup["folder"])
    sys.path[:] = setup["path"]
    faulthandler.enable()  # a crash inside a C function shows the line of Python that called it
    role = setup["role"]
    loaded, function = load(setup["function"], role)
    flush()
    connection.send(loaded)
    call = caller(role, function)
    process = os.getpid()
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(STARTED)
        outcome = call(function, arguments)
        if os.getpid() != process:
            os._exit(0)  # the function forked, and this is the child
        tidy(setup["folder"])
        connection.send(outcome)


def caller(role: str, function: Any) -> Callable[..., Any]:
    """Return what calls the `function` of this role and returns its outcome."""
    from qarl.data.environment_outcomes import call_environment
    from qarl.data.reward_outcomes import call, call_all, scores_all
    from qarl.data.worker_roles import ENVIRONMENT

    if role == ENVIRONMENT.key:
        return call_environment
    return call_all if scores_all(function) else call


def load(spec: str, role: str) -> tuple[dict[str, Any], Any]:
    """Return what to tell the trainer, and the function."""
    from qarl.data.environment_outcomes import get_environment
    from qarl.data.reward_outcomes import raised, scores_all
    from qarl.data.rewards import get_reward_fn, name_of
    from qarl.data.worker_roles import ENVIRONMENT, ROLES
    from qarl.errors import UserError

    source = spec.rpartition(":")[0]
    if source.endswith(
        ".py"
    ):  # as for a script, whose neighbours can be imported; last, so that they hide nothing
        sys.path.append(str(Path(source).resolve().parent))
    try:
        of_turns = role == ENVIRONMENT.key
        function = get_environment(spec) if of_turns else get_reward_fn(spec, ROLES[role])
        facts = {"name": name_of(function), "source": source_digest(function)}
        return facts | {"scores_all": scores_all(function)}, function
    except UserError as error:
        words = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    except BaseException as error:  # the user's module may raise anything
        words = {"what": f"cannot load {spec}: it {raised(error).what}", "where": role}
    return words, None


def source_digest(function: Any) -> str | None:
    """Return the SHA-256 of the file in which `function` is written, or None if there is no such file."""
    import hashlib
    import inspect

    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    except (TypeError, ValueError, OSError):
        return None


def tidy(folder: str) -> None:
    """Undo what would end or change a later call: pending alarms and another working folder. Flush what was printed."""
    for _ in range(3):  # an alarm that is due interrupts this, but it cannot come a second time
        try:
            for timer in TIMERS:
                signal.setitimer(timer, 0)
            os.chdir(folder)
            return flush()
        except BaseException:
            continue


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the function has closed or replaced it
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
