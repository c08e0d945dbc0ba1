"""What a failed run of verl says: errors of Ray and of verl's processes, as errors that a user can act on.

Ray hands on what a process raised inside its own errors, and has classes of its own for processes that died and for a
machine that is full. Their messages describe Ray. What is not known here stays as it is, with its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qarl.checkpoint.read_weights import whole_and_torn
from qarl.errors import UserError, first_cause
from qarl.verl.ask_servers import KILLED, RESUME

LESS_MEMORY = (
    "lower rollout.cpu_kvcache_space_gib or rollout.gpu_memory_utilization, the micro-batches of actor or "
    "trainer.n_gpus_per_node (qarl doctor estimates what a run needs), or end other programs"
)
RAY_LOGS = "/tmp/ray/session_latest/logs"
NO_MEMORY = "a process of the verl run has run out of memory"
_ALLOCATORS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|std::bad_alloc", re.IGNORECASE
)
_USED = re.compile(r"[\d.]+GB(?: used)? / [\d.]+GB(?: limit)? \([\d.]+\)")
_VICTIM = (
    re.compile(r"(?:task name=|class_name: |[( ]name=)([\w.]+)"),
    re.compile(r"(pid[=:] ?\d+)"),
)
"""In Ray's words, what it killed: the name of the class or of its task, and the process."""
_FACTS = ("class_name:", "pid:", "ip:", "name:")


def as_user_error(failure: BaseException, checkpoints: Path, keys: str = "") -> UserError | None:
    """Return the `UserError` that a worker raised, or a new one if processes died, hang or are out of memory or disk.
    Otherwise return None.

    `checkpoints`: the folder of the run's checkpoints. `keys`: with which keys a repeated command resumes
    (`qarl.trainer.repeat`). A `fix` that advises to run again says what the run then does.
    """
    error = first_cause(failure)
    known = error if isinstance(error, UserError) else known_failure(error)
    if known is None:
        return None
    if known.fix is None or not known.fix.endswith(RESUME):
        return known
    return UserError(
        known.what,
        where=known.where,
        why=known.why,
        fix=f"{known.fix}: {what_resumes(checkpoints, keys)}",
    )


def known_failure(error: BaseException) -> UserError | None:
    """Return the error for a process that died or hangs, or for a machine that is full. Otherwise return None."""
    import zmq
    from ray import exceptions

    if isinstance(error, zmq.Again):
        what = "a rollout engine stopped answering while the trainer published weights to it"
        why = "the engine or its server has died or is stuck; QARL_PUBLISH_TIMEOUT is the limit in seconds"
        return UserError(what, where="the socket between trainer and engine", why=why, fix=RESUME)
    if isinstance(error, exceptions.OutOfMemoryError) or _killed_for_memory(error):
        what = (
            "Ray has killed a process of the verl run, because the machine is almost out of memory"
        )
        why = "RAY_memory_usage_threshold is the share of the memory from which on Ray kills"
        return UserError(what, where=_killed(error), why=why, fix=f"{LESS_MEMORY}; then {RESUME}")
    if isinstance(error, exceptions.OutOfDiskError | exceptions.ObjectStoreFullError):
        disk = isinstance(error, exceptions.OutOfDiskError)
        what = f"Ray could not store an object of the verl run: {'the disk' if disk else 'its object store'} is full"
        fix = f"free space on the disk of Ray's folder (by default /tmp/ray) or in /dev/shm, and {RESUME}"
        return UserError(
            what,
            where=_sentences(error),
            why="Ray passes a step's tensors through its object store",
            fix=fix,
        )
    died = (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError)
    if isinstance(error, (*died, exceptions.LocalRayletDiedError, exceptions.OwnerDiedError)):
        return UserError(
            "a process of the verl run died", where=_process(error), why=KILLED, fix=RESUME
        )
    if "timed out during startup" in str(error):
        why = "the machine is too busy, its memory is full, or another Ray is in the way"
        fix = (
            f"see {RAY_LOGS}, end other programs, `ray stop` a Ray that nobody uses; then {RESUME}"
        )
        return UserError("Ray could not be started", where=_sentences(error), why=why, fix=fix)
    if _allocator_failed(error):
        return UserError(NO_MEMORY, where=_sentences(error), fix=f"{LESS_MEMORY}; then {RESUME}")
    return None


def _killed_for_memory(error: BaseException) -> bool:
    """Return whether an actor died because Ray killed it to free memory. Ray has no class for that."""
    from ray import exceptions

    # Of an actor that something else has killed, Ray names the kernel's OOM killer as a possible cause.
    told = ("running low on memory", "NODE_OUT_OF_MEMORY")
    return isinstance(error, exceptions.RayActorError) and any(
        words in str(error) for words in told
    )


def _allocator_failed(error: BaseException) -> bool:
    """Return whether Python or PyTorch could not allocate memory. On a CPU PyTorch raises a plain RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_ALLOCATORS.search(str(error)))
    )


def _killed(error: BaseException) -> str:
    """Return which process Ray killed and what the machine's memory was, from Ray's report of many lines."""
    text = str(error)
    names = [match[1] for pattern in _VICTIM if (match := pattern.search(text))]
    used = [match[0] for match in [_USED.search(text)] if match]
    return ", ".join(names + used) or _sentences(error)


def _process(error: BaseException) -> str:
    """Return which process died, from the lines of Ray's message."""
    lines = _lines(error)
    known = [line for line in lines if line.startswith(_FACTS)]
    return ", ".join(known) or lines[0][:200]


def _sentences(error: BaseException) -> str:
    """Return the first lines of a message in one line."""
    return " ".join(_lines(error))[:600]


def _lines(error: BaseException) -> Sequence[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]


def what_resumes(checkpoints: Path, keys: str = "") -> str:
    """Return what a repeated command does with the complete checkpoints of verl in the folder `checkpoints`. `keys`: as
    in `as_user_error`."""
    if whole := whole_and_torn(checkpoints)[0]:
        return f"{keys}it resumes after step {max(whole)}"
    return "it starts fresh, because there is no checkpoint yet (trainer.save_minutes, trainer.save_freq)"
