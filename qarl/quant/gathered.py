"""`GatheredWeight`: the parameter that FSDP2 registers while a layer's low-bit tensors are gathered.

FSDP2 needs one tensor with the shape of the original parameter, for which autograd computes a gradient. The forward
needs several low-bit tensors. So a `GatheredWeight` has the parameter's shape and dtype, and the low-bit tensors as an
attribute. It has no BF16 data. Operations that would read BF16 data raise.

Like torchao's FP8 weights, it uses PyTorch's extension point `__torch_dispatch__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class GatheredWeight(torch.Tensor):
    """`tensors`: the gathered tensors by name. FSDP2 reuses their memory after the next resharding."""

    tensors: dict[str, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> GatheredWeight:
        device = next(iter(tensors.values())).device
        self: GatheredWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.tensors = tensors
        return self

    def __init__(self, shape: torch.Size, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wrap `tensors`. FSDP2's parameter and all its aliases share this one dictionary."""

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # PyTorch's own has a private type
        return f"GatheredWeight({list(self.shape)}, {', '.join(self.tensors)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # PyTorch's own way to disable it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares it without a signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return an alias for the operations with which FSDP2 and `nn.Parameter` wrap a tensor. Refuse all others."""
        weight = args[0]
        whole = func is torch.ops.aten.as_strided.default and tuple(args[1]) == tuple(weight.shape)
        if func in _ALIASES or whole:
            return cls(weight.shape, weight.dtype, weight.tensors)
        raise RuntimeError(f"{func} needs a BF16 weight, but only its low-bit tensors were gathered")
