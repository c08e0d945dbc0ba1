"""Every low-bit kernel against float64 and against vLLM's own kernel classes, bit for bit; and the choice of one."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from kernels_by_scheme import LINEAR_KERNELS, linear_kernels
from torch import nn

from qarl.errors import UserError
from qarl.kernels.base import LinearKernel
from qarl.kernels.cpu import torch_linears as cpu
from qarl.kernels.cpu import vllm_linears
from qarl.kernels.reference import ReferenceW4A16Linear, quantize_fp8, quantize_int8
from qarl.kernels.registry import choose_linear_kernel
from qarl.process import configure_vllm_process
from qarl.quant import QuantizedTensor, get_scheme, quantize

CPU = torch.device("cpu")
KERNELS = [
    pytest.param(scheme, kernel, id=f"{scheme}-{kernel.name}") for scheme, kernel in LINEAR_KERNELS
]


def make_weight(
    scheme: str, shape: tuple[int, int], *, group_size: int = 32, seed: int = 0
) -> QuantizedTensor:
    torch.manual_seed(seed)
    return quantize(torch.randn(shape).bfloat16(), get_scheme(scheme, group_size))


def make_input(rows: int, features: int) -> torch.Tensor:
    """Rows of different sizes with outliers; the second is all zeros."""
    x = torch.randn(rows, features) * torch.randn(rows, 1).exp() * torch.randn(features).exp()
    x[1:2] = 0
    return x.bfloat16()


def available(kernel: type[LinearKernel], shape: tuple[int, int]) -> type[LinearKernel]:
    if reason := kernel.unavailable(CPU, shape):
        pytest.skip(f"{kernel.name}: {reason}")
    return kernel


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_a_row_depends_on_nothing_but_itself(scheme, kernel, uninitialized_memory_is_nan):
    """Not on how many rows there are, on their strides, or on what the memory held before."""
    kernel = available(kernel, (96, 384))
    prepared = kernel.prepare(make_weight(scheme, (96, 384)).tensors)
    x = make_input(600, 384)
    whole = kernel.linear(x, prepared, None)
    assert whole.isfinite().all() and not whole[1].any()
    if (scheme, kernel.name) == ("w4a16", "reference"):
        return  # plain BF16 products: a library's choice of kernel may depend on the number of rows
    for rows in (1, 2, 7, 16, 17, 64, 257, 513):
        assert torch.equal(kernel.linear(x[:rows], prepared, None), whole[:rows]), rows
    assert torch.equal(kernel.linear(x[::2], prepared, None), whole[::2])
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(kernel.linear(wide[:, :384], prepared, None), whole)
    columns = x.t().contiguous().t()  # neighbours of a row are 600 elements apart
    assert torch.equal(kernel.linear(columns, prepared, None), whole)
    assert torch.equal(kernel.dequantized_input(wide[:, :384]), kernel.dequantized_input(x))


def test_activation_quantization_equals_vllms():
    configure_vllm_process()
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    layer: Any = SimpleNamespace(
        static=False, is_group_quant=False, group_shape=GroupShape.PER_TOKEN, num_token_padding=None
    )
    for rows, features in ((513, 1001), (64, 4096), (7, 3), (1, 1)):
        x = make_input(rows, features)
        x[-1] *= 2.0**-100
        values, scale = quantize_fp8(x)
        theirs, their_scale = QuantFP8.forward_native(layer, x)
        assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8)) and torch.equal(
            scale, their_scale
        )
        if hasattr(torch.ops._C, "dynamic_scaled_int8_quant"):
            values, scale = quantize_int8(x)
            theirs, their_scale, _ = ops.onednn_scaled_int8_quant(x)
            assert torch.equal(values, theirs) and torch.equal(scale, their_scale)


def vllm_layer(q: QuantizedTensor) -> nn.Module:
    layer = nn.Module()
    for name in ("weight", "weight_scale"):
        layer.register_parameter(name, nn.Parameter(q.tensors[name].clone(), requires_grad=False))
    for name in ("input_scale", "input_zero_point", "azp_adj", "bias"):
        layer.register_parameter(name, None)
    layer.logical_widths = [q.shape[0]]
    return layer


def vllm_int8(q: QuantizedTensor) -> Callable[..., torch.Tensor]:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    kernel = init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="test"
    )
    assert type(kernel).__name__ == "CPUInt8ScaledMMLinearKernel"
    layer, dtype = vllm_layer(q), torch.get_default_dtype()
    torch.set_default_dtype(
        torch.bfloat16
    )  # vLLM's loader does: the kernel takes its output dtype from there
    try:
        kernel.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(dtype)

    def apply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        layer.bias_fp32 = (
            None if bias is None else bias.float()
        )  # made at load where the layer has a bias, for tiles
        return kernel.apply_weights(layer, x, bias)

    return apply


def vllm_fp8(q: QuantizedTensor) -> Callable[..., torch.Tensor]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CompilationMode
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8DynamicTokenSym,
        kFp8StaticChannelSym,
    )

    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.NONE  # as under enforce_eager
    with set_current_vllm_config(config):
        kernel = init_fp8_linear_kernel(
            kFp8DynamicTokenSym,
            kFp8StaticChannelSym,
            torch.bfloat16,
            torch.bfloat16,
            q.shape,
            module_name="test",
        )
    assert type(kernel).__name__ == "ChannelWiseTorchFP8ScaledMMLinearKernel"
    layer = vllm_layer(q)
    layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
    return lambda x, bias: kernel.apply_weights(layer, x, bias)


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.long
@needs_w4a16_cpu
@needs_vllm_cpu
@pytest.mark.parametrize("shape", [(33, 47), (1, 8), (128, 1001), (1536, 512)])
@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_kernels_have_the_bits_of_vllms_kernel_classes(scheme, shape, threads, monkeypatch):
    pytest.importorskip("vllm")
    configure_vllm_process()
    q = make_weight(scheme, shape)
    theirs = {"w8a8": vllm_int8, "fp8": vllm_fp8}[scheme](q)
    serving = [
        kernel for kernel in linear_kernels(scheme) if kernel.unavailable(CPU, shape) is None
    ]
    # On CPUs with AMX one kernel has vLLM's bits; elsewhere all that know them.
    tiles = [kernel for kernel in serving if kernel is vllm_linears.VllmCpuInt8TilesLinear]
    kernels = tiles or [kernel for kernel in serving if kernel.name != "reference"]
    prepared = [kernel.prepare(q.tensors) for kernel in kernels]
    monkeypatch.setattr(vllm_linears, "_ROWS_WORTH_PACKING", 500)  # packed before the last rows
    for rows in (1, 2, 7, 16, 17, 64, 513, 64, 1):
        x = make_input(rows, shape[1])
        for bias in (None, torch.randn(shape[0]).bfloat16()):
            expected = theirs(x, bias)
            for kernel, tensors in zip(kernels, prepared, strict=True):
                assert torch.equal(kernel.linear(x, tensors, bias), expected), (
                    kernel.name,
                    rows,
                    bias is None,
                )


def test_fp8_by_scaled_mm_has_the_same_bits(monkeypatch):
    """The kernel that serves if an FP32 matmul adds in another order."""
    assert cpu._fp32_matmul_equals_scaled_mm(320)
    tensors = make_weight("fp8", (96, 320)).tensors
    x, bias = make_input(40, 320), torch.randn(96).bfloat16()
    upcast = cpu.TorchFP8Linear.prepare(tensors)
    monkeypatch.setattr(cpu, "_fp32_matmul_equals_scaled_mm", lambda features: False)
    scaled = cpu.TorchFP8Linear.prepare(tensors)
    assert (upcast.weight.dtype, scaled.weight.dtype) == (torch.float32, torch.float8_e4m3fn)
    for rows in (1, 40):
        expected = cpu.TorchFP8Linear.linear(x[:rows], upcast, bias)
        assert torch.equal(cpu.TorchFP8Linear.linear(x[:rows], scaled, bias), expected)


@needs_w4a16_cpu
def test_an_int8_weight_is_packed_after_some_rows_and_keeps_its_bits(monkeypatch):
    """Its handler holds a bare pointer to the scales: freed memory would be multiplied by."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # tiles need no handler
    monkeypatch.setattr(vllm_linears, "_ROWS_WORTH_PACKING", 300)
    kernel = available(vllm_linears.VllmCpuInt8Linear, (256, 320))
    q = make_weight("w8a8", (256, 320))
    x = make_input(290, 320)
    bias = torch.randn(256).bfloat16()
    prepared = kernel.prepare(q.tensors)
    before = [kernel.linear(x[:rows], prepared, bias) for rows in (290, 5)]
    assert not prepared.packed
    after = kernel.linear(x, prepared, bias)
    assert prepared.packed
    assert torch.equal(before[0], after) and torch.equal(before[1], after[:5])
    for tensor in q.tensors.values():
        tensor.zero_()
    del q
    gc.collect()
    overwrite = [torch.full((256, 1), float("nan")) for _ in range(64)]
    assert torch.equal(kernel.linear(x, prepared, bias), after) and len(overwrite) == 64


@needs_w4a16_cpu
def test_the_int4_layout_equals_vllms_own_repacking():
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        pack_quantized_values_into_int32,
        unpack_quantized_values_into_int32,
    )
    from vllm.scalar_type import scalar_types

    q = make_weight("w4a16", (64, 96))
    values = unpack_quantized_values_into_int32(
        q.tensors["weight_packed"].t(), scalar_types.uint4b8, 0
    )
    packed = pack_quantized_values_into_int32(values, scalar_types.uint4b8, 1)
    expected = packed.view(96, -1, 2).permute(1, 0, 2).reshape(-1, 96 * 2)
    assert torch.equal(vllm_linears.VllmCpuWNA16Linear.prepare(q.tensors).weight, expected)


def test_kernel_choice_names_its_reason():
    choice = choose_linear_kernel(get_scheme("w4a16"), torch.device("meta"), (64, 64))
    assert choice.kernel is ReferenceW4A16Linear and "runs on cpu" in choice.reason
    choice = choose_linear_kernel(get_scheme("w4a16"), CPU, (48, 64))
    assert choice.kernel is ReferenceW4A16Linear and "multiples of 32" in choice.reason
    choice = choose_linear_kernel(get_scheme("w4a8"), torch.device("meta"), (64, 64))
    assert choice.reason == "reference; not qarl_cpu_w4a8: runs on cpu, not on meta"
    with pytest.raises(
        UserError, match=r"(?s)'vllm_cpu_wna16' cannot multiply by w4a16.*multiples of 32"
    ):
        choose_linear_kernel(get_scheme("w4a16"), CPU, (48, 64), force="vllm_cpu_wna16")


@needs_w4a16_cpu
@needs_vllm_cpu
@pytest.mark.parametrize("tiles", [True, False])
def test_int8_runs_the_operator_that_vllm_picks_for_this_cpu(monkeypatch, tiles):
    layers = pytest.importorskip("vllm.model_executor.layers.utils")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(
        torch.cpu, "_init_amx", lambda: tiles
    )  # on a CPU without tiles Linux says no
    expected = {True: "vllm_cpu_int8_tiles", False: "vllm_cpu_int8"}
    for shape in ((64, 64), (72, 64), (64, 48), (16, 32), (33, 47)):
        served = layers.check_cpu_sgl_kernel(*shape, torch.int8)
        assert vllm_linears._int8_tiles_serve(shape) == served, shape
        assert (
            choose_linear_kernel(get_scheme("w8a8"), CPU, shape).kernel.name == expected[served]
        ), shape


@pytest.mark.long
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")
def test_the_first_product_of_a_process_may_be_one_of_tiles():
    """Linux answers with an illegal instruction if nobody asked for the tiles before."""
    program = (
        "import torch; from qarl.kernels.cpu.vllm_linears import VllmCpuWNA16Linear as kernel; "
        "kernel.unavailable(torch.device('cpu'), (32, 32)); "
        "packed, scale = torch.ones(32, 4, dtype=torch.int32), torch.ones(32, 1).bfloat16(); "
        "tensors = {'weight_packed': packed, 'weight_scale': scale}; "
        "print(kernel.linear(torch.ones(1, 32).bfloat16(), kernel.prepare(tensors), None).shape)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0 and "[1, 32]" in run.stdout, run.stderr[-2000:]


def test_an_int8_layer_with_a_bias_rounds_once():
    """oneDNN multiplies by the row's scale and adds the bias in one operation; two round otherwise in the last bit."""
    torch.manual_seed(0)
    sums, scale = torch.randn(64, 3000) * 1000, torch.rand(64, 1) * 0.01 + 1e-4
    bias = (
        torch.randn(3000) * 1e-3 - sums[0] * scale[0]
    ).bfloat16()  # near the negative of the first row
    rows = torch.arange(64, dtype=torch.int8)[:, None]

    def multiply(values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(sums[values[:, 0].long()])

    output = cpu.int8_linear(multiply, (rows, scale), 3000, bias)
    once = (sums.double() * scale.double() + bias.double()).float()
    twice = (sums * scale).add(bias.float())
    assert torch.equal(output, once.bfloat16()) and not torch.equal(output, twice.bfloat16())
