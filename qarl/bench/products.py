"""What `qarl bench kernels` times: competing implementations of one operation, and their correct results.

    linear          y = x W^T of a quantized linear, including the quantization of activations
    input_gradient  dX = dY W, from the low-bit weight
    quantize        master weight to the wire tensors, once per optimizer step

The baseline of products is `torch.nn.functional.linear` in BF16, that of quantizers eager PyTorch. A time is reported
only if the first and last rows of the result agree with float64, by relative error (root mean square). The tests check
everything else about a kernel's numbers.

Calls take turns, so that a change in the machine's speed affects all equally. On a GPU each call is timed by events of
its stream. Before each call, a write removes its operands from the L2 cache, because in a model's forward they would
not be there. On a CPU calls are timed by the clock, and the caches are as the other calls left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.bench.kernels import Arguments
from qarl.kernels.base import LinearKernel
from qarl.kernels.cuda.vllm_ops import VllmMarlinLinear
from qarl.kernels.reference import quantize_fp8, quantize_fp8_cuda, quantize_int8, quantize_int8_cuda
from qarl.kernels.registry import LINEAR_KERNELS
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.scheme import Scheme, get_scheme

FLUSH_BYTES, MOST_ROUNDS = 512 * 2**20, 1000
Quantizer = Callable[[], tuple[torch.Tensor, torch.Tensor]]
QUANTIZERS = {
    ("w8a8", False): quantize_int8,
    ("w8a8", True): quantize_int8_cuda,
    ("fp8", False): quantize_fp8,
    ("fp8", True): quantize_fp8_cuda,
}
"""(scheme, True for vLLM's arithmetic on CUDA, False for CPU) -> quantizer of activations. CUDA and CPU often give
different codes, because many BF16 activations lie exactly between two codes and are rounded differently."""
CHECKED_ROWS = 64
"""Number of rows that are compared at each end of a result."""
PRODUCT_ERROR, FP8_ERROR = 3e-3, 1e-2
"""Allowed relative error of a product. BF16 rounding alone causes 1.7e-3; FP8 tensor cores sum in less than 24 bits."""
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Competitor:
    """One implementation of an operation. `call` is timed. `error` returns the error of its result.

    `allowed`: the largest allowed error. `bytes_moved` and `flop`: the minimum for the operation, the same for every
    implementation."""

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

    def wrong(self) -> str | None:
        """Return why this call is not timed (error too large, or an exception), or None if it is."""
        try:
            error = self.error()
        except (RuntimeError, ValueError, TypeError) as raised:  # a kernel that does not compile or launch
            return f"{type(raised).__name__}: {raised}"
        return None if error <= self.allowed else f"its relative error is {error:.2e}; {self.allowed:.0e} is allowed"


def ends(rows: torch.Tensor) -> torch.Tensor:
    """Return the first and last `CHECKED_ROWS` rows."""
    return rows if len(rows) <= 2 * CHECKED_ROWS else torch.cat([rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]])


def error_of(call: Call, expected: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs `call` and returns the relative error of the first and last rows of its result.
    The error is NaN if any number in the result is not finite. `expected`: the correct first and last rows."""

    def error() -> float:
        y = call()
        return relative(ends(y), expected) if bool(y.isfinite().all()) else float("nan")

    return error


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def random_rows(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    """Return random BF16 [rows, cols]. The same shape always gives the same numbers."""
    generator = torch.Generator(like.device).manual_seed(rows * 31 + cols)
    return torch.randn(rows, cols, generator=generator, device=like.device).bfloat16()


class Group(NamedTuple):
    """Competitors for the same work, which `keys` describes."""

    keys: dict[str, Any]
    competitors: list[Competitor]

    @property
    def place(self) -> str:
        keys = self.keys
        rows = f" m={keys['m']}" if keys["m"] else ""
        return f"{keys['model']} {keys['layer']} {keys['n']}x{keys['k']} {keys['operation']}{rows}"


@dataclass(frozen=True)
class Times:
    """Seconds of one call, from a sample of `calls` calls."""

    median: float
    minimum: float
    maximum: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def measure(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float, rounds: int
) -> dict[str, Times]:
    """Return the times of every call after a warm-up. A round runs each call once.
    Rounds are repeated until `seconds` have passed, but at least `rounds` times."""
    for call in calls.values():
        for _ in range(2):
            call()
    one = _seconds_on_gpu if device.type == "cuda" else _seconds_on_cpu
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start, done = time.perf_counter(), 0
    while done < rounds or (time.perf_counter() - start < seconds and done < MOST_ROUNDS):
        for name, call in calls.items():
            taken[name].append(one(call))
        done += 1
    return {name: Times.of(values) for name, values in taken.items()}


def _seconds_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _seconds_on_gpu(call: Callable[[], object]) -> float:
    _flush_buffer().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure the machine's peak rates: bytes/s of a copy (reads plus writes), and FLOP/s of a large BF16 product."""
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = measure(calls, device, seconds=1.0 if on_gpu else 0.5, rounds=10)
    return {
        "copy_bytes_per_s": 2 * size / times["copy"].median,
        "bf16_flop_per_s": 2 * side**3 / times["product"].median,
    }


class Layer:
    """One BF16 weight [N, K], and its low-bit tensors by scheme.
    `failures`: tensors that could not be made, and why."""

    def __init__(self, weight: torch.Tensor, arguments: Arguments) -> None:
        self.weight, self.arguments = weight, arguments
        self.quantized: dict[str, QuantizedTensor] = {}
        self.failures: dict[str, str] = {}
        for name in arguments.scheme:
            scheme = get_scheme(name, arguments.group_size)
            if why_not := scheme.check_shape("the layer", *self.shape):
                self.failures[name] = why_not
            else:
                self.quantized[name] = quantize(weight, scheme)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def kernels(self, scheme: str) -> Iterator[type[LinearKernel]]:
        """Yield the registry's kernels that support this layer, except float64 references on GPUs, which are slow."""
        for kernel in LINEAR_KERNELS[scheme]:
            sizes = kernel.group_sizes
            fits = sizes is None or not get_scheme(scheme).group_size or self.arguments.group_size in sizes
            slow = kernel.name == "reference" and self.weight.is_cuda and scheme != "w4a16"  # float64 products
            if fits and not slow and self._serves(kernel, scheme):
                yield kernel

    def _serves(self, kernel: type[LinearKernel], scheme: str) -> bool:
        """Return whether to measure `kernel`. Marlin is measured even if vLLM prefers Machete."""
        why_not = kernel.unavailable(scheme, self.weight.device, self.shape)
        machete = kernel is VllmMarlinLinear and why_not == "here vLLM itself runs MacheteLinearKernel"
        return why_not is None or machete


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
            # vLLM's kernels use the Triton kernels' dX.
            if kernel.computes_input_gradient and not kernel.name.startswith("vllm"):
                call = partial(kernel.backward_input, grad, kernel.prepare(quantized.tensors))
                calls.append((scheme, kernel.name, call, dequantized, quantized.nbytes))
    return [
        Competitor(scheme, name, call, error_of(call, _product(ends(grad), by.t())), PRODUCT_ERROR,
                   activations + size, flop)
        for scheme, name, call, by, size in calls
    ]  # fmt: skip


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
            calls["triton"] = _triton(layer, scheme)
        for name, call in calls.items():
            found.append(Competitor(scheme, name, call, partial(_differ, call, expected), 0.0, moved))
    return found


def _wire(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) made by PyTorch."""
    tensors = quantize(weight, scheme).tensors
    return tensors["weight_packed" if "weight_packed" in tensors else "weight"], tensors["weight_scale"]


def _triton(layer: Layer, scheme: str) -> Any:
    from qarl.kernels.triton import quantize as kernels

    if scheme == "w4a16":
        return partial(kernels.quantize_int4, layer.weight, layer.arguments.group_size)
    dtype = torch.int8 if scheme == "w8a8" else torch.float8_e4m3fn
    return partial(kernels.quantize_rows, layer.weight, dtype)


def _differ(call: Callable[[], Any], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    codes, scale = call()[:2]
    same = torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    return 0.0 if same else 1.0


BUILDERS: dict[str, Callable[[Layer, int], list[Competitor]]] = {
    "linear": linear,
    "input_gradient": input_gradient,
    "quantize": quantize_weight,
}


def groups(arguments: Arguments, device: torch.device, not_measured: dict[str, str]) -> Iterator[Group]:
    """Yield the groups of dense weights. Write what could not be made, and why, to `not_measured`."""
    operations = [operation for operation in arguments.operation if operation in BUILDERS]
    for model, name, (n, k) in arguments.layers() if operations else ():
        layer = Layer((torch.randn(n, k, device=device) / k**0.5).bfloat16(), arguments)
        for operation in operations:
            for rows in (0,) if operation == "quantize" else arguments.m:
                keys = {"operation": operation, "model": model, "layer": name, "n": n, "k": k, "m": rows}
                yield Group(keys, BUILDERS[operation](layer, rows))
        not_measured |= {f"{model} {name} {n}x{k}: {key}": why for key, why in layer.failures.items()}
