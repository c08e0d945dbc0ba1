"""What nothing but a GPU can say about the kernels, one check and one line each; scripts/gpu_check.py runs them first.

Without a GPU those that Triton's interpreter can try are tried, the others say why not. A check returns what it found,
or raises; `NotHere` says why it could not be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NotHere(Exception):
    """Why a check cannot be made on this machine."""


def plane(device: torch.device) -> str:
    """The PTX that makes two weights of two codes (`_int4_tile.plane`): every code, times scales of every exponent that
    matters, against PyTorch's dequantization, bit for bit: the product with the identity is the weight itself."""
    from qarl.kernels.int4 import dequantize_int4
    from qarl.kernels.triton.w4a16 import PTX, w4a16_backward_input, w4a16_linear

    n, k, group = 128, 256, 32
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).to(torch.int32).to(device)
    exponents = torch.randint(-30, 4, (n, k // group), generator=generator)
    scale = (torch.rand(n, k // group, generator=generator) * 2.0**exponents).bfloat16().to(device)
    weight = dequantize_int4(packed, scale)
    _same(w4a16_linear(torch.eye(k, device=device).bfloat16(), packed, scale), weight.t(), "x W^T of x = 1")
    _same(w4a16_backward_input(torch.eye(n, device=device).bfloat16(), packed, scale), weight, "dY W of dY = 1")
    return "PTX, bit for bit" if PTX else "Triton's own arithmetic (no NVIDIA GPU), bit for bit"


def split_sums(device: torch.device) -> str:
    """The acquire and release counter of `_split.py`: the same bits every time, and counters left at zero."""
    from qarl.kernels.triton import _split
    from qarl.kernels.triton.tables import choose, parts
    from qarl.kernels.triton.w4a16 import w4a16_linear

    on_gpu = device.type == "cuda"
    n, k, rounds = (512, 16384, 300) if on_gpu else (128, 2048, 2)
    packed, scale, x = _w4a16(n, k, 16, device)
    tile = choose("w4a16", device, 16, n, k, 128)
    assert tile is not None
    count = parts(tile, -(-n // tile.BN), -(-k // tile.BK), device)
    if count < 2:
        raise AssertionError("this shape is not split: it tries nothing")
    first = w4a16_linear(x, packed, scale)
    _near(first, x.double() @ _dequantized(packed, scale).double().t(), "a split sum")
    for _ in range(rounds):
        _same(w4a16_linear(x, packed, scale), first, "a repeated split sum")
    left = [int(counter.abs().sum()) for counter in _split._COUNTERS.values()]
    if any(left):
        raise AssertionError(f"counters are left at {left}")
    return f"{count} parts, {rounds} times the same bits"


def tensor_maps(device: torch.device) -> str:
    """Products through the tensor memory accelerator, at sizes that no tile divides; int8 sums are exact."""
    from qarl.kernels.triton.scaled_mm import scaled_mm, takes_tma

    used = 0
    sizes = ((1, 128, 256), (300, 496, 1040), (5000, 384, 512)) if device.type == "cuda" else ((17, 48, 80),)
    for m, n, k in sizes:
        generator = torch.Generator().manual_seed(m)
        x, w = (torch.randint(-127, 128, (r, k), generator=generator, dtype=torch.int8).to(device) for r in (m, n))
        scale = torch.ones(m, 1, device=device), torch.full((n, 1), 2.0**-10, device=device)
        used += takes_tma(x, w)
        expected = ((x.double() @ w.double().t()) * 2.0**-10).bfloat16()
        _same(scaled_mm(x, scale[0], w, scale[1]), expected, f"int8 {[m, n, k]}")
    return f"{used} of {len(sizes)} products by tensor maps, exact"


def mm_out_dtype(device: torch.device) -> str:
    """BF16 operands, FP32 result: what `qarl.kernels.logprob` adds weight gradients with, from a transposed slice."""
    if device.type != "cuda":
        raise NotHere("PyTorch multiplies BF16 into FP32 on GPUs only")
    from qarl.kernels.logprob import _add_product

    generator = torch.Generator(device).manual_seed(0)
    grad = torch.randn(777, 40000, generator=generator, device=device).bfloat16()
    hidden = torch.randn(777, 512, generator=generator, device=device).bfloat16()
    total = torch.zeros(40000, 512, device=device)
    _add_product(total, grad, hidden)
    expected = grad[:, -128:].double().t() @ hidden.double()
    return f"relative RMS error {_near(total[-128:], expected, 'grad^T hidden', 1e-5):.1e}"


def graphs(device: torch.device) -> str:
    """Capture and replay of the products: nothing in them may wait for the device or allocate outside of the pool."""
    if device.type != "cuda":
        raise NotHere("there are no graphs without a GPU")
    from qarl.kernels.experts import grouped
    from qarl.kernels.triton.activations import quantize_tokens
    from qarl.kernels.triton.linears import unavailable
    from qarl.kernels.triton.scaled_mm import scaled_mm
    from qarl.kernels.triton.w4a16 import w4a16_backward_input, w4a16_linear

    packed, scale, x = _w4a16(512, 4096, 16, device)
    grad = torch.randn(16, 512, device=device).bfloat16()
    values = torch.randint(-127, 128, (512, 4096), dtype=torch.int8, device=device)
    channel = torch.ones(512, 1, device=device)
    stacked = {"weight_packed": packed.view(4, 128, -1), "weight_scale": scale.view(4, 128, -1)}
    ends = torch.tensor([3, 3, 9, 16], dtype=torch.int32, device=device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "w4a16": lambda: w4a16_linear(x, packed, scale),
        "w4a16 dX": lambda: w4a16_backward_input(grad, packed, scale),
        "w8a8": lambda: scaled_mm(*quantize_tokens(x, torch.int8), values, channel),
        "grouped": lambda: grouped.product(x, None, stacked, ends),
    }
    if unavailable("fp8", device) is None:
        codes = values.view(torch.float8_e4m3fn).float().nan_to_num().to(torch.float8_e4m3fn)
        calls["fp8"] = lambda: scaled_mm(*quantize_tokens(x, torch.float8_e4m3fn), codes, channel)
    for name, call in calls.items():
        expected = call().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        for _ in range(3):
            made.fill_(float("nan"))
            graph.replay()
            _same(made, expected, f"{name} replayed")
    return f"{', '.join(calls)}: replayed to the same bits"


def grouped_products(device: torch.device) -> str:
    """Experts without rows, one row, many: forward, input and weight gradient; no expert's zeros are left unwritten."""
    from qarl.kernels.experts import grouped
    from qarl.kernels.reference import grouped_linear

    n, k, counts = (256, 512, [0, 1, 0, 300, 40, 0, 7, 0]) if device.type == "cuda" else (32, 64, [0, 1, 0, 20])
    packed, scale, x = _w4a16(n * len(counts), k, sum(counts), device, group=32)
    tensors = {"weight_packed": packed.view(len(counts), n, -1), "weight_scale": scale.view(len(counts), n, -1)}
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    weight, grad = grouped.dequantized(tensors).double(), torch.randn(sum(counts), n, device=device).bfloat16()
    _near(grouped.product(x, None, tensors, ends), grouped_linear(x.double(), weight, ends), "y")
    _near(grouped.input_gradient(grad, tensors, ends), grouped_linear(grad.double(), weight.mT, ends), "dX")
    made = grouped.weight_gradient(grad, x, ends)
    rows = [slice(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]
    expected = torch.stack([grad[row].double().t() @ x[row].double() for row in rows])
    _near(made, expected, "dW")
    if made[[i for i, count in enumerate(counts) if not count]].any():
        raise AssertionError("the gradient of an expert without rows is not zero")
    return f"{len(counts)} experts with {counts} rows"


def vllm_linears(device: torch.device) -> str:
    """`vllm_cuda.py` on this vLLM: which of its kernels serve, and their numbers."""
    from qarl.bench.arguments import Arguments
    from qarl.bench.competitors import Layer, linear

    torch.manual_seed(0)
    weight = (torch.randn(2048, 1536, device=device) / 1536**0.5).bfloat16()
    layer = Layer(weight, Arguments(device=device.type, model=(), scheme=("w4a16", "w8a8", "fp8")), {})
    found = [competitor for competitor in linear(layer, 33) if competitor.kernel.startswith("vllm")]
    return _checked(found, "no linear kernel of vLLM serves here")


def vllm_experts(device: torch.device) -> str:
    """`vllm_experts.py` on this vLLM, forward, on experts of the sizes of Qwen3-30B-A3B."""
    from qarl.bench.arguments import Arguments
    from qarl.bench.grouped import ExpertLayer, experts
    from qarl.bench.shapes import Experts
    from qarl.kernels.experts.fused import EXPERTS_KERNELS
    from qarl.kernels.experts.grouped import ExpertsShape

    shape = Experts(experts=16, top_k=4, hidden=2048, intermediate=768)
    kernels = {kernel for kernels in EXPERTS_KERNELS.values() for kernel in kernels if kernel.name.startswith("vllm")}
    why = {kernel.name: kernel.unavailable("w8a8", device, ExpertsShape(*shape), None) for kernel in kernels}
    if device.type != "cuda" or "vllm is not installed" in why.values():
        raise NotHere("; ".join(sorted({str(reason) for reason in why.values()})))
    layer = ExpertLayer(shape, Arguments(device=device.type, model=(), scheme=("w4a16", "w8a8", "fp8")), device)
    found = [c for tokens in (1, 100) for c in experts(layer, "layer", tokens, "skewed") if c.kernel.startswith("vllm")]
    if layer.failures:
        raise AssertionError(str(layer.failures))
    return _checked(found, f"no expert kernel of vLLM serves here: {why}")


def _checked(found: list[Any], none: str) -> str:
    if not found:
        raise NotHere(none)
    errors = {competitor.name: (competitor.error(), competitor.allowed) for competitor in found}
    if wrong := {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}:
        raise AssertionError(f"off: {wrong}")
    return ", ".join(f"{name} {error:.1e}" for name, (error, _) in errors.items())


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "PTX of plane()": plane,
    "counter of _split.py": split_sums,
    "tensor maps (TMA)": tensor_maps,
    "torch.mm(out_dtype=float32)": mm_out_dtype,
    "grouped products": grouped_products,
    "CUDA graphs": graphs,
    "vllm_cuda.py": vllm_linears,
    "vllm_experts.py": vllm_experts,
}


def first(device: torch.device) -> tuple[list[dict[str, str]], bool]:
    """(name, verdict, what was found) of every check; whether none failed."""
    lines = []
    for name, check in CHECKS.items():
        try:
            verdict, found = "passed", check(device)
        except NotHere as reason:
            verdict, found = "left out", str(reason)
        except Exception as error:  # whatever a kernel raises on a device, the next check is made
            verdict, found = "failed", f"{type(error).__name__}: {error}"
        lines.append({"check": name, "verdict": verdict, "found": found})
        print(f"{verdict:9} {name:28} {found}", flush=True)
    return lines, all(line["verdict"] != "failed" for line in lines)


def _w4a16(
    n: int, k: int, rows: int, device: torch.device, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(n, k // group, generator=generator) * 0.01 + 0.01).bfloat16()
    return packed.to(device), scale.to(device), torch.randn(rows, k, generator=generator).bfloat16().to(device)


def _dequantized(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from qarl.kernels.int4 import dequantize_int4

    return dequantize_int4(packed, scale)


def _same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise AssertionError(f"{what}: {wrong} of {expected.numel()} numbers differ")


def _near(found: torch.Tensor, expected: torch.Tensor, what: str, allowed: float = 3e-3) -> float:
    error = float((found.double() - expected).norm() / expected.norm())
    if not error <= allowed:
        raise AssertionError(f"{what} is off by {error:.2e}, {allowed:.0e} is allowed")
    return error
