"""Competing implementations of quantizers.

    quantize               master weight to the wire tensors, once per optimizer step
    quantize_activations   BF16 rows to 8 bits and a scale per token

The baseline is eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from qarl.bench.kernels.competitor import Competitor, random_rows, relative
from qarl.bench.kernels.layer import Layer
from qarl.kernels.activations import quantize_fp8, quantize_fp8_cuda, quantize_int8, quantize_int8_cuda
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme, get_scheme

Quantizer = Callable[[], tuple[torch.Tensor, torch.Tensor]]
QUANTIZERS = {
    ("w8a8", False): quantize_int8,
    ("w8a8", True): quantize_int8_cuda,
    ("fp8", False): quantize_fp8,
    ("fp8", True): quantize_fp8_cuda,
}
"""(scheme, True for vLLM's arithmetic on CUDA, False for CPU) -> quantizer of activations. CUDA and CPU often give
different codes, because many BF16 activations lie exactly between two codes and are rounded differently."""
CODES_ERROR = 1e-3
"""Allowed relative error of quantized rows. It is not 0, because a few codes may differ by one."""


def triton_runs(device: torch.device) -> bool:
    """Return whether Triton works here: on a GPU or, for tests, under the interpreter."""
    return triton_unavailable("w8a8", device) is None


def quantize_weight(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors that quantize the master. The error is 0 if all bytes equal a reference, else 1.
    The reference is made on the CPU, because PyTorch on CUDA multiplies by the reciprocal of a Python divisor."""
    found, weight = [], layer.weight
    for scheme, quantized in layer.quantized.items():
        grid, moved = get_scheme(scheme, layer.arguments.group_size), weight.nbytes + quantized.nbytes
        codes, scale = _wire(weight.cpu(), grid)
        expected = codes.to(weight.device), scale.to(weight.device)
        calls: dict[str, Quantizer] = {"pytorch": partial(_wire, weight, grid)}
        if triton_runs(weight.device):
            calls |= {"triton": _triton(layer, scheme, copy=False),
                      "triton, and the BF16 copy": _triton(layer, scheme, copy=True)}  # fmt: skip
        for name, call in calls.items():
            copied = 2 * weight.numel() * name.endswith("copy")
            found.append(Competitor(scheme, name, call, partial(_differ, call, expected), 0.0, moved + copied))
    return found


def _wire(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) made by PyTorch."""
    tensors = quantize(weight, scheme).tensors
    return tensors["weight_packed" if "weight_packed" in tensors else "weight"], tensors["weight_scale"]


def _triton(layer: Layer, scheme: str, *, copy: bool) -> Any:
    from qarl.kernels.triton import quantize as kernels

    if scheme == "w4a16":
        return partial(kernels.quantize_int4, layer.weight, layer.arguments.group_size, dequantize=copy)
    dtype = torch.int8 if scheme == "w8a8" else torch.float8_e4m3fn
    return partial(kernels.quantize_rows, layer.weight, dtype, dequantize=copy)


def _differ(call: Callable[[], Any], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    codes, scale = call()[:2]
    same = torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    return 0.0 if same else 1.0


def quantize_activations(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors that quantize BF16 [M, K] to 8 bits.
    PyTorch's scales may differ by rounding, and its codes by one."""
    x = random_rows(rows, layer.shape[1], layer.weight)
    written, on_gpu = x.numel() + 4 * rows, triton_runs(x.device)
    found = []
    for scheme in (name for name in ("w8a8", "fp8") if name in layer.quantized):
        eager = QUANTIZERS[scheme, on_gpu]
        dtype = eager(x[:1])[0].dtype
        calls: dict[str, Quantizer] = {"pytorch": partial(eager, x)}
        for kernel in layer.kernels(scheme):
            own = getattr(kernel, "quantize", None)
            if own is not None:
                calls[kernel.name] = partial(own, x)
        if on_gpu:
            from qarl.kernels.triton.activations import quantize_tokens

            calls["triton"] = partial(quantize_tokens, x, dtype)
        for name, call in calls.items():
            error = partial(_off, call, calls["pytorch"])
            found.append(Competitor(scheme, name, call, error, CODES_ERROR, x.nbytes + written))
    return found


def _off(call: Quantizer, expected: Quantizer) -> float:
    (values, scale), (true, true_scale) = call(), expected()
    return relative(values.double() * scale.double(), true.double() * true_scale.double())
