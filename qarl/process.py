"""The process that trainer and engine share: its threads, and the environment vLLM reads when it is imported.

Nothing is set at import: `limit_threads` is called before torch is imported, `configure_vllm_process` right before the
first `import vllm`. What the user has set in the environment stays.
"""

from __future__ import annotations

import os

_ENVIRONMENT = {
    # Engine and worker live in this process; a publish hands tensors over without a copy through a pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's own binding pins one thread to each core it finds; here its threads are the trainer's threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads share out requests and heads, not the keys of one query: its bits would depend on what else is decoded.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def configure_vllm_process() -> None:
    """Set the variables that the user has not set."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def limit_threads(num_threads: int | None) -> None:
    """One OpenMP pool of this size for trainer and engine alike; must run before torch is imported."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": 4, and 2 in nested regions
    wanted = num_threads or (int(given) if given.isdecimal() else 0) or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(wanted)
