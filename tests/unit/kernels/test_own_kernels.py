"""The kernels of `quant.kernels`, against NumPy, compressed-tensors and themselves with other rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import unpack_from_int32

from qarl.errors import UserError
from qarl.kernels.cpu.torch_linears import CpuW4A8Linear, DequantizedW4A16Linear
from qarl.kernels.registry import choose_linear_kernel, kernels_of
from qarl.quant import get_scheme, quantize
from qarl.schemes import scheme_names
from qarl.schemes.kernel_choice import KernelChoice

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(
    CpuW4A8Linear.unavailable(CPU, (64, 64)) is not None,
    reason="this CPU's int8 products are not exact",
)
SHAPES = [(96, 128, 32), (576, 192, 64), (33, 256, 128), (8, 64, 64)]


def weight_and_input(
    n: int, k: int, group: int, rows: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(n + k)
    weight = (torch.randn(n, k) * torch.randn(n, 1).exp() * 0.05).bfloat16()
    x = (torch.randn(rows, k) * torch.randn(rows, 1).exp()).bfloat16()
    x[rows // 2] = 0
    return dict(quantize(weight, get_scheme("w4a8", group)).tensors), x


def by_numpy(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> np.ndarray:
    """The module's arithmetic, one FP32 operation after another. Integers are summed in int64."""
    shape = torch.Size(tensors["weight_shape"].tolist())
    codes = unpack_from_int32(tensors["weight_packed"], 4, shape).numpy().astype(np.int64)
    scale, wide = tensors["weight_scale"].float().numpy(), x.float().numpy()
    amax = np.abs(wide).max(1, keepdims=True)
    token_scale = amax / np.float32(127)
    with np.errstate(divide="ignore"):
        reciprocal = np.minimum(np.float32(1) / token_scale, np.finfo(np.float32).max)
    values = np.clip(np.round(wide * reciprocal), -128, 127).astype(np.int64)
    group = codes.shape[1] // scale.shape[1]
    total = np.zeros((len(wide), len(codes)), np.float32)
    for i in range(scale.shape[1]):
        part = slice(i * group, (i + 1) * group)
        total = total + (values[:, part] @ codes[:, part].T).astype(np.float32) * scale[:, i]
    total = total * token_scale
    return total if bias is None else total + bias.float().numpy()


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_w4a8_has_the_bits_of_the_stated_arithmetic(n: int, k: int, group: int, bias: bool) -> None:
    tensors, x = weight_and_input(n, k, group, 70)
    added = torch.randn(n).bfloat16() if bias else None
    output = CpuW4A8Linear.linear(x, CpuW4A8Linear.prepare(tensors), added)
    assert torch.equal(output, torch.from_numpy(by_numpy(tensors, x, added)).bfloat16())


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_the_dequantized_weight_is_compressed_tensors(n: int, k: int, group: int) -> None:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensors, x = weight_and_input(n, k, group, 40)
    codes = unpack_from_int32(tensors["weight_packed"], 4, torch.Size((n, k)))
    expected = dequantize(codes, tensors["weight_scale"])
    prepared = DequantizedW4A16Linear.prepare(tensors)
    assert torch.equal(prepared.weight, expected) and prepared.weight.dtype == torch.bfloat16
    bias = torch.randn(n).bfloat16()
    assert torch.equal(
        DequantizedW4A16Linear.linear(x, prepared, bias), F.linear(x, expected, bias)
    )


ON_A_CPU = {("qarl", "w4a8"): "qarl_cpu_w4a8", ("dequantized", "w4a16"): "dequantized"}


@pytest.mark.parametrize(("kernels", "scheme"), [*itertools.product(KernelChoice, scheme_names())])
def test_every_table_has_a_kernel_or_a_reason(
    kernels: KernelChoice, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if kernels.by_engine:
        assert (scheme == "bf16") == (not kernels_of(kernels, get_scheme(scheme).operands))
        return
    if expected := ON_A_CPU.get((kernels, scheme)):
        if expected == "dequantized" or CpuW4A8Linear.unavailable(CPU, (64, 64)) is None:
            assert (
                choose_linear_kernel(get_scheme(scheme), CPU, (64, 64), kernels=kernels).kernel.name
                == expected
            )
        return
    words = (
        f"(?s)no kernel of quant.kernels={kernels} can multiply.*runs on (NVIDIA )?GPUs, not on cpu"
    )
    if not kernels_of(kernels, get_scheme(scheme).operands):
        words = f"no kernel of quant.kernels={kernels} multiplies"
    with pytest.raises(UserError, match=words):
        choose_linear_kernel(get_scheme(scheme), CPU, (64, 64), kernels=kernels)
