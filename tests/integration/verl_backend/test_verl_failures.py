"""What an error of Ray or of memory is called, and what it says that one can do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl")
import ray
from verl_ends import DEAD, MEMORY, of_task

from qarl.verl.failures import as_user_error

GPU_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
CPU_FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
KILLED_FOR_MEMORY = """The actor died.
\tclass_name: WorkerDict
\tpid: 42
The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was
killed due to the node running low on memory."""
KILLED_BY_SOMETHING = """The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tpid: 42
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed
by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due
to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer (verifiable by checking for
OOM in dmesg of the OOMing node), consider enabling resource isolation via --enable-resource-isolation to prevent node
deaths by resource contention and significant loss of progress by uninformed kernel OOM killing."""
"""What Ray 2.60 says of an actor that was killed with SIGKILL, whoever did it."""
FULL = {
    "killed by Ray": (
        ray.exceptions.OutOfMemoryError(MEMORY),
        "Ray has killed",
        "rollout.cpu_kvcache_space_gib",
    ),
    "Python's": (MemoryError(), "has run out of memory", "rollout.cpu_kvcache_space_gib"),
    "a GPU's": (GPU_FULL, "has run out of memory", "micro-batches"),
    "PyTorch's on a CPU": (CPU_FULL, "has run out of memory", "qarl doctor"),
    "Ray's start": (
        Exception("The current node timed out during startup."),
        "could not be started",
        "/tmp/ray",
    ),
    "the disk": (ray.exceptions.OutOfDiskError("full"), "the disk is full", "/tmp/ray"),
    "the store": (ray.exceptions.ObjectStoreFullError("full"), "object store is full", "/dev/shm"),
    "a worker": (ray.exceptions.WorkerCrashedError(), DEAD, "run the same command again"),
    "a machine": (ray.exceptions.NodeDiedError("node 3"), DEAD, "run the same command again"),
}


@pytest.mark.parametrize("case", FULL)
@pytest.mark.parametrize("where", ["driver", "worker", "worker of a worker"])
def test_what_has_run_out_is_named(tmp_path, case, where):
    error, what, fix = FULL[case]
    for _ in range(["driver", "worker", "worker of a worker"].index(where)):
        error = of_task(error)
    named = as_user_error(error, tmp_path)
    assert named is not None and what in named.what and named.fix is not None and fix in named.fix
    assert "it starts fresh, because there is no checkpoint" in named.fix


RAYS_REPORT = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 16) was 6.77GB used / 23.54GB limit (0.287560)
OOM kill reason: Memory usage 7276556288B exceeded threshold of 252765104B (1.0% of 25276510208B limit)
Selected to kill: (Actor(fa): job ID=01, task name=WorkerDict.__init__, required resources={}, pid=30519, used=0.04GB)
Top 10 memory users: PID	MEM(GB)	COMMAND"""


def test_where_ray_killed_for_lack_of_memory_is_said_in_one_line(tmp_path):
    """The report of Ray 2.60, which has 60 lines, and the shorter one of earlier releases."""
    lines = {RAYS_REPORT: "WorkerDict.__init__, pid=30519, 6.77GB used / 23.54GB limit (0.287560)"}
    lines[MEMORY] = "WorkerDict.__init__, pid=42, 22.9GB / 23.0GB (0.99)"
    for message, where in lines.items():
        named = as_user_error(of_task(ray.exceptions.OutOfMemoryError(message)), tmp_path)
        assert named is not None and named.where == where


def test_an_actor_that_ray_killed_for_its_memory_is_not_only_dead(tmp_path):
    died = ray.exceptions.ActorDiedError()
    died.error_msg = KILLED_FOR_MEMORY
    named = as_user_error(of_task(died), tmp_path)
    assert (
        named is not None and "out of memory" in named.what and "WorkerDict" in (named.where or "")
    )
    assert as_user_error(of_task(RuntimeError("shapes differ")), tmp_path) is None


def test_an_actor_that_something_killed_is_not_one_that_ray_killed_for_its_memory(tmp_path):
    died = ray.exceptions.ActorDiedError()
    died.error_msg = KILLED_BY_SOMETHING
    named = as_user_error(of_task(died), tmp_path)
    assert named is not None and named.what == DEAD and "pid: 42" in (named.where or "")
