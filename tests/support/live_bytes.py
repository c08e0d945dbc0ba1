"""The most bytes of tensors that are alive at once, counted by their storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors that operators make inside, and those of `before`, a mode that has ended."""

    def __init__(self, before: LiveBytes | None = None) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = dict(before._known) if before else {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in inputs - self._known.keys():
                    continue  # a view of what was there before
                self._known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result
