"""Keep every tensor that a CUDA graph can have captured at its address.

A captured graph reads and writes raw addresses: those of parameters and buffers, and those of tensors that vLLM keeps
in other objects, for example `MarlinLinearKernel.workspace`. vLLM's layerwise reload copies parameters and buffers into
their old storage. But it also calls `process_weights_after_loading` again, which may assign a new tensor to any other
attribute. Python frees the old tensor, and the graph then uses memory that belongs to something else. In the older
supported release this happens to the workspace of every Marlin layer (vllm-project/vllm#48438).

So `addresses_kept` puts the old tensors back after a reload, with the new values (Marlin's workspace: zeros), and
`moved` finds the tensors that are not at their old address at the end of a publish.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from qarl.quant.meta_model import default_dtype_kept

_OURS = ("vllm", "qarl")
"""Packages whose objects are searched for tensors."""
_LEFT_OUT = (
    "vllm.config",
    "vllm.distributed",
    "vllm.platforms",
    "vllm.compilation",
    "vllm.transformers_utils",
)
"""Modules whose objects are not searched: settings, groups of processes, and the compiled graphs themselves."""
_OF_MODULE = tuple(vars(nn.Module()))
"""Attributes of every nn.Module. `_children` reads its parameters, buffers and submodules separately."""

_PLAIN = (str, bytes, int, float, type, type(None), torch.dtype, torch.device)
"""Values that contain no tensors. They are left out early, because a model has tens of thousands of them."""

Put = Callable[[torch.Tensor], object]


class TensorSlot(NamedTuple):
    """A tensor in a model. `memory` shares its memory, even if `tensor.data` is replaced. While a TensorSlot exists,
    no other tensor can get its address. `put` assigns a tensor to the slot. It is None for parameters and buffers,
    which vLLM puts back itself, and for slots that cannot be assigned to."""

    tensor: torch.Tensor
    memory: torch.Tensor
    put: Put | None

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


def graphs_captured(vllm_config: Any) -> bool:
    """Return whether vLLM with this config captures CUDA graphs."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and mode.name != "NONE"


def on_cpu() -> bool:
    """Return whether vLLM runs on a CPU. There are no graphs there, and a tensor may contain the address of an object
    that is freed together with the tensor (oneDNN's handlers)."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def tensor_slots(modules: Mapping[str, nn.Module]) -> dict[str, TensorSlot]:
    """Return every tensor with elements that is reachable from `modules`, by its path."""
    by_path: dict[str, TensorSlot] = {}
    seen: set[int] = set()
    stack: list[tuple[str, Any, Put | None]] = [
        (name, module, None) for name, module in modules.items()
    ]
    while stack:
        path, value, put = stack.pop()
        if isinstance(value, torch.Tensor):
            if value.numel() and value.device.type != "meta":
                by_path[path] = TensorSlot(value, value.detach(), put)
        elif id(value) not in seen:
            seen.add(id(value))
            below = [
                (f"{path}.{name}", v, put)
                for name, v, put in _children(value)
                if not isinstance(v, _PLAIN)
            ]
            stack += reversed(below)
    return by_path


@contextmanager
def addresses_kept(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """In this context vLLM may reload `modules`. Afterwards, put each tensor that was replaced by one of the same dtype
    and layout back to its place, with the new values."""
    before = tensor_slots(modules)
    yield
    after = tensor_slots(modules)
    for path, old in before.items():
        new = after.get(path)
        if (
            new is None
            or new.put is None
            or new.address == old.address
            or _layout(new.memory) != _layout(old.memory)
        ):
            continue
        old.memory.copy_(new.memory)
        old.tensor.data = old.memory
        new.put(old.tensor)


@contextmanager
def as_vllm_loads(vllm_config: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """In this context vLLM's layers can process loaded weights, and what a graph can have captured stays in place.

    vLLM's model loader sets the default dtype too, because layers read it when they process loaded weights."""
    from vllm.config import set_current_vllm_config

    addresses = nullcontext() if on_cpu() else addresses_kept(modules)
    with set_current_vllm_config(vllm_config), default_dtype_kept(), addresses:
        torch.set_default_dtype(vllm_config.model_config.dtype)
        yield


def moved(before: Mapping[str, TensorSlot], after: Mapping[str, TensorSlot]) -> list[str]:
    """Return the paths of `before` whose tensors are no longer in the model. `tensor_slots` returns both arguments."""
    present = {slot.address for slot in after.values()}
    return [path for path, slot in before.items() if slot.address not in present]


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _children(value: Any) -> Iterable[tuple[str, Any, Put | None]]:
    """Return (name, value, put) of everything in `value` that can contain tensors."""
    if isinstance(value, nn.Module):
        for members in (value._parameters, value._buffers, value._modules):
            yield from ((name, member, None) for name, member in members.items())
        yield from (
            (n, v, _setter(value, n)) for n, v in list(vars(value).items()) if n not in _OF_MODULE
        )
    elif isinstance(value, dict):
        yield from (
            (f"[{key}]", item, functools.partial(value.__setitem__, key))
            for key, item in value.items()
        )
    elif isinstance(value, list):
        yield from (
            (f"[{i}]", item, functools.partial(value.__setitem__, i))
            for i, item in enumerate(value)
        )
    elif isinstance(value, tuple | set | frozenset):
        yield from ((f"[{i}]", item, None) for i, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (
            ("func", value.func, None),
            ("args", value.args, None),
            ("keywords", value.keywords, None),
        )
    elif isinstance(value, MethodType):
        yield "self", value.__self__, None
    elif isinstance(value, FunctionType):
        cells = _cells(value) if _is_searched(value.__module__) else ()
        yield from ((f"cell{i}", cell, None) for i, cell in enumerate(cells))
    elif _is_searched(type(value).__module__):
        yield from (
            (n, v, _setter(value, n)) for n, v in list(getattr(value, "__dict__", {}).items())
        )


def _setter(holder: Any, name: str) -> Put:
    """`object.__setattr__`, because frozen dataclasses and nn.Module have their own `__setattr__`."""
    return functools.partial(object.__setattr__, holder, name)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_searched(module: str) -> bool:
    return module.partition(".")[0] in _OURS and not module.startswith(_LEFT_OUT)
