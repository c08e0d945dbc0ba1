"""Run a reward function, or an environment, in worker processes, the same way for every backend.

So a function has the same score everywhere, however it catches exceptions or uses alarms, threads and subprocesses: it
runs in the main thread of a process of its own, its time limit is the end of that process, and what it does to the
process (working folder, seeds, torch's grad mode, a crash) does not reach the trainer.

A `Reward` returns a future for each response. Whether the function is async, or scores all responses of a batch in one
call, is known where it is loaded.

The workers are reused, so a call costs some 0.1 ms more than in the trainer. They start when they are needed, and only
as many as there are responses to score at the same time. A thread serves each worker, so that its time limit starts
with the call: neither the queue nor the start of a process counts.

Two libraries were tried for this. Pebble 5.2 runs the user's `__main__` again, and does not notice a worker that ends
with exit code 0. loky 3.7 takes some 0.5 ms more per call and half a second to start, and its limit includes the start
of a worker that it replaces.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

from qarl.console import note
from qarl.data import reward_process
from qarl.data.reward_outcomes import Lost, Outcome, Refused, of_all, outcome_of, raised
from qarl.data.worker_roles import REWARD, Role
from qarl.errors import UserError

STARTS = 3
"""Attempts to find a living worker for a call. A worker can die between two calls, for example for lack of memory."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a silent worker. The end of a worker shows at once, unless a child holds its pipe."""
LOADING_SECONDS = 60.0
"""Seconds of loading a function after which a note says what the run waits for."""


class Reward(Protocol):
    """A reward function. `name`: for errors. `scores_all`: whether it scores all responses of a batch in one call."""

    @property
    def name(self) -> str: ...

    @property
    def scores_all(self) -> bool: ...

    def submit(self, arguments: Mapping[str, Any], timeout_s: float | None) -> Future[Outcome]:
        """Return the future outcome for the four `arguments` of a response. `timeout_s`: limit in seconds, or None."""

    def submit_all(
        self, rows: Sequence[Mapping[str, Any]], timeout_s: float | None
    ) -> list[Future[Outcome]]:
        """Do the same for the arguments of each response of a batch."""

    def load(self) -> None:
        """Load the function now. Raise UserError if that fails."""

    def stop(self) -> None:
        """End all calls that run or wait, and their processes. A later call starts them again."""


class InProcessReward:
    """A function that runs in the trainer's process: a built-in one, pure and without loops that may not end.

    The result is the same as in a worker, because it depends on the arguments alone and changes nothing."""

    scores_all = False

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    def submit_all(
        self, rows: Sequence[Mapping[str, Any]], timeout_s: float | None
    ) -> list[Future[Outcome]]:
        return [self.submit(row, timeout_s) for row in rows]

    def submit(self, arguments: Mapping[str, Any], timeout_s: float | None) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            future.set_result(outcome_of(self._function(**arguments)))
        except Exception as error:
            future.set_result(raised(error))
        return future

    def load(self) -> None:
        pass

    def stop(self) -> None:
        pass


class WorkerFunction:
    """The function `spec` (as in `reward.function`) in up to `workers` processes, whose working folder is `folder`.

    `role`: what it is for. `submit` and `load` may be called from any thread."""

    def __init__(
        self, spec: str, workers: int = 1, folder: str | None = None, *, role: Role = REWARD
    ) -> None:
        self.name = spec
        self.scores_all = False
        self.role = role
        self._setup = {"function": spec, "folder": folder or os.getcwd(), "role": role.key}
        self._count = workers
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._source: str | None = None
        weakref.finalize(self, _end, self._all, os.getpid())

    def load(self) -> None:
        """Start a worker, if there is none. Raise UserError if the function cannot be loaded."""
        loading = self._executor().submit(lambda: self._idle.append(self._take()))
        try:
            loading.result()
        except BaseException:
            self.stop()
            raise

    def submit(
        self, arguments: Mapping[str, Any], timeout_s: float | None, *, responses: int = 1
    ) -> Future[Any]:
        """As in `Reward`, for a call about this number of responses, each of which has the limit. The future raises
        UserError if the function cannot be loaded."""
        threads = self._executor()
        return threads.submit(self._ask, threads, arguments, timeout_s, responses)

    def stop(self) -> None:
        with self._lock:
            threads = self._threads
            self._threads = None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        _end(self._all, os.getpid())
        self._idle.clear()
        self._source = None

    def _executor(self) -> ThreadPoolExecutor:
        """Return the threads, one for each worker. Linux ends a worker when the thread that started it ends."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="reward")
            return self._threads

    def _take(self) -> Worker:
        """Return an idle worker, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            worker = Worker(self._setup, self.role)
        self._all.add(worker)
        try:
            self.name = worker.load()
            self.scores_all = worker.scores_all
            self._check_source(worker)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _check_source(self, worker: Worker) -> None:
        """Raise UserError if the function's file has changed since the first worker loaded it: a worker that replaces
        another, or is added, would score by another function."""
        with self._lock:
            first = self._source or worker.source
            self._source = first
        if worker.source != first:
            raise UserError(
                f"the file of {self.role.noun} {self.name} was changed during the run",
                where=self.role.key,
                why="a worker process that was started later would call another function than the others",
                fix="restore the file and repeat the command, or start a new run with the changed function",
            )

    def _ask(
        self,
        threads: ThreadPoolExecutor,
        arguments: Mapping[str, Any],
        timeout_s: float | None,
        responses: int,
    ) -> Any:
        for _ in range(STARTS):
            if threads is not self._threads:
                raise CancelledError
            worker = self._take()
            try:
                outcome = worker.ask(arguments, timeout_s, responses)
            except _EndedIdleError:
                self._discard(worker)
                continue
            except BaseException:
                self._discard(worker)
                raise
            if worker.ended:
                self._discard(worker)
            else:
                self._idle.append(worker)
            return outcome
        return Refused(
            "cannot be called", f"its worker process ended {STARTS} times before a call", _MEMORY
        )

    def _discard(self, worker: Worker) -> None:
        worker.end()
        self._all.discard(worker)


class WorkerReward(WorkerFunction):
    """A reward function in worker processes. One that scores all responses of a batch is called in one of them, and has
    the time limit of a response for each."""

    _loaded = False

    def load(self) -> None:
        super().load()
        self._loaded = True

    def submit_all(
        self, rows: Sequence[Mapping[str, Any]], timeout_s: float | None
    ) -> list[Future[Outcome]]:
        if not self._loaded and rows:
            self.load()
        if not self.scores_all:
            return [self.submit(row, timeout_s) for row in rows]
        count = len(rows)
        whole = self.submit(of_all(rows), timeout_s, responses=count)
        return [then(whole, partial(_entry, number, count)) for number in range(count)]


def _entry(number: int, count: int, outcomes: list[Outcome] | Refused) -> Outcome:
    """Return the outcome of a response in those of a batch of `count`. A refusal is of the whole batch."""
    if isinstance(outcomes, Refused):
        return outcomes._replace(responses=count)
    return outcomes[number]


def then(future: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """Return the future of `function` of a future's result."""
    following: Future[Any] = Future()

    def finish(done: Future[Any]) -> None:
        try:
            following.set_result(function(done.result()))
        except BaseException as error:
            following.set_exception(error)

    future.add_done_callback(finish)
    return following


_UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises, before anything is sent."""
_PLAIN_DATA = "let ground_truth and extra_info be text, numbers, lists and dicts"
_LACK: dict[int, str] = {signal.SIGKILL: ", as happens if memory is lacking"}
_MEMORY = "look at what it prints, at the machine's memory (fewer reward.workers need less) and at the kernel's log"


class _EndedIdleError(Exception):
    """The worker has ended before the call began, so another one can make it."""


class Worker:
    """One worker process. `ended`: whether it was ended, or ended itself. `source`: a digest of the file of the
    function that it has loaded, or None. `scores_all`: whether that is a reward of all responses of a batch."""

    def __init__(self, setup: Mapping[str, Any], role: Role = REWARD) -> None:
        self.ended = False
        self.role = role
        self.source: str | None = None
        self.scores_all = False
        self._spec: str = setup["function"]
        self._connection, far_end = Pipe()
        program = [
            sys.executable,
            "-P",
            reward_process.__file__,
            str(far_end.fileno()),
            str(os.getpid()),
        ]
        with far_end:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
                start_new_session=True,  # a group of its own: to end it as a whole, and to keep Ctrl-C away from it
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        root = str(
            Path(__file__).parents[2]
        )  # of the package itself, which may be in no folder of sys.path
        self._setup = {**setup, "path": [*sys.path, root, setup["folder"]]}

    def load(self) -> str:
        """Wait until the function is loaded. Return its name, or raise UserError."""
        try:
            self._connection.send(self._setup)
            self._wait(None, lambda: note(f"still loading {self.role.noun} {self._spec}"))
            loaded: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            what = f"loading {self._spec} ended its process"
            fix = "import it in a Python of its own to see the cause"
            raise UserError(what, where=self.role.key, why=self._exit(), fix=fix) from None
        if "name" not in loaded:
            raise UserError(**loaded)
        self.source = loaded["source"]
        self.scores_all = loaded["scores_all"]
        return str(loaded["name"])

    def ask(self, arguments: Mapping[str, Any], timeout_s: float | None, responses: int = 1) -> Any:
        """Return the outcome of a call. If it takes longer than `timeout_s` for each of the `responses`, or ends the
        process, end the worker."""
        try:
            self._connection.send(dict(arguments))
            self._wait(None)
            started = self._connection.recv()
        except (EOFError, OSError):
            raise _EndedIdleError from None
        except _UNSENDABLE as error:
            return Refused(
                "cannot be called",
                f"its arguments cannot be sent to its process: {error}",
                _PLAIN_DATA,
            )
        assert started == reward_process.STARTED
        try:
            if self._wait(None if timeout_s is None else timeout_s * responses):
                return self._connection.recv()
        except (EOFError, OSError):
            return Lost("ended its process", self._exit(), self.role.every)
        self.end()
        limit = self.role.limit
        each = f" for each of {responses} responses" if responses > 1 else ""
        return Lost(
            f"took longer than {limit}={timeout_s:g} seconds{each}",
            self.role.unanswered,
            f"make it faster, let it limit its own time, or raise {limit} (null means no limit)",
        )

    def _wait(self, seconds: float | None, remind: Callable[[], None] | None = None) -> bool:
        """Return whether the worker has answered within `seconds` (None: no limit). Raise EOFError if it has ended."""
        started = time.monotonic()
        left = math.inf if seconds is None else seconds
        while left > 0:
            if self._connection.poll(min(LOOK_SECONDS, left)):
                return True
            if _exited(self._process) and not self._connection.poll(0):
                raise EOFError
            waited = time.monotonic() - started
            left = math.inf if seconds is None else seconds - waited
            if remind is not None and waited > LOADING_SECONDS:
                remind()
                remind = None
        return False

    def _exit(self) -> str:
        """Say how the process has ended, and end what is left of it."""
        for _ in range(20):  # the connection ends a little before the process
            if _exited(self._process):
                break
            time.sleep(0.05)
        else:
            self.end()
            return "its process closed the connection to the trainer"
        self.end()
        code = self._process.returncode
        if code > 128:
            return f"signal {code - 128} ({_signal_name(code - 128)}) ended its process{_LACK.get(code - 128, '')}"
        return f"its process ended with exit code {code}"

    def end(self) -> None:
        """Kill the process and all that it has started. This may be called twice, and from two threads.

        The connection is left to the thread that reads it."""
        self.ended = True
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether `process` has ended. Leave it a zombie, so that its number still names its group."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _end(workers: set[Worker], owner: int) -> None:
    """End all `workers`, in the process `owner`: a fork of it has copies of the objects, but not the workers."""
    if os.getpid() != owner:
        return
    for worker in list(workers):
        worker.end()
    workers.clear()
