"""Count what PyTorch and Triton would do on a GPU, while the code runs on meta tensors.

    kernels   dispatched operators that compute, and launches of Triton kernels. Views and allocations do not count. An
              operator of PyTorch counts once, though some (sort, for one) launch several kernels
    copies    copies between host and device
    syncs     what makes the host wait for the device: a copy that is not `non_blocking`, a number read by the host, or
              an operator whose result has a size that depends on the data
    bytes     each operand is read once and each result is written once, which is the least that this operator moves. Of
              an indexed table only the rows that are read count

`Counting` is a dispatch mode: below it, meta tensors stand for the GPU's (`qarl.kernels.base.assume`) and CPU tensors
are the host's. A number that the host reads is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qarl.kernels.base import AssumedGPU, assume

_FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "device",
    "sym_",
)
"""Names of operators, or their beginnings, that start no kernel."""
_DATA_DEPENDENT = ("nonzero", "masked_select", "unique", "_unique2", "equal", "repeat_interleave")
"""Operators for whose result the host waits."""
_TABLES = ("index", "index_select", "gather", "embedding", "take_along_dim")
"""Operators that read only some rows of their first operand."""
_FILLS = (
    "fill_",
    "zero_",
    "copy_",
    "zeros",
    "ones",
    "full",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
)
"""Operators that do not read what they overwrite."""
_SCATTERS = ("index_put_", "index_put", "index_copy_", "scatter_", "index_add_", "scatter_add_")


@dataclass
class Counts:
    """Counts of one phase. `moved`: bytes read from and written to the device's memory."""

    kernels: int = 0
    copies: int = 0
    syncs: int = 0
    moved: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Counting(TorchDispatchMode):
    """Adds up `counts`, and appends to `names` the name of each kernel. The bytes of operators in `without` do not
    count."""

    def __init__(self, without: Sequence[str] = ()) -> None:
        super().__init__()
        self.counts = Counts()
        self.names: list[str] = []
        self.without = without

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (
            name in ("_to_copy", "copy_")
            and len({tensor.is_meta for tensor in operands} | _target(name, kwargs)) > 1
        ):
            return self._copy(func, name, args, kwargs)
        if name == "_local_scalar_dense" and operands[0].is_meta:
            self.names.append(name)
            self.counts += Counts(syncs=1)
            return 0
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.is_meta for tensor in (*operands, *results))
        if on_device and not name.startswith(_FREE) and not _is_view(func):
            self._count(name, operands, results)
        return result

    def launched(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Count the launch of a kernel of our own. Each of its tensors crosses the memory once."""
        self.names.append(name)
        self.counts += Counts(kernels=1, moved=_moved(tensors))

    def _count(self, name: str, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        written = _moved(results)
        if name in self.without:
            moved = 0
        elif name.startswith(_SCATTERS):
            moved = 2 * _bytes(operands[-1]) + _moved(operands[1:-1])
        elif name == "copy_":
            moved = _moved(operands)
        elif name.startswith(_FILLS):
            moved = written
        elif name in _TABLES:
            moved = 2 * written + _moved(operands[1:])
        else:
            moved = _moved(operands) + written
        self.names.append(name)
        self.counts += Counts(kernels=1, syncs=int(name in _DATA_DEPENDENT), moved=moved)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        self.names.append("copy")
        self.counts += Counts(copies=1, syncs=int(blocks))
        source: torch.Tensor = args[0]
        if name == "copy_":
            return source
        dtype = kwargs.get("dtype") or source.dtype
        device = kwargs["device"]
        return torch.empty_strided(
            source.shape, source.stride(), dtype=dtype, device=device
        ).zero_()


def _target(name: str, kwargs: Any) -> set[bool]:
    device = kwargs.get("device") if name == "_to_copy" else None
    return set() if device is None else {torch.device(device).type == "meta"}


def _is_view(func: Any) -> bool:
    """Whether the operator returns a view of its operand, without a kernel."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.nbytes)


def _moved(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of `tensors`. The same memory counts once."""
    return sum(map(_bytes, {_identity(tensor): tensor for tensor in tensors}.values()))


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the device that `tensor` covers. Expanded dimensions cover theirs once."""
    if not tensor.is_meta:
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


@contextmanager
def counting(without: Sequence[str] = ()) -> Iterator[Counting]:
    """Count what runs inside. Meta tensors stand for an H100: capability 9.0, 132 multiprocessors."""
    mode = Counting(without)
    with assume(AssumedGPU((9, 0), 132, mode.launched)), mode:
        yield mode
