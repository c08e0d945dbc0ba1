"""The environment vLLM reads when it is imported or its engine is built, for an engine inside the trainer's process.

Nothing is set at import: `configure_vllm_process` is called right before the first `import vllm`. What the user has
set in the environment stays.
"""

from __future__ import annotations

import os

_ENVIRONMENT = {
    # Engine and worker live in this process; a publish hands tensors over without a copy through a pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's own binding pins one thread to each core it finds; here its threads are the trainer's threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def configure_vllm_process() -> None:
    """Set the variables that the user has not set."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
