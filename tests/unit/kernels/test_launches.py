"""Which kernels a product launches on a Hopper GPU, counted without one (`qarl.kernels.base.assume`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qarl.kernels.base import AssumedGPU, LinearKernel, PreparedWeight, assume
from qarl.kernels.registry import kernels_of
from qarl.schemes.base import INT4_BF16, INT8_INT8
from qarl.schemes.kernel_choice import KernelChoice

pytest.importorskip("triton")
N, K = 512, 256
INT4 = {
    "weight_packed": torch.empty(N, K // 8, dtype=torch.int32, device="meta"),
    "weight_scale": torch.empty(N, K // 128, dtype=torch.bfloat16, device="meta"),
}
INT8 = {
    "weight": torch.empty(N, K, dtype=torch.int8, device="meta"),
    "weight_scale": torch.empty(N, 1, device="meta"),
}


def launches(call: Callable[[], object]) -> list[str]:
    names: list[str] = []
    with assume(AssumedGPU((9, 0), 132, lambda name, _: names.append(name))):
        call()
    return names


def first(kernels: KernelChoice, operands: tuple[str, str]) -> type[LinearKernel]:
    return next(
        kernel for kernel in kernels_of(kernels, operands) if kernel.name.startswith("triton")
    )


@pytest.mark.parametrize("kernels", [KernelChoice.ENGINE, KernelChoice.QARL], ids=str)
@pytest.mark.parametrize(
    ("rows", "expected"), [(16, "w4a16_backward_kernel"), (4096, "dequantize_int4_kernel")]
)
def test_the_input_gradient_takes_the_fast_path_whoever_multiplies(
    kernels: KernelChoice, rows: int, expected: str
) -> None:
    """With many rows the weight is dequantized for cuBLAS. The engine computes no dX, so no order must be kept."""
    grad = torch.empty(rows, N, dtype=torch.bfloat16, device="meta")
    kernel = first(kernels, INT4_BF16)
    assert launches(lambda: kernel.backward_input(grad, INT4)) == [expected]


def test_int8_products_have_one_kernel_for_engine_and_own() -> None:
    """Integer sums are exact, so no rules are needed that make rows independent of each other."""
    assert first(KernelChoice.QARL, INT8_INT8) is first(KernelChoice.ENGINE, INT8_INT8)
    x = torch.empty(1, K, dtype=torch.bfloat16, device="meta")
    weight = PreparedWeight(**dict(zip(PreparedWeight._fields, INT8.values(), strict=True)))
    kernel = first(KernelChoice.QARL, INT8_INT8)
    expected = ["quantize_tokens_kernel", "scaled_mm_kernel"]
    assert launches(lambda: kernel.linear(x, weight, None)) == expected
