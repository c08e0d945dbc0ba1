"""Facts about the Triton kernels that only a device shows. Triton's interpreter can try those that need no graph."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from qarl.kernels import grouped
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.int4_planes import to_pairs
from qarl.schemes.kernel_choice import KernelChoice

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), *(["cpu"] if INTERPRETED else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def w4a16(
    n: int, k: int, rows: int, device: torch.device, group: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes, scales, activations)"""
    generator = torch.Generator().manual_seed(n + k)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(n, k // group, generator=generator) * 0.01 + 0.01).bfloat16()
    return (
        packed.to(device),
        scale.to(device),
        torch.randn(rows, k, generator=generator).bfloat16().to(device),
    )


def in_planes(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the forward reads of a weight in the wire format."""
    from qarl.kernels.triton.planes import to_planes

    return to_planes(packed), to_pairs(scale)


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def test_plane(device: torch.device) -> None:
    """The PTX that makes two weights of two codes (`w4a16.plane`): every code, times scales of every exponent that
    matters, bit for bit: the product with the identity is the weight itself."""
    from qarl.kernels.triton.w4a16 import PTX, w4a16_backward_input
    from qarl.kernels.triton.w4a16_forward import w4a16_linear

    n, k, group = 128, 256, 32
    generator = torch.Generator().manual_seed(0)
    packed = (
        torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).to(torch.int32).to(device)
    )
    exponents = torch.randint(-30, 4, (n, k // group), generator=generator)
    scale = (torch.rand(n, k // group, generator=generator) * 2.0**exponents).bfloat16().to(device)
    weight = dequantize_int4(packed, scale)
    assert torch.equal(
        w4a16_linear(torch.eye(k, device=device).bfloat16(), *in_planes(packed, scale)), weight.t()
    )
    assert torch.equal(
        w4a16_backward_input(torch.eye(n, device=device).bfloat16(), packed, scale), weight
    )
    print("PTX" if PTX else "Triton's own arithmetic")


def test_split_sums(device: torch.device) -> None:
    """The acquire and release counter of `tiles.py`: the same bits every time, and counters left at zero."""
    from qarl.kernels.triton import tiles
    from qarl.kernels.triton.tiles import choose, parts
    from qarl.kernels.triton.w4a16_forward import w4a16_linear

    n, k, rounds = (512, 16384, 300) if device.type == "cuda" else (128, 2048, 2)
    packed, scale, x = w4a16(n, k, 16, device)
    tile = choose("w4a16", device, 16)
    assert tile is not None
    assert parts(tile, -(-n // tile.BN), -(-k // tile.BK), device) > 1, (
        "this shape is not split: it tries nothing"
    )
    weight = in_planes(packed, scale)
    first = w4a16_linear(x, *weight)
    assert error(first, x.double() @ dequantize_int4(packed, scale).double().t()) <= 3e-3
    assert all(torch.equal(w4a16_linear(x, *weight), first) for _ in range(rounds))
    assert [int(counter.abs().sum()) for counter in tiles._COUNTERS.values()] == [0] * len(
        tiles._COUNTERS
    )


def test_tensor_maps(device: torch.device) -> None:
    """Products through the tensor memory accelerator, at sizes that no tile divides; int8 sums are exact."""
    from qarl.kernels.triton.scaled_mm import scaled_mm, takes_tma

    sizes = (
        ((1, 128, 256), (300, 496, 1040), (5000, 384, 512))
        if device.type == "cuda"
        else ((17, 48, 80),)
    )
    used = 0
    for m, n, k in sizes:
        generator = torch.Generator().manual_seed(m)
        x, w = (
            torch.randint(-127, 128, (r, k), generator=generator, dtype=torch.int8).to(device)
            for r in (m, n)
        )
        scale = torch.ones(m, 1, device=device), torch.full((n, 1), 2.0**-10, device=device)
        used += takes_tma(x, w)
        expected = ((x.double() @ w.double().t()) * 2.0**-10).bfloat16()
        assert torch.equal(scaled_mm(x, scale[0], w, scale[1]), expected), (m, n, k)
    print(f"{used} of {len(sizes)} products by tensor maps")


@pytest.mark.gpu
def test_bf16_operands_and_an_fp32_result() -> None:
    """`torch.mm(out_dtype=float32)`, as `qarl.kernels.log_probs` adds weight gradients, of a transposed slice."""
    from qarl.kernels.log_probs import _add_product

    generator = torch.Generator("cuda").manual_seed(0)
    grad = torch.randn(777, 40000, generator=generator, device="cuda").bfloat16()
    hidden = torch.randn(777, 512, generator=generator, device="cuda").bfloat16()
    total = torch.zeros(40000, 512, device="cuda")
    _add_product(total, grad, hidden)
    assert error(total[-128:], grad[:, -128:].double().t() @ hidden.double()) <= 1e-5


@pytest.mark.gpu
def test_graphs() -> None:
    """Capture and replay of the products: nothing in them may wait for the device or allocate outside of the pool."""
    from qarl.kernels.triton.linears import unavailable
    from qarl.kernels.triton.quantize import quantize_tokens
    from qarl.kernels.triton.scaled_mm import scaled_mm
    from qarl.kernels.triton.w4a16 import w4a16_backward_input
    from qarl.kernels.triton.w4a16_forward import w4a16_linear
    from qarl.schemes.base import FP8_FP8, INT4_BF16

    device = torch.device("cuda", 0)
    packed, scale, x = w4a16(512, 4096, 16, device)
    weight = in_planes(packed, scale)
    grad = torch.randn(16, 512, device=device).bfloat16()
    values = torch.randint(-127, 128, (512, 4096), dtype=torch.int8, device=device)
    channel = torch.ones(512, 1, device=device)
    stacked = {"weight_packed": packed.view(4, 128, -1), "weight_scale": scale.view(4, 128, -1)}
    ends = torch.tensor([3, 3, 9, 16], dtype=torch.int32, device=device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "w4a16": lambda: w4a16_linear(x, *weight),
        "w4a16 dX": lambda: w4a16_backward_input(grad, packed, scale),
        "w8a8": lambda: scaled_mm(*quantize_tokens(x, torch.int8), values, channel),
        "grouped": lambda: grouped.product(x, None, grouped.Stack(stacked, INT4_BF16), ends),
    }
    if unavailable(FP8_FP8, device) is None:
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
            assert torch.equal(made, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_own_kernels_of_few_and_many_rows(scheme: str) -> None:
    """`quant.kernels=qarl`: a row's bits depend neither on the other rows nor on the layer being fused."""
    from qarl.kernels.registry import own_kernel
    from qarl.quant import get_scheme, quantize

    device, n, k = torch.device("cuda", 0), 512, 4096
    kernel = own_kernel(KernelChoice.QARL, get_scheme(scheme).operands)
    assert kernel is not None
    if why_not := kernel.unavailable(device, (n, k)):
        pytest.skip(why_not)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = (torch.randn(3 * n, k, generator=generator, device=device) / 64).bfloat16()
    x = torch.randn(300, k, generator=generator, device=device).bfloat16()

    def product(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return kernel.linear(
            rows, kernel.prepare(quantize(of, get_scheme(scheme, 128)).tensors), None
        )

    whole = product(x, weight)
    for cut in ((1, 7, 64, 228), (292, 7, 1), (300,)):
        parts = torch.cat([product(rows, weight) for rows in x.split(cut)])
        assert torch.equal(parts, whole), cut
    assert torch.equal(product(x, weight[:n]), whole[:, :n])
