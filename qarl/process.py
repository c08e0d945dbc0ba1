"""The process that trainer and engine share: its threads, and the environment vLLM reads when it is imported.

Nothing is set at import: `limit_threads` is called before torch is imported, `configure_vllm_process` right before the
first `import vllm`, `keep_freed_memory` where a trainer on a CPU is built. What the user has set in the environment
stays.
"""

from __future__ import annotations

import ctypes
import logging
import os

from qarl.errors import UserError

_ENVIRONMENT = {
    # Engine and worker live in this process; a publish hands tensors over without a copy through a pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's own binding pins one thread to each core it finds; here its threads are the trainer's threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads share out requests and heads, not the keys of one query: its bits would depend on what else is decoded.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # On CPUs with AMX tiles vLLM would round W4A16's activations to int8: that is W4A8, which nobody asked for.
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
_LEVEL_IS_OURS = "QARL_CHOSE_VLLM_LOGGING_LEVEL"
"""The level, if we chose it: a process that this one starts inherits both, and filters too."""
_TRITON_KERNELS = "Failed to import Triton kernels"
VLLM_NOISE = {
    "vllm.triton_utils.importing": ("Triton is installed",),
    "vllm.engine.arg_utils": ("The global random seed is set", "This model does not officially support disabling"),
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.platforms.cpu": ("Reset SSM cache type",),
    "vllm.v1.worker.cpu_worker": ("libtcmalloc is not", "libiomp is not", "CPU backend doesn't allow to use"),
    "vllm.envs": ("Unknown vLLM environment variable detected: VLLM_DIST_IDENT",),  # vLLM's, once an engine was closed
    "vllm.model_executor.layers.fused_moe.config": (_TRITON_KERNELS,),
    "vllm.model_executor.layers.fused_moe.oracle.mxfp4": (_TRITON_KERNELS,),
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe": (_TRITON_KERNELS,),
}
"""Starts of vLLM's warnings that are left out, by logger: what we asked for, what this platform lacks, speed.

All its other warnings are shown, because some say that it computes something else than what it was asked for: a
temperature that it raises, a dtype that it casts, a sampling default out of generation_config.json.
"""


def runs_on_cpu(backend: str) -> bool:
    """Whether trainer and rollouts run on the CPU: if torch sees no GPU, or as VERL_PLATFORM says.

    verl alone reads that variable, so with `backend` "local" it has no say.
    """
    import torch

    platform = os.environ.get("VERL_PLATFORM", "").strip().lower() if backend == "verl" else ""
    return platform == "cpu" if platform else not torch.cuda.is_available()


def configure_vllm_process() -> None:
    """Set the variables that the user has not set, keep vLLM's log to the warnings that matter unless the user chose a
    level, and allow AMX."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if _LOGGING_LEVEL not in os.environ:
        os.environ[_LOGGING_LEVEL] = "WARNING"
        os.environ[_LEVEL_IS_OURS] = "WARNING"
    if os.environ.get(_LEVEL_IS_OURS) == os.environ[_LOGGING_LEVEL]:
        for name in VLLM_NOISE:
            logging.getLogger(name).addFilter(_is_no_noise)
    allow_matrix_tiles()


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(VLLM_NOISE.get(record.name, ()))


def allow_matrix_tiles() -> None:
    """Ask the kernel for AMX if the CPU has it.

    Linux lets a process use the tiles only after it asked. vLLM's own kernels never ask: they end with an illegal
    instruction unless oneDNN, which does, was there first.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise UserError(
            "this CPU has AMX, and the kernel does not let this process use it",
            where="arch_prctl(ARCH_REQ_XCOMP_PERM)",
            why="vLLM's kernels use the tiles wherever the CPU has them, and would end with an illegal instruction",
            fix="run on a kernel of Linux 5.16 or later, outside of a sandbox that denies AMX",
        )


def limit_threads(num_threads: int | None) -> None:
    """One OpenMP pool of this size for trainer and engine alike; must run before torch is imported."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": 4, and 2 in nested regions
    wanted = num_threads or (int(given) if given.isdecimal() else 0) or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(wanted)


_MALLOC_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_KEEP = ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0))
"""By mallopt(3) these switch trimming and separate mappings off altogether."""


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory, so that the next step finds its pages in place. Returns whether malloc agreed.

    glibc gives every freed block above 32 MiB back to the kernel, and PyTorch has no cache on a CPU: each
    step then faults its activations, gradients and temporaries in again, page by page. On a virtual machine that was a
    quarter of an update of 135M parameters, and most of what differed from step to step. The price: memory of the
    process stays at its highest mark. Nothing is done without glibc, if another malloc is preloaded, or if the
    user tuned it.
    """
    if any(name in os.environ for name in _MALLOC_ENVIRONMENT) or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    answers = [mallopt(option, value) for option, value in _KEEP]
    return answers == [1, 1]
