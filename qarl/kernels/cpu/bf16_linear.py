"""BF16 products whose rows do not depend on the rows beside them, on CPUs with AMX.

vLLM multiplies BF16 weights of up to 1 MiB by `weight_packed_linear`, and larger ones by oneDNN, as PyTorch does
(`dispatch_cpu_unquantized_gemm`). With AMX the bits of a row depend on the number of rows in both: the first sums in
another order up to 4 rows, which it multiplies by vectors instead of tiles, and oneDNN from 33 to several hundred rows
(measured at K of 576 and more). So an engine that decodes 3 responses has other bits than one that decodes 5, or than a
trainer. Here `weight_packed_linear` multiplies weights of every size, by 5 rows at least. The trainer calls it, and the
engine too (`qarl.rollout.vllm_plugin.cpu_bf16_linears`). Without AMX rows are independent already, and vLLM and PyTorch
multiply as usual.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from qarl.kernels.cpu.vllm_linears import cpu_ops_missing

_FEWEST_ROWS = 5
_BLOCK = 16
"""Output channels of a block. Up to 15 channels, as routers have, the operator would multiply in another way."""
OPERATOR = "weight_packed_linear"


def serves(weight: torch.Tensor) -> bool:
    """Return whether vLLM's operator multiplies by `weight` [N, K] here, or PyTorch does."""
    fits = weight.dim() == 2 and weight.shape[1] % 32 == 0
    fits = fits and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return fits and torch.cpu._is_amx_tile_supported() and cpu_ops_missing(OPERATOR) is None


class Product(Protocol):
    """x [..., K] and a bias [N] or None -> x @ weight.T + bias, in the dtype of the weight, without autograd."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


def product_with(weight: torch.Tensor) -> Product:
    """Return the product with `weight` [N, K]. The operator multiplies by a packed copy, so a later update of the
    weight does not change the product."""
    if not serves(weight):
        return lambda x, bias=None: F.linear(x, weight, bias)
    out_features = len(weight)
    missing = -out_features % _BLOCK
    blocks = weight.new_zeros(out_features + missing, weight.shape[1])
    blocks[:out_features] = weight.detach()
    width = len(blocks)
    packed = torch.ops._C.convert_weight_packed(blocks)

    def multiply(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.detach().flatten(0, -2)
        if len(rows) < _FEWEST_ROWS:
            rows = F.pad(rows, (0, 0, 0, _FEWEST_ROWS - len(rows)))
        y = x.new_empty(len(rows), width)
        added = None if bias is None else F.pad(bias.detach().float(), (0, missing))
        torch.ops._C.weight_packed_linear(y, rows.contiguous(), packed, added, True)
        return y[: x.shape[:-1].numel(), :out_features].unflatten(0, x.shape[:-1])

    return multiply


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Do the same as `torch.nn.functional.linear`, with independent rows and its gradients."""
    if not serves(weight):
        return F.linear(x, weight, bias)
    y: torch.Tensor = _Linear.apply(x, weight, bias)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product_with(weight)(x, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (grad,) = ctx.saved_tensors, grad_outputs
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if needs_x else None,
            rows.t() @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
