"""Run an unquantized model with the tensors that are published for it (`quant.align=off`).

At level `off` the trainer's forward is plain BF16, so its mismatch contains the whole error of quantization. The guard
(`qarl.metrics.mismatch_limit`) must not judge that error, and therefore compares the engine with this forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from qarl.quant.convert import owners, select_linears
from qarl.quant.experts import QuantExperts
from qarl.quant.linear import QuantLinear
from qarl.quant.scheme import Scheme


@contextmanager
def published_forward(
    model: nn.Module, scheme: Scheme, ignore: Sequence[str], *, kernels: str = "engine"
) -> Iterator[None]:
    """Let the linears and experts that `scheme` quantizes multiply by low-bit tensors, in forwards without gradients.

    A layer is quantized during its forward and its tensors are dropped after it, so memory grows by one layer, and the
    weight may be one that FSDP has gathered for this forward. Layers that are quantized already stay as they are.
    `kernels`: a value of `quant.kernels`.
    """

    def low_bit(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor:
        made: nn.Module
        if isinstance(module, nn.Linear):
            made = QuantLinear(module, scheme, qualified_name=name, kernels=kernels)
        else:
            made = QuantExperts(module, scheme, qualified_name=name)
        result: torch.Tensor = made(*inputs)
        return result

    selected = owners(select_linears(model, scheme, ignore)[0])
    with ExitStack() as stack:
        for name, module in selected.items():
            if isinstance(module, QuantLinear | QuantExperts):
                continue
            handle = module.register_forward_hook(lambda module, inputs, _, name=name: low_bit(name, module, inputs))
            stack.callback(handle.remove)
        yield
