"""Competing implementations of products with one weight, and their correct results.

    linear           y = x W^T of a quantized linear, including the quantization of activations
    input_gradient   dX = dY W, from the low-bit weight

The baseline is `torch.nn.functional.linear` in BF16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from qarl.bench.kernels.competitor import FP8_ERROR, PRODUCT_ERROR, Competitor, ends, error_of, random_rows
from qarl.bench.kernels.layer import Layer
from qarl.bench.kernels.quantizers import QUANTIZERS, quantize_activations, quantize_weight
from qarl.kernels.int4 import unpack_int4
from qarl.kernels.registry import own_backward_input
from qarl.quant.quantize import QuantizedTensor


def linear(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for y = x W^T."""
    weight, x = layer.weight, random_rows(rows, layer.shape[1], layer.weight)
    flop, activations = 2 * rows * weight.numel(), x.nbytes + 2 * rows * layer.shape[0]
    exact, plain = _product(ends(x), weight), partial(F.linear, x, weight)
    found = [
        Competitor("bf16", "bf16", plain, error_of(plain, exact), PRODUCT_ERROR, activations + weight.nbytes, flop)
    ]
    for scheme, quantized in layer.quantized.items():
        moved, exact_weight = activations + quantized.nbytes, _exact_weight(scheme, quantized)
        expected = {on_cuda: _product(_seen(scheme, ends(x), on_cuda), exact_weight) for on_cuda in (False, True)}
        allowed = FP8_ERROR if scheme == "fp8" else PRODUCT_ERROR
        for kernel in layer.kernels(scheme):
            call = partial(kernel.linear, x, kernel.prepare(quantized.tensors), None)
            target = expected[kernel.name.startswith(("triton", "vllm_cutlass"))]
            found.append(Competitor(scheme, kernel.name, call, error_of(call, target), allowed, moved, flop))
        if scheme == "w4a16" and importlib.util.find_spec("gemlite"):
            try:
                other = _gemlite(quantized.tensors, x)
            except Exception as error:  # third-party code may raise anything; the rest must still be measured
                layer.failures["w4a16 gemlite"] = f"{type(error).__name__}: {error}"
            else:
                off = error_of(other, expected[True])
                found.append(Competitor(scheme, "gemlite", other, off, PRODUCT_ERROR, moved, flop))
    return found


def input_gradient(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for dX = dY W."""
    weight, grad = layer.weight, random_rows(rows, layer.shape[0], layer.weight)
    flop, activations = 2 * rows * weight.numel(), grad.nbytes + 2 * rows * layer.shape[1]
    calls: list[tuple[str, str, Callable[[], torch.Tensor], torch.Tensor, int]] = []
    calls.append(("bf16", "bf16", partial(torch.mm, grad, weight), weight, weight.nbytes))
    for scheme, quantized in layer.quantized.items():
        dequantized = quantized.dequantize(torch.bfloat16)
        for kernel in layer.kernels(scheme):
            own = own_backward_input(kernel)
            if own is not None and not kernel.name.startswith("vllm"):  # vLLM's kernels use the Triton kernels' dX
                call = partial(own, grad, kernel.prepare(quantized.tensors))
                calls.append((scheme, kernel.name, call, dequantized, quantized.nbytes))
    return [
        Competitor(scheme, name, call, error_of(call, _product(ends(grad), by.t())), PRODUCT_ERROR,
                   activations + size, flop)
        for scheme, name, call, by, size in calls
    ]  # fmt: skip


def _gemlite(tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of gemlite (github.com/dropbox/gemlite) with the same int4 codes and scales.
    gemlite reads unsigned codes with a zero point of 8."""
    from gemlite.core import DType, GemLiteLinear

    codes, scale = unpack_int4(tensors["weight_packed"]).add_(8).to(torch.uint8), tensors["weight_scale"]
    n, k = codes.shape
    linear = GemLiteLinear(
        4, group_size=k // scale.shape[1], in_features=k, out_features=n, input_dtype=DType.BF16,
        output_dtype=DType.BF16,
    )  # fmt: skip
    linear.pack(codes, scale, torch.full_like(scale, 8.0), None)
    linear(x)
    return partial(linear, x)


def _seen(scheme: str, x: torch.Tensor, on_cuda: bool) -> torch.Tensor:
    """Return the activations that a product of `scheme` multiplies: x itself, or the quantized x in float64."""
    if scheme == "w4a16":
        return x
    values, scale = QUANTIZERS[scheme, on_cuda](x)
    return values.double() * scale.double()


def _exact_weight(scheme: str, quantized: QuantizedTensor) -> torch.Tensor:
    """Return the dequantized weight: BF16 for W4A16, float64 for 8 bits.
    8-bit kernels do not round the weight to BF16, because they scale the sums."""
    if scheme == "w4a16":
        return quantized.dequantize(torch.bfloat16)
    tensors = quantized.tensors
    return tensors["weight"].double() * tensors["weight_scale"].double()


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


BUILDERS: dict[str, Callable[[Layer, int], list[Competitor]]] = {
    "linear": linear,
    "input_gradient": input_gradient,
    "quantize": quantize_weight,
    "quantize_activations": quantize_activations,
}
