"""What is measured against what: for every operation the calls that compete, and what each must compute.

    linear                 forward of a quantized linear, activation quantization included
    input_gradient         dX from the low-bit weight
    quantize               master weight to the wire tensors, once per optimizer step
    quantize_activations   BF16 rows to 8 bits and a scale per token

The baseline of the products is `torch.nn.functional.linear` in BF16, that of quantizing weights compressed-tensors, and
that of quantizing activations eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from qarl.bench import others
from qarl.bench.arguments import Arguments
from qarl.kernels.activations import (
    quantize_fp8,
    quantize_fp8_cuda,
    quantize_int8,
    quantize_int8_cuda,
    rms_norm,
    silu_mul,
)
from qarl.kernels.cuda.vllm_ops import VllmMarlinLinear
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.registry import LINEAR_KERNELS, LinearKernel, own_backward_input
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme, get_scheme
from qarl.quant.tensor import QuantizedTensor

Quantizer = Callable[[], tuple[torch.Tensor, torch.Tensor]]
QUANTIZERS = {
    ("w8a8", False): quantize_int8,
    ("w8a8", True): quantize_int8_cuda,
    ("w4a8", False): quantize_int8,
    ("w4a8", True): quantize_int8_cuda,
    ("fp8", False): quantize_fp8,
    ("fp8", True): quantize_fp8_cuda,
}
"""(scheme, whether as vLLM's operators on CUDA, not as those on CPU) -> activations to 8 bits. BF16 activations often
fall on the middle of two codes, where the two arithmetics part."""
BASELINE = {
    "linear": "bf16",
    "input_gradient": "bf16",
    "quantize": "compressed-tensors",
    "quantize_activations": "pytorch",
    "grouped_linear": "bf16",
    "grouped_input_gradient": "bf16",
    "experts": "bf16",
}
CHECKED_ROWS = 64
"""Rows at each end of a result that are compared with float64."""
PRODUCT_ERROR, FP8_ERROR = 3e-3, 1e-2
"""Relative RMS error allowed to a product: BF16 rounding alone is 1.7e-3; FP8 tensor cores sum in fewer than 24 bits.
"""
OTHER_GRID_ERROR = {"w4a16": 0.2, "w8a8": 0.05, "fp8": 0.1}
"""The same to a library that quantizes on its own grid, against the BF16 product."""


@dataclass(frozen=True)
class Competitor:
    """`call` is measured; `error` says how far its result is off, and `allowed` how far it may be; `bytes_moved` and
    `flop` are what the operation needs, whoever does it."""

    scheme: str
    kernel: str
    call: Callable[[], object]
    error: Callable[[], float]
    allowed: float
    bytes_moved: int
    flop: int = 0

    @property
    def name(self) -> str:
        return f"{self.scheme} {self.kernel}"


@dataclass
class Layer:
    """One BF16 weight [N, K], and what every scheme made of it; `failures` collects what could not be built."""

    weight: torch.Tensor
    arguments: Arguments
    failures: dict[str, str]

    def __post_init__(self) -> None:
        self.quantized: dict[str, QuantizedTensor] = {}
        for name in self.arguments.scheme:
            scheme = get_scheme(name, self.arguments.group_size)
            if why_not := scheme.check_shape("the layer", *self.shape):
                self.failures[name] = why_not
            else:
                self.quantized[name] = quantize(self.weight, scheme)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def kernels(self, scheme: str) -> Iterator[type[LinearKernel]]:
        """Those of the registry that can serve here."""
        for kernel in LINEAR_KERNELS[scheme]:
            sizes = getattr(kernel, "group_sizes", None)
            fits = sizes is None or not get_scheme(scheme).group_size or self.arguments.group_size in sizes
            slow = kernel.name == "reference" and self.weight.is_cuda and scheme != "w4a16"  # float64 products
            if fits and not slow and self._serves(kernel, scheme):
                yield kernel

    def _serves(self, kernel: type[LinearKernel], scheme: str) -> bool:
        """Marlin is measured also where vLLM prefers Machete."""
        why_not = kernel.unavailable(scheme, self.weight.device, self.shape)
        machete = kernel is VllmMarlinLinear and why_not == "here vLLM itself runs MacheteLinearKernel"
        return why_not is None or machete


def linear(layer: Layer, rows: int) -> list[Competitor]:
    """y = x W^T."""
    x = _random(rows, layer.shape[1], layer.weight)
    flop, weight = 2 * rows * layer.weight.numel(), layer.weight
    activations = x.nbytes + 2 * rows * layer.shape[0]
    exact = _product(x, weight)
    plain = Competitor("bf16", "bf16", lambda: F.linear(x, weight), lambda: _off(F.linear(x, weight), exact),
                       PRODUCT_ERROR, activations + weight.nbytes, flop)  # fmt: skip
    found = [plain]
    for scheme, quantized in layer.quantized.items():
        moved = activations + quantized.nbytes
        exact_weight = _exact_weight(scheme, quantized)
        expected = {on_cuda: _product(_seen(scheme, x, on_cuda), exact_weight) for on_cuda in (False, True)}
        allowed = FP8_ERROR if scheme == "fp8" else PRODUCT_ERROR
        for kernel in layer.kernels(scheme):
            prepared = kernel.prepare(quantized.tensors)
            call = partial(kernel.linear, x, prepared, None)
            target = expected[_rounds_as_on_cuda(kernel.name)]
            found.append(Competitor(scheme, kernel.name, call, _error(call, target), allowed, moved, flop))
        for name, build, target, limit in _others(layer, scheme, quantized, exact, expected[True]):
            try:
                call = partial(build(), x)
                call()
            except Exception as error:  # another project's: whatever it raises, the rest is measured
                layer.failures[f"{scheme} {name}"] = f"{type(error).__name__}: {error}"
            else:
                found.append(Competitor(scheme, name, call, _error(call, target), limit, moved, flop))
    return found


def input_gradient(layer: Layer, rows: int) -> list[Competitor]:
    """dX = dY W."""
    grad = _random(rows, layer.shape[0], layer.weight)
    flop, weight = 2 * rows * layer.weight.numel(), layer.weight
    activations = grad.nbytes + 2 * rows * layer.shape[1]
    plain = partial(torch.mm, grad, weight)
    found = [Competitor("bf16", "bf16", plain, _error(plain, _product(grad, weight.t())), PRODUCT_ERROR,
                        activations + weight.nbytes, flop)]  # fmt: skip
    for scheme, quantized in layer.quantized.items():
        dequantized = quantized.dequantize(torch.bfloat16)
        expected = _product(grad, dequantized.t())
        for kernel in layer.kernels(scheme):
            own = own_backward_input(kernel)
            if own is not None and not kernel.name.startswith("vllm"):  # theirs is the Triton kernels'
                call = partial(own, grad, kernel.prepare(quantized.tensors))
                moved = activations + quantized.nbytes
                found.append(Competitor(scheme, kernel.name, call, _error(call, expected), PRODUCT_ERROR, moved, flop))
        if scheme == "w4a16" and _triton_runs(grad.device):
            fused = _fused_input_gradient(grad, quantized)
            moved = activations + quantized.nbytes
            error = _error(fused, expected)
            found.append(Competitor(scheme, "triton, fused", fused, error, PRODUCT_ERROR, moved, flop))
    return found


def _fused_input_gradient(grad: torch.Tensor, quantized: QuantizedTensor) -> Callable[[], torch.Tensor]:
    """With the tile of the most rows that the table has, also where the table dequantizes first."""
    from qarl.kernels.triton.tables import architecture, tables
    from qarl.kernels.triton.w4a16 import w4a16_backward_input

    tile = tables()[architecture(grad.device)]["w4a16_backward"][-1].tile
    packed, scale = quantized.tensors["weight_packed"], quantized.tensors["weight_scale"]
    return partial(w4a16_backward_input, grad, packed, scale, tile=tile)


def quantize_weight(layer: Layer, rows: int) -> list[Competitor]:
    """Master to wire tensors, equal byte for byte to what compressed-tensors makes of them: the error is 0 or 1.

    Where compressed-tensors is not installed, equal to the reference quantizer on the CPU.
    """
    found = []
    theirs_here = others.installed("compressed_tensors")
    for scheme, quantized in layer.quantized.items():
        grid = get_scheme(scheme, layer.arguments.group_size)
        moved = layer.weight.nbytes + quantized.nbytes
        if theirs_here:
            theirs = others.compressed_tensors_quantizer(layer.weight, grid)
            found.append(Competitor(scheme, "compressed-tensors", theirs, lambda: 0.0, 0.0, moved))
        # On CPU, since CUDA divides by a Python number as by its reciprocal.
        master = layer.weight.cpu()
        wire = others.compressed_tensors_quantizer(master, grid)() if theirs_here else quantize(master, grid).tensors
        values = wire["weight_packed" if "weight_packed" in wire else "weight"].to(layer.weight.device)
        scale = wire["weight_scale"].to(quantized.tensors["weight_scale"])
        mine = partial(_wire, layer.weight, grid)
        found.append(Competitor(scheme, "qarl.quant", mine, partial(_bytes_off, mine, values, scale), 0.0, moved))
        found += _triton_quantizers(layer, scheme, values, scale, moved)
    return found


def _wire(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = quantize(weight, scheme).tensors
    return tensors["weight_packed" if "weight_packed" in tensors else "weight"], tensors["weight_scale"]


def _triton_quantizers(
    layer: Layer, scheme: str, values: torch.Tensor, scale: torch.Tensor, moved: int
) -> list[Competitor]:
    if not _triton_runs(layer.weight.device):
        return []
    from qarl.kernels.triton import quantize as kernels

    found = []
    for copy in (False, True):
        if scheme in ("w4a16", "w4a8"):
            call = partial(kernels.quantize_int4, layer.weight, layer.arguments.group_size, dequantize=copy)
        else:
            function = kernels.quantize_int8 if scheme == "w8a8" else kernels.quantize_e4m3
            call = partial(function, layer.weight, dequantize=copy)
        name = "triton, and the BF16 copy" if copy else "triton"
        bytes_moved = moved + copy * layer.weight.numel() * 2
        found.append(Competitor(scheme, name, call, partial(_bytes_off, call, values, scale), 0.0, bytes_moved))
    return found


def quantize_activations(layer: Layer, rows: int) -> list[Competitor]:
    """BF16 [M, K] to 8 bits; scales to FP32 rounding, codes one apart at most."""
    x = _random(rows, layer.shape[1], layer.weight)
    moved = x.nbytes + x.numel() + 4 * rows
    found = []
    on_cuda = _triton_runs(x.device)
    for scheme in ("w8a8", "fp8"):
        if scheme not in layer.quantized:
            continue
        eager = QUANTIZERS[scheme, on_cuda]
        values, scale = eager(x)
        expected = values.double() * scale.double()
        calls: dict[str, Quantizer] = {"pytorch": partial(eager, x)}
        for kernel in layer.kernels(scheme):
            own = getattr(kernel, "quantize", None)
            if own is not None:
                calls[kernel.name] = partial(own, x)
        if on_cuda:
            from qarl.kernels.triton.activations import quantize_tokens

            calls["triton"] = partial(quantize_tokens, x, values.dtype)
        for name, call in calls.items():
            found.append(Competitor(scheme, name, call, partial(_codes_off, call, expected), 1e-3, moved))
        if on_cuda:
            found += _fused_quantizers(scheme, x, values.dtype)
    return found


def _fused_quantizers(scheme: str, x: torch.Tensor, dtype: torch.dtype) -> list[Competitor]:
    """RMSNorm, and SiLU times up, with the quantization behind them, in one pass. The order of RMSNorm's sum is the
    kernel's own, which moves a code here and there."""
    from qarl.kernels.triton import activations as kernels

    eager, weight, up = QUANTIZERS[scheme, True], _random(1, x.shape[1], x)[0], _random(len(x) + 1, x.shape[1], x)[1:]
    written = x.numel() + 4 * len(x)
    cases: dict[str, tuple[Callable[[], torch.Tensor], Quantizer, float, int]] = {
        "RMSNorm": (
            lambda: rms_norm(x, weight, 1e-6)[0],
            lambda: kernels.norm_quantize(x, weight, 1e-6, dtype)[:2],
            5e-3,
            x.nbytes,
        ),
        "SiLU times up": (
            lambda: silu_mul(x, up),
            lambda: kernels.silu_mul_quantize(x, up, dtype),
            5e-3,
            2 * x.nbytes,
        ),
    }
    found = []
    for name, (before, fused, allowed, read) in cases.items():
        unfused = partial(_then, before, eager)
        values, scale = unfused()
        error = partial(_codes_off, fused, values.double() * scale.double())
        found.append(Competitor(scheme, f"triton, with {name}", fused, error, allowed, read + written))
        found.append(Competitor(scheme, f"pytorch, with {name}", unfused, lambda: 0.0, 0.0, read + written))
    return found


def _then(before: Callable[[], torch.Tensor], quantizer: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return quantizer(before())


BUILDERS: dict[str, Callable[[Layer, int], list[Competitor]]] = {
    "linear": linear,
    "input_gradient": input_gradient,
    "quantize": quantize_weight,
    "quantize_activations": quantize_activations,
}


def _others(
    layer: Layer, scheme: str, quantized: QuantizedTensor, exact: torch.Tensor, expected: torch.Tensor
) -> Iterator[tuple[str, Callable[[], others.Linear], torch.Tensor, float]]:
    """(name, builder, what it must compute, error allowed) of the other projects that are installed."""
    if scheme == "w4a16" and others.installed("gemlite"):
        yield "gemlite", lambda: others.gemlite_w4a16(quantized.tensors), expected, PRODUCT_ERROR
    if scheme in OTHER_GRID_ERROR and others.installed("torchao"):
        group = layer.arguments.group_size
        yield (
            "torchao",
            lambda: others.torchao_linear(scheme, layer.weight, group),
            exact,
            OTHER_GRID_ERROR[scheme],
        )


def _triton_runs(device: torch.device) -> bool:
    """On GPUs, and under the interpreter, which tries the benchmark itself."""
    return triton_unavailable("w8a8", device) is None


def _random(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(rows * 31 + cols)
    return torch.randn(rows, cols, generator=generator, device=like.device).bfloat16()


def _seen(scheme: str, x: torch.Tensor, on_cuda: bool) -> torch.Tensor:
    """What a product of `scheme` multiplies by, at the rows that are checked."""
    ends = _ends(x)
    if scheme == "w4a16":
        return ends
    values, scale = QUANTIZERS[scheme, on_cuda](ends)
    return values.double() * scale.double()


def _rounds_as_on_cuda(kernel: str) -> bool:
    return kernel.startswith(("triton", "vllm_cutlass"))


def _exact_weight(scheme: str, quantized: QuantizedTensor) -> torch.Tensor:
    """W4A16 multiplies by the BF16 rounding of code times scale; the others by codes, and scale later."""
    if scheme == "w4a16":
        return quantized.dequantize(torch.bfloat16)
    if scheme == "w4a8":
        tensors = quantized.tensors
        return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"].double(), torch.float64)
    return quantized.tensors["weight"].double() * quantized.tensors["weight_scale"].double()


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64, the rows at both ends."""
    return _ends(x).double() @ weight.double().t()


def _ends(y: torch.Tensor) -> torch.Tensor:
    return y if len(y) <= 2 * CHECKED_ROWS else torch.cat([y[:CHECKED_ROWS], y[-CHECKED_ROWS:]])


def _off(y: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (_ends(y).double() - expected).norm() / expected.norm()
    return float(difference) if bool(y.isfinite().all()) else float("nan")


def _bytes_off(call: Callable[[], Any], values: torch.Tensor, scale: torch.Tensor) -> float:
    """0 where a quantizer made these very tensors."""
    made, its_scale = call()[:2]
    same = torch.equal(made.view(torch.uint8), values.view(torch.uint8)) and torch.equal(its_scale, scale)
    return 0.0 if same else 1.0


def _codes_off(call: Quantizer, expected: torch.Tensor) -> float:
    values, scale = call()
    return float((values.double() * scale.double() - expected).norm() / expected.norm())


def _error(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> Callable[[], float]:
    return lambda: _off(call(), expected)
