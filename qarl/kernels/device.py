"""What kernels ask of a GPU: whether a tensor is on it, its capability, its multiprocessors, and to launch a kernel.

`assume` answers for a GPU that this machine lacks. Tensors on the meta device then stand for tensors on that GPU, so a
layer runs at its real sizes without memory, and each launch is reported and not made. `qarl bench costs` counts in
this way. PyTorch's FakeTensor with device `cuda` would not do: a build of PyTorch without CUDA cannot index such
tensors, and its autograd has no queue for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class AssumedGPU:
    """A GPU that is not there. `launched(name, tensors)` is called for each launch of a Triton kernel."""

    capability: tuple[int, int]
    processors: int
    launched: Callable[[str, Sequence[torch.Tensor]], None]


_ASSUMED: ContextVar[AssumedGPU | None] = ContextVar("assumed_gpu", default=None)


@contextmanager
def assume(gpu: AssumedGPU) -> Iterator[None]:
    """Let meta tensors stand for tensors on `gpu`."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def is_gpu(device: torch.device) -> bool:
    """Return whether `device` is a GPU, or stands for the assumed one."""
    return device.type == "cuda" or (device.type == "meta" and _ASSUMED.get() is not None)


def has_gpu() -> bool:
    """Return whether this process sees a GPU, or assumes one."""
    return _ASSUMED.get() is not None or torch.cuda.is_available()


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    assumed = _ASSUMED.get()
    return assumed.capability if assumed else torch.cuda.get_device_capability(device)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    assumed = _ASSUMED.get()
    return assumed.processors if assumed else _processors(device)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`. The host does not wait for the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel, or report the launch to the assumed GPU."""
    assumed = _ASSUMED.get()
    if assumed is None:
        kernel[grid](*arguments, **options)
        return
    given = [getattr(argument, "base", argument) for argument in (*arguments, *options.values())]
    assumed.launched(str(kernel.fn.__name__), [value for value in given if isinstance(value, torch.Tensor)])
