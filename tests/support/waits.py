"""Counts where the host would wait for a GPU, or copy to or from it, while the same code runs on a CPU.

On a CPU nothing waits, and a read of a tensor is an ordinary read. But Python and PyTorch's dispatcher show what is
called: a number that Python takes out of a tensor, an index by a mask (which counts the true elements first), a repeat
by a tensor of unknown sum, and tensors that are made from Python numbers.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from checkout import ROOT
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
MAKERS = {"tensor", "as_tensor"}
BY_MASK = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"}
COUNTED = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::masked_scatter_backward",
    "aten::unique_dim",
    "aten::_unique2",
}


class Waits(TorchFunctionMode):
    """Counts waits and copies inside the context. `places`: their numbers by kind and function of `qarl/`, where the
    kind `upload` is a copy that the host does not wait for."""

    def __init__(self, *host: str) -> None:
        """`host`: functions that read only tensors of the host, as path:function, or paths whose functions do."""
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self._host = host
        self._dispatched = _Dispatched(self)

    @property
    def waits(self) -> dict[tuple[str, str], int]:
        return {place: count for place, count in self.places.items() if place[0] != "upload"}

    def __enter__(self) -> Any:
        self._dispatched.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._dispatched.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and isinstance(args[0], torch.Tensor):
            self.count("read")
        if name == "to" and (kwargs or {}).get("non_blocking"):
            self.count("upload")
        if name == "new_tensor" or (name in MAKERS and (kwargs or {}).get("device") is not None):
            self.count("copy")
        return func(*args, **(kwargs or {}))

    def count(self, kind: str) -> None:
        place = _place()
        if place is not None and not place.startswith(self._host):
            self.places[kind, place] += 1


class _Dispatched(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in COUNTED or (name in BY_MASK and _has_mask(args[1])):
            self._waits.count("index by a mask")
        if name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size"):
            self._waits.count("repeat by a tensor")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool
        for index in tree_leaves(indices)
    )


def _place() -> str | None:
    """The innermost function of qarl/ that is being executed, as path:function, or None within a stand-in of tests."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "tests") and path != Path(__file__):
            return None
        if path.is_relative_to(ROOT / "qarl"):
            return f"{path.relative_to(ROOT)}:{frame.name}"
    return "autograd"
