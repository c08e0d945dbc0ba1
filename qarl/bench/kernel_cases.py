"""What `qarl bench kernels` times: competing implementations of one operation, and their correct results.

    linear          y = x W^T of a quantized linear, including the quantization of activations
    input_gradient  dX = dY W, from the low-bit weight
    quantize        master weight to the wire tensors, once per optimizer step
    experts         a layer of experts, as in vLLM's fused kernels: routing, both products, SiLU, the sum

The baseline of products is `torch.nn.functional.linear` in BF16, that of quantizers eager PyTorch. That of
experts is `torch.nn.functional.grouped_mm` on GPUs, and on CPUs one product per expert. A time is reported
only if the first and last rows of the result agree with float64, by relative error (root mean square). The tests check
everything else about a kernel's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.bench.kernel_arguments import Arguments
from qarl.kernels import experts as grouped
from qarl.kernels.base import ExpertsKernel, ExpertsShape, LinearKernel, Tensors
from qarl.kernels.cuda.vllm_linears import VllmMarlinLinear
from qarl.kernels.experts import ReferenceExperts, operands_of, route
from qarl.kernels.reference import (
    quantize_fp8,
    quantize_fp8_cuda,
    quantize_int8,
    quantize_int8_cuda,
    silu_mul,
)
from qarl.kernels.registry import ENGINE, experts_kernels_of, kernels_of
from qarl.kernels.triton.linears import unavailable as triton_unavailable
from qarl.quant.experts import quantize_stack
from qarl.quant.quantize import QuantizedTensor, codes_dtype, quantize
from qarl.schemes import Scheme, get_scheme
from qarl.schemes.base import INT8_INT8, Operands

QUANTIZERS = {
    ("int8", False): quantize_int8,
    ("int8", True): quantize_int8_cuda,
    ("float8", False): quantize_fp8,
    ("float8", True): quantize_fp8_cuda,
}
"""(format of activations, True for vLLM's arithmetic on CUDA, False for CPU) -> quantizer of activations. CUDA and CPU
often give different codes, because many BF16 activations lie exactly between two codes and are rounded differently."""
CHECKED_ROWS = 64
"""Number of rows that are compared at each end of a result."""
BF16_PRODUCT_ERROR = 3e-3
PRODUCT_ERROR = {"bf16": BF16_PRODUCT_ERROR, "int8": 3e-3, "float8": 1e-2}
"""Format of activations -> allowed relative error of a product. BF16 rounding alone causes 1.7e-3; FP8 tensor cores sum
in less than 24 bits."""
ROUTINGS = ("balanced", "skewed")
LAYER_ERROR = {"bf16": 5e-3, "int8": 1e-2, "float8": 3e-2}
"""Format of activations -> allowed relative error of a whole layer: it has three to five BF16 roundings, and 8-bit
codes may differ by one. In FP8 that is up to an eighth of a value. On an H200, vLLM's CUTLASS kernel and ours both have
up to 2.3e-2 for one to four tokens, and 1.4e-2 for 200."""
Call = Callable[[], torch.Tensor]
Rounded = Callable[[torch.Tensor], torch.Tensor]
"""A function that converts rows to the float64 values that a product multiplies."""


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
        except (
            Exception
        ) as raised:  # a kernel that does not compile or launch; the others must still be measured
            return f"{type(raised).__name__}: {raised}"
        return (
            None
            if error <= self.allowed
            else f"its relative error is {error:.2e}; {self.allowed:.0e} is allowed"
        )


def ends(rows: torch.Tensor) -> torch.Tensor:
    """Return the first and last `CHECKED_ROWS` rows."""
    return (
        rows
        if len(rows) <= 2 * CHECKED_ROWS
        else torch.cat([rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]])
    )


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


class Layer:
    """One BF16 weight [N, K], and its low-bit tensors by scheme."""

    def __init__(self, weight: torch.Tensor, arguments: Arguments) -> None:
        self.weight = weight
        self.arguments = arguments
        self.shape = (weight.shape[0], weight.shape[1])
        self.quantized = {
            name: quantize(weight, get_scheme(name, arguments.group_size))
            for name in arguments.scheme
        }

    def kernels(self, scheme: str) -> Iterator[type[LinearKernel]]:
        """Yield the registry's kernels that support this layer, except float64 references on GPUs, which are slow."""
        operands = get_scheme(scheme).operands
        on_gpu = self.weight.is_cuda
        for kernel in kernels_of(ENGINE, operands):
            sizes = kernel.group_sizes
            fits = (
                sizes is None
                or not get_scheme(scheme).group_size
                or self.arguments.group_size in sizes
            )
            float64 = kernel.name == "reference" and operands.rounds_activations
            slow = float64 and on_gpu
            why_not = kernel.unavailable(self.weight.device, self.shape)
            # Marlin is measured even if vLLM prefers Machete.
            machete = (
                kernel is VllmMarlinLinear
                and why_not == "here vLLM itself runs MacheteLinearKernel"
            )
            if fits and not slow and (why_not is None or machete):
                yield kernel


def linear(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for y = x W^T."""
    weight = layer.weight
    x = random_rows(rows, layer.shape[1], layer.weight)
    flop = 2 * rows * weight.numel()
    activations = x.nbytes + 2 * rows * layer.shape[0]
    plain = partial(F.linear, x, weight)
    right = _product(ends(x), weight)
    competitors = [
        Competitor(
            "bf16",
            "bf16",
            plain,
            error_of(plain, right),
            BF16_PRODUCT_ERROR,
            activations + weight.nbytes,
            flop,
        )
    ]
    for scheme, quantized in layer.quantized.items():
        moved = activations + quantized.nbytes
        operands = quantized.scheme.operands
        exact_weight = _exact_weight(quantized)
        expected = {
            on_cuda: _product(_seen(operands, ends(x), on_cuda), exact_weight)
            for on_cuda in (False, True)
        }
        allowed = PRODUCT_ERROR[operands.activations]
        for kernel in layer.kernels(scheme):
            call = partial(kernel.linear, x, kernel.prepare(quantized.tensors), None)
            target = expected[kernel.name.startswith(("triton", "vllm_cutlass"))]
            competitors.append(
                Competitor(scheme, kernel.name, call, error_of(call, target), allowed, moved, flop)
            )
    return competitors


def input_gradient(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors for dX = dY W."""
    weight = layer.weight
    grad = random_rows(rows, layer.shape[0], layer.weight)
    flop = 2 * rows * weight.numel()
    activations = grad.nbytes + 2 * rows * layer.shape[1]
    calls: list[tuple[str, str, Call, torch.Tensor, int]]
    calls = [("bf16", "bf16", partial(torch.mm, grad, weight), weight, weight.nbytes)]
    for scheme, quantized in layer.quantized.items():
        dequantized = quantized.dequantize(torch.bfloat16)
        for kernel in layer.kernels(scheme):
            # vLLM's kernels use the Triton kernels' dX.
            if kernel.computes_input_gradient and not kernel.name.startswith("vllm"):
                call = partial(kernel.backward_input, grad, quantized.tensors)
                calls.append((scheme, kernel.name, call, dequantized, quantized.nbytes))
    return [
        Competitor(scheme, name, call, error_of(call, _product(ends(grad), by.t())), BF16_PRODUCT_ERROR,
                   activations + size, flop)
        for scheme, name, call, by, size in calls
    ]  # fmt: skip


def _seen(operands: Operands, x: torch.Tensor, on_cuda: bool) -> torch.Tensor:
    """Return the activations that a product of `operands` multiplies: x itself, or the quantized x in float64."""
    if not operands.rounds_activations:
        return x
    return exact(*QUANTIZERS[operands.activations, on_cuda](x))


def _exact_weight(quantized: QuantizedTensor) -> torch.Tensor:
    """Return the dequantized weight: BF16 if activations are, float64 for 8 bits.
    8-bit kernels do not round the weight to BF16, because they scale the sums."""
    if not quantized.scheme.rounds_activations:
        return quantized.dequantize(torch.bfloat16)
    return exact(quantized.tensors["weight"], quantized.tensors["weight_scale"])


def exact(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.double() * scale.double()


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def quantize_weight(layer: Layer, rows: int) -> list[Competitor]:
    """Return the competitors that quantize the master. The error is 0 if all bytes equal a reference, else 1.
    The reference is made on the CPU, because PyTorch on CUDA multiplies by the reciprocal of a Python divisor."""
    competitors = []
    weight = layer.weight
    for scheme, quantized in layer.quantized.items():
        grid = quantized.scheme
        moved = weight.nbytes + quantized.nbytes
        codes, scale = _wire(weight.cpu(), grid)
        expected = codes.to(weight.device), scale.to(weight.device)
        calls: dict[str, Callable[[], Any]] = {"pytorch": partial(_wire, weight, grid)}
        if triton_unavailable(INT8_INT8, weight.device) is None:
            calls["triton"] = _triton(layer, grid)
        for name, call in calls.items():
            competitors.append(
                Competitor(scheme, name, call, partial(_differ, call, expected), 0.0, moved)
            )
    return competitors


def _wire(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) made by PyTorch."""
    tensors = quantize(weight, scheme).tensors
    return tensors["weight_packed" if "weight_packed" in tensors else "weight"], tensors[
        "weight_scale"
    ]


def _triton(layer: Layer, scheme: Scheme) -> Any:
    from qarl.kernels.triton import quantize as kernels

    if scheme.packs_codes:
        return partial(kernels.quantize_int4, layer.weight, layer.arguments.group_size)
    return partial(kernels.quantize_rows, layer.weight, codes_dtype(scheme))


def _differ(call: Callable[[], Any], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    codes, scale = call()[:2]
    same = torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(
        scale, expected[1]
    )
    return 0.0 if same else 1.0


BUILDERS: dict[str, Callable[[Layer, int], list[Competitor]]] = {
    "linear": linear,
    "input_gradient": input_gradient,
    "quantize": quantize_weight,
}


class ExpertLayer:
    """Random BF16 experts, and their low-bit tensors by scheme."""

    def __init__(self, shape: ExpertsShape, arguments: Arguments, device: torch.device) -> None:
        self.shape = shape
        self.group_size = arguments.group_size
        e, _, hidden, intermediate = shape
        sizes = {"gate_up": (e, 2 * intermediate, hidden), "down": (e, hidden, intermediate)}
        self.weights = {
            name: (torch.randn(size, device=device) / size[2] ** 0.5).bfloat16()
            for name, size in sizes.items()
        }
        self.quantized: dict[str, dict[str, Tensors]] = {}
        for name in arguments.scheme:
            scheme = get_scheme(name, self.group_size)
            if not experts_kernels_of(scheme.operands):
                continue
            stacks = {
                part: quantize_stack(weight, scheme, name=part)
                for part, weight in self.weights.items()
            }
            self.quantized[name] = {part: stack.tensors for part, stack in stacks.items()}

    def kernels(self, scheme: str, device: torch.device) -> list[type[ExpertsKernel]]:
        """Return the kernels for the whole layer. The PyTorch reference is left out if there is a faster one."""
        multiplied = get_scheme(scheme, self.group_size)
        able = [
            kernel
            for kernel in experts_kernels_of(multiplied.operands)
            if kernel.unavailable(multiplied, device, self.shape) is None
        ]
        fast = [kernel for kernel in able if kernel is not ReferenceExperts]
        return fast if fast or not multiplied.quantized else able

    def topk(self, tokens: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights, ids) [T, k].

        Balanced routing gives every expert the same number of rows. Skewed routing draws a token's experts without
        replacement, with probabilities proportional to 1, 1/2, 1/3, ..."""
        e = self.shape.experts
        k = self.shape.top_k
        device = self.weights["down"].device
        generator = torch.Generator(device).manual_seed(tokens)
        if routing == "balanced":
            ids = (torch.arange(tokens * k, device=device) % e).view(tokens, k)
        else:
            wanted = -torch.arange(1, e + 1, device=device).float().log()
            noise = torch.empty(tokens, e, device=device).exponential_(generator=generator).log()
            ids = (wanted - noise).topk(k).indices
        weights = torch.rand(tokens, k, generator=generator, device=device)
        return weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def experts(layer: ExpertLayer, tokens: int, routing: str) -> list[Competitor]:
    """Return the competitors for the whole layer."""
    weights, ids = layer.topk(tokens, routing)
    gate_up = layer.weights["gate_up"]
    down = layer.weights["down"]
    x = random_rows(tokens, layer.shape.hidden, down)
    way = route(ids, layer.shape.experts)
    flop = 2 * tokens * layer.shape.top_k * (gate_up[0].numel() + down[0].numel())
    rows = 2 * x.nbytes
    plain = partial(
        ReferenceExperts.forward, x, weights, ids, ({"weight": gate_up}, {"weight": down})
    )
    some = ends(x), ends(weights).double(), ends(ids)
    bf16: dict[str, Tensors] = {name: {"weight": weight} for name, weight in layer.weights.items()}
    plain_exact = _exact_layer(*some, bf16, torch.Tensor.double)
    share = float(
        (way.ends.diff(prepend=way.ends.new_zeros(1)) > 0).float().mean()
    )  # of experts that have rows
    moved = rows + int(share * (gate_up.nbytes + down.nbytes))
    competitors = [
        Competitor(
            "bf16", "bf16", plain, error_of(plain, plain_exact), LAYER_ERROR["bf16"], moved, flop
        )
    ]
    for scheme, parts in [("bf16", bf16), *layer.quantized.items()]:
        moved = rows + int(
            share * sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
        )
        for kernel in layer.kernels(scheme, x.device):
            prepare = cache(partial(kernel.prepare, parts["gate_up"], parts["down"]))

            def call(kernel: Any = kernel, prepare: Any = prepare) -> Any:
                # Prepared in the first call, so that a kernel that cannot is only this competitor's failure.
                return kernel.forward(x, weights, ids, prepare())

            error = error_of(call, _exact_layer(*some, parts, _as_read(kernel, scheme)))
            allowed = LAYER_ERROR[get_scheme(scheme).operands.activations]
            competitors.append(Competitor(scheme, kernel.name, call, error, allowed, moved, flop))
    return competitors


def _as_read(kernel: type[ExpertsKernel], scheme: str) -> Rounded:
    """Return the function that converts rows to the float64 values that a product of `kernel` multiplies."""
    operands = get_scheme(scheme).operands
    if not operands.rounds_activations:
        return torch.Tensor.double
    return lambda x: exact(*kernel.quantize(operands, x.to(torch.bfloat16).contiguous()))


def _exact_stack(tensors: Tensors) -> torch.Tensor:
    """Return the dequantized weights [E, N, K]: rounded to BF16 if the kernel multiplies BF16 weights, else exact."""
    if not operands_of(tensors).rounds_activations:
        return grouped.dequantized(tensors)
    return exact(tensors["weight"], tensors["weight_scale"])


def _exact_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    parts: Mapping[str, Tensors],
    rounded: Rounded,
) -> torch.Tensor:
    """Compute the layer in float64 for a few tokens, rounding to BF16 between the two products."""
    inputs = rounded(x)
    out = torch.zeros_like(inputs)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        # One expert at a time, because all experts of a large layer would take gigabytes in float64.
        gate_up, down = (
            {n: t[expert : expert + 1] for n, t in parts[part].items()}
            for part in ("gate_up", "down")
        )
        gate, up = (inputs[token] @ _exact_stack(gate_up)[0].double().t()).bfloat16().chunk(2, 1)
        y = rounded(silu_mul(gate, up)) @ _exact_stack(down)[0].double().t()
        out.index_add_(0, token, y * weights[token, place, None])
    return out


def groups(arguments: Arguments, device: torch.device) -> Iterator[Group]:
    """Yield the groups of dense weights and of layers of experts, whose `n` and `k` are the hidden size."""
    operations = [operation for operation in arguments.operation if operation in BUILDERS]
    for model, name, (n, k) in arguments.layers() if operations else ():
        layer = Layer((torch.randn(n, k, device=device) / k**0.5).bfloat16(), arguments)
        for operation in operations:
            for rows in (0,) if operation == "quantize" else arguments.m:
                keys = {
                    "operation": operation,
                    "model": model,
                    "layer": name,
                    "n": n,
                    "k": k,
                    "m": rows,
                }
                yield Group(keys, BUILDERS[operation](layer, rows))
    for model, numbers in arguments.expert_layers():
        of_experts = ExpertLayer(ExpertsShape(*numbers), arguments, device)
        hidden = of_experts.shape.hidden
        for tokens, routing in product(arguments.m, ROUTINGS):
            keys = {"operation": "experts", "model": model, "layer": f"experts_layer, {routing}"}
            yield Group(
                keys | {"n": hidden, "k": hidden, "m": tokens}, experts(of_experts, tokens, routing)
            )
