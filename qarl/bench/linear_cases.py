"""What `qarl bench kernels` times of a dense weight: products, input gradients and quantizers, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.bench.competitors import Call, Competitor, ends, error_of, exact, random_rows
from qarl.bench.kernel_arguments import Arguments
from qarl.kernels.base import LinearKernel
from qarl.kernels.reference import (
    quantize_fp8,
    quantize_fp8_cuda,
    quantize_int8,
    quantize_int8_cuda,
)
from qarl.kernels.registry import kernels_of, reference_kernel
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.quantize import QuantizedTensor, codes_dtype, quantize
from qarl.schemes import Scheme, get_scheme
from qarl.schemes.base import INT8_INT8
from qarl.schemes.kernel_choice import KernelChoice


class Quantizers(NamedTuple):
    """Quantizers of activations with vLLM's arithmetic on a CPU and on CUDA.

    They often give different codes, because many BF16 activations lie exactly between two codes and are rounded
    differently."""

    on_cpu: Any
    on_cuda: Any


QUANTIZERS = {
    "int8": Quantizers(quantize_int8, quantize_int8_cuda),
    "float8": Quantizers(quantize_fp8, quantize_fp8_cuda),
}
"""The quantizers of each number format (`qarl.schemes.base.Operands`). Others have only their reference kernel's."""
BF16_ERROR = 3e-3
"""Allowed relative error of a product of BF16 numbers. Rounding the result alone causes 1.7e-3."""
PRODUCT_ERROR = {"bf16": BF16_ERROR, "int8": 3e-3, "float8": 1e-2}
"""The same by the number format of the activations. FP8 tensor cores sum in less than 24 bits."""
OTHER_PRODUCT_ERROR = 1e-2
"""The same for other number formats."""


class Layer:
    """One BF16 weight [N, K], and its low-bit tensors by name of the scheme."""

    def __init__(self, weight: torch.Tensor, arguments: Arguments) -> None:
        self.weight = weight
        self.shape = (weight.shape[0], weight.shape[1])
        self.quantized: dict[str, QuantizedTensor] = {}
        for name in arguments.scheme:
            self.quantized[name] = quantize(weight, get_scheme(name, arguments.group_size))

    def kernels(self, name: str) -> Iterator[type[LinearKernel]]:
        """Yield the registry's kernels that support this layer, except float64 references on GPUs, which are slow."""
        scheme = self.quantized[name].scheme
        device = self.weight.device
        for kernel in kernels_of(KernelChoice.ENGINE, scheme.operands):
            in_float64 = kernel.reference and scheme.rounds_activations
            slow = in_float64 and self.weight.is_cuda
            if not slow and kernel.refusal(scheme, device, self.shape) is None:
                yield kernel


def linear(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for y = x W^T."""
    weight = layer.weight
    x = random_rows(rows, layer.shape[1], weight)
    flop = 2 * rows * weight.numel()
    activations = x.nbytes + 2 * rows * layer.shape[0]
    call = partial(F.linear, x, weight)
    error = error_of(call, _product(ends(x), weight))
    moved = activations + weight.nbytes
    competitors = [Competitor("bf16", "bf16", call, error, BF16_ERROR, moved, flop)]
    for name, quantized in layer.quantized.items():
        scheme = quantized.scheme
        moved = activations + quantized.nbytes
        weight_read = _exact_weight(quantized)
        on_cpu = _product(_activations_read(scheme, ends(x), like_cuda=False), weight_read)
        on_cuda = _product(_activations_read(scheme, ends(x), like_cuda=True), weight_read)
        allowed = PRODUCT_ERROR.get(scheme.operands.activations, OTHER_PRODUCT_ERROR)
        for kernel in layer.kernels(name):
            call = partial(kernel.linear, x, kernel.prepare(quantized.tensors), None)
            error = error_of(call, on_cuda if kernel.rounds_like_cuda else on_cpu)
            competitors.append(Competitor(name, kernel.name, call, error, allowed, moved, flop))
    return competitors


def input_gradient(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for dX = dY W."""
    weight = layer.weight
    grad = random_rows(rows, layer.shape[0], weight)
    flop = 2 * rows * weight.numel()
    activations = grad.nbytes + 2 * rows * layer.shape[1]

    def competitor(
        scheme: str, kernel: str, call: Call, weight_read: torch.Tensor, size: int
    ) -> Competitor:
        error = error_of(call, _product(ends(grad), weight_read.t()))
        return Competitor(scheme, kernel, call, error, BF16_ERROR, activations + size, flop)

    plain = partial(torch.mm, grad, weight)
    competitors = [competitor("bf16", "bf16", plain, weight, weight.nbytes)]
    for name, quantized in layer.quantized.items():
        dequantized = quantized.dequantize(torch.bfloat16)
        for kernel in layer.kernels(name):
            if kernel.computes_input_gradient and kernel.input_gradient_by is None:
                call = partial(kernel.backward_input, grad, quantized.tensors)
                competitors.append(
                    competitor(name, kernel.name, call, dequantized, quantized.nbytes)
                )
    return competitors


def _activations_read(scheme: Scheme, x: torch.Tensor, *, like_cuda: bool) -> torch.Tensor:
    """Return the activations that a product of `scheme` multiplies: x itself, or the quantized x in float64."""
    if not scheme.rounds_activations:
        return x
    quantizers = QUANTIZERS.get(scheme.operands.activations)
    if quantizers is None:
        reference = reference_kernel(scheme.operands)
        return exact(*reference.quantize_input(x))
    quantizer = quantizers.on_cuda if like_cuda else quantizers.on_cpu
    return exact(*quantizer(x))


def _exact_weight(quantized: QuantizedTensor) -> torch.Tensor:
    """Return the dequantized weight: BF16 if the activations are BF16, float64 if they are quantized, too.
    Kernels of two quantized operands do not round the weight to BF16, because they scale the sums."""
    if not quantized.scheme.rounds_activations:
        return quantized.dequantize(torch.bfloat16)
    return exact(quantized.tensors["weight"], quantized.tensors["weight_scale"])


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def quantize_weight(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors that quantize the master. The error is 0 if all bytes equal a reference, else 1.
    The reference is made on the CPU, because PyTorch on CUDA multiplies by the reciprocal of a Python divisor."""
    competitors = []
    weight = layer.weight
    for name, quantized in layer.quantized.items():
        scheme = quantized.scheme
        moved = weight.nbytes + quantized.nbytes
        codes, scale = _codes_and_scales(weight.cpu(), scheme)
        expected = codes.to(weight.device), scale.to(weight.device)
        calls: dict[str, Callable[[], Any]] = {
            "pytorch": partial(_codes_and_scales, weight, scheme)
        }
        if triton_unavailable(INT8_INT8, weight.device) is None:
            calls["triton"] = _triton_quantizer(weight, scheme)
        for kernel, call in calls.items():
            error = partial(_differ, call, expected)
            competitors.append(Competitor(name, kernel, call, error, 0.0, moved))
    return competitors


def _codes_and_scales(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = quantize(weight, scheme).tensors
    codes = tensors["weight_packed" if scheme.packs_codes else "weight"]
    return codes, tensors["weight_scale"]


def _triton_quantizer(weight: torch.Tensor, scheme: Scheme) -> Callable[[], Any]:
    from qarl.kernels.triton import quantize as kernels

    if scheme.packs_codes:
        return partial(kernels.quantize_int4, weight, scheme.group_size or weight.shape[1])
    return partial(kernels.quantize_rows, weight, codes_dtype(scheme))


def _differ(call: Callable[[], Any], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    codes, scale = call()[:2]
    expected_codes, expected_scale = expected
    same_codes = torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    same = same_codes and torch.equal(scale, expected_scale)
    return 0.0 if same else 1.0


BUILDERS: dict[str, Callable[[Layer, int], list[Competitor]]] = {
    "linear": linear,
    "input_gradient": input_gradient,
    "quantize": quantize_weight,
}
