"""verl's platform `cpu`, for tests, development and the quickstart. verl uses it only if `VERL_PLATFORM=cpu` is set.

verl uses every platform like CUDA. It expects a device module with functions for memory, streams and IPC. Here the
memory figures are those of the process and the machine. verl also asks Ray for resources named GPU. On CPU, set their
number with `ray_kwargs.ray_init.num_gpus`.

verl asks importlib.metadata for `vllm` (verl/third_party/vllm/__init__.py); `qarl.process.answer_for_vllm` answers.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from qarl.process import answer_for_vllm


def _returns(value: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns `value`."""
    return lambda *args, **kwargs: value


def _resident(*args: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _peak(*args: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_and_total(*args: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> ModuleType:
    """Return a module for the CPU that has every name of `torch.cuda` that verl uses."""
    module = ModuleType("qarl_cpu_device", "torch.cpu with the names that verl uses of torch.cuda")
    without_effect = (
        *(
            "empty_cache",
            "synchronize",
            "ipc_collect",
            "set_device",
            "set_per_process_memory_fraction",
        ),
        *("reset_peak_memory_stats", "manual_seed", "manual_seed_all"),
    )
    vars(module).update(
        **dict.fromkeys(without_effect, _returns(None)),
        **{
            "is_available": _returns(True),
            "device_count": _returns(1),
            "current_device": _returns(0),
        },
        **{"get_device_name": _returns("cpu"), "mem_get_info": _free_and_total},
        **dict.fromkeys(("memory_allocated", "memory_reserved"), _resident),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak),
        **{"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state},
        **{name: getattr(torch.cpu, name) for name in ("Stream", "stream", "current_stream")},
    )
    return module


@PlatformRegistry.register("cpu")
class CPUPlatform(PlatformBase):
    """One logical device per process, named `cpu`."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()
    is_available = _returns(True)
    device_count = _returns(1)
    # Otherwise verl would choose this platform on machines where the GPUs are hidden.
    is_platform_available = is_ipc_supported = _returns(False)
    # A device name, not an index as on CUDA, because verl passes the result to `Tensor.to`.
    current_device = _returns("cpu")
    set_device = synchronize = set_allocator_settings = empty_cache = _returns(None)
    profiler_start = profiler_stop = cudart = _returns(None)
    get_device_capability = _returns((None, None))
    communication_backend_name = _returns("gloo")
    visible_devices_envvar = _returns("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _returns("GPU")
    ray_noset_envvars = _returns(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    nvtx_range = _returns(contextlib.nullcontext())

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


answer_for_vllm()
