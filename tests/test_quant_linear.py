"""QuantLinear against autograd on the dequantized weight, and model conversion on three model families."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import unpack_from_int32
from conftest import needs_w4a16_cpu, save_random_model
from torch import nn

from qarl.errors import UserError
from qarl.kernels.reference import ReferenceLinear
from qarl.kernels.registry import choose_linear_kernel
from qarl.kernels.vllm_ops import VllmCpuWNA16Linear
from qarl.quant import (
    QuantLinear,
    get_scheme,
    invalidate_quantized,
    packed_state_dict,
    quantize,
    quantize_model,
)


def make_layer(out_features=96, in_features=64, *, bias=True, group_size=32, seed=0) -> QuantLinear:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)
    return QuantLinear(linear, get_scheme("w4a16", group_size=group_size), qualified_name="layer")


def dequantized_by_compressed_tensors(layer: QuantLinear) -> torch.Tensor:
    """float64 [N, K] from the wire tensors, unpacked by compressed-tensors' own function."""
    tensors = layer.quantized().tensors
    q = unpack_from_int32(tensors["weight_packed"], 4, torch.Size(tensors["weight_shape"].tolist()))
    scale = tensors["weight_scale"].repeat_interleave(layer.scheme.group_size, dim=1)
    return (q.to(torch.float32) * scale.float()).bfloat16().double()


@pytest.mark.parametrize(("rows", "bias"), [(1, True), (7, False), (63, True), (300, True)])
def test_forward_and_gradients_match_float64_on_the_dequantized_weight(rows, bias):
    layer = make_layer(bias=bias)
    weight = dequantized_by_compressed_tensors(layer)
    x = torch.randn(rows, 64).bfloat16().requires_grad_()
    grad = torch.randn(rows, 96).bfloat16()
    y = layer(x)
    y.backward(grad)
    expected = x.detach().double() @ weight.t() + (layer.bias.double() if bias else 0)
    # One BF16 rounding of an FP32 sum: 2^-8 relative, plus the sum's own error near zero.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight, rtol=2**-7, atol=1e-4)
    expected = grad.double().t() @ x.detach().double()
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=2**-7, atol=1e-3)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), grad.double().sum(0), rtol=2**-7, atol=1e-2)


def test_three_dimensional_and_empty_inputs_keep_their_shape():
    layer = make_layer()
    x = torch.randn(2, 5, 64).bfloat16()
    assert torch.equal(layer(x), layer(x.view(10, 64)).view(2, 5, 96))
    assert layer(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 96)


@needs_w4a16_cpu
@pytest.mark.parametrize("shape", [(32, 32, 32), (96, 64, 32), (256, 384, 128), (3072, 1024, 128)])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_engine_kernel_agrees_with_the_reference(shape, rows):
    out_features, in_features, group_size = shape
    torch.manual_seed(1)
    q = quantize(torch.randn(out_features, in_features).bfloat16(), get_scheme("w4a16", group_size=group_size))
    x, bias = torch.randn(rows, in_features).bfloat16(), torch.randn(out_features).bfloat16()
    ours = VllmCpuWNA16Linear.linear(x, VllmCpuWNA16Linear.prepare(q.tensors), bias)
    reference = ReferenceLinear.linear(x, ReferenceLinear.prepare(q.tensors), bias)
    exact = x.double() @ ReferenceLinear.prepare(q.tensors).double().t() + bias.double()
    # Both round one FP32 sum to BF16 (2^-9 relative); the sums differ in order, which atol covers near zero.
    for y in (ours, reference):
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-4 * in_features**0.5)


@needs_w4a16_cpu
def test_kernel_layout_equals_vllms_own_repacking():
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        pack_quantized_values_into_int32,
        unpack_quantized_values_into_int32,
    )
    from vllm.scalar_type import scalar_types

    q = quantize(torch.randn(64, 96).bfloat16(), get_scheme("w4a16", group_size=32))
    values = unpack_quantized_values_into_int32(q.tensors["weight_packed"].t(), scalar_types.uint4b8, 0)
    packed = pack_quantized_values_into_int32(values, scalar_types.uint4b8, 1)
    expected = packed.view(96, -1, 2).permute(1, 0, 2).reshape(-1, 96 * 2)
    assert torch.equal(VllmCpuWNA16Linear.prepare(q.tensors).weight, expected)


@needs_w4a16_cpu
def test_a_row_does_not_depend_on_the_rows_beside_it():
    layer = make_layer(256, 384)
    x = torch.randn(200, 384).bfloat16()
    whole = layer(x)
    for rows in (1, 2, 17, 64):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_quantized_once_per_update_and_again_after_it():
    layer = make_layer()
    x = torch.randn(4, 64).bfloat16()
    layer(x)
    before = layer.quantized()
    layer(x)
    assert layer.quantized() is before
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not layer.quantized().equals(before)
    after = layer.quantized()
    layer.weight.data.mul_(2)
    invalidate_quantized(layer)
    assert not layer.quantized().equals(after)


def test_a_replaced_parameter_is_noticed():
    layer = make_layer()
    for _ in range(20):
        new = torch.randn(96, 64).bfloat16()
        del layer.weight
        layer.weight = nn.Parameter(new)
        assert layer.quantized().equals(quantize(new, layer.scheme))


def test_strided_activations_give_the_same_result_as_contiguous_ones():
    layer = make_layer()
    wide, tall = torch.randn(5, 128).bfloat16(), torch.randn(64, 5).bfloat16()
    for x in (tall.t(), wide[:, ::2], wide[::2, :64]):
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_other_activation_dtypes_are_refused():
    with pytest.raises(UserError, match=r"layer got torch\.float32"):
        make_layer()(torch.randn(2, 64))


def test_an_update_between_forward_and_backward_is_refused():
    layer = make_layer()
    y = layer(torch.randn(4, 64).bfloat16().requires_grad_())
    with torch.no_grad():
        layer.weight.add_(1)
    layer.quantized()
    with pytest.raises(RuntimeError, match=r"layer\.weight was requantized"):
        y.sum().backward()


@pytest.mark.parametrize(("family", "tie"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_quantize_model_covers_the_family_and_keeps_state_dict_keys(tmp_path, family, tie):
    from transformers import AutoModelForCausalLM

    folder = save_random_model(tmp_path / family, family, tie=tie)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    keys = list(model.state_dict())
    report = quantize_model(model, scheme="w4a16", group_size=32)
    assert list(model.state_dict()) == keys
    assert len(report.quantized) == 2 * 7 and list(report.skipped) == ["lm_head"]
    names = [name for name, _ in packed_state_dict(model)]
    assert len(names) == len(set(names)) == len(keys) - tie + 2 * 14
    assert ("lm_head.weight" in names) == (not tie)
    # The published tensors are the same whether the trainer's linears are aligned or not: one quantizer.
    unaligned = dict(packed_state_dict(plain, scheme=get_scheme("w4a16", group_size=32)))
    assert all(torch.equal(tensor, unaligned[name]) for name, tensor in packed_state_dict(model))
    # The forward equals the model whose weights were replaced by the dequantized ones, up to kernel rounding.
    for name, module in plain.named_modules():
        if name in report.quantized:
            layer = model.get_submodule(name)
            module.weight.data = layer.quantized().dequantize(torch.bfloat16)
    tokens = torch.randint(0, 64, (2, 9))
    ours, theirs = model(input_ids=tokens).logits, plain(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
    assert F.cosine_similarity(ours.double().flatten(), theirs.double().flatten(), dim=0) > 0.9999


def test_shapes_that_do_not_divide_name_every_layer():
    model = nn.Sequential(nn.Linear(48, 64, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"(?s)1 linears cannot.*0 has shape \[64, 48\].*group_size"):
        quantize_model(model, group_size=32)


def test_fp32_models_and_second_conversions_are_refused():
    with pytest.raises(UserError, match="not bfloat16"):
        quantize_model(nn.Sequential(nn.Linear(32, 32)), group_size=32)
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    quantize_model(model, group_size=32)
    with pytest.raises(UserError, match="quantized already"):
        quantize_model(model, group_size=32)


def test_ignored_names_and_unmatched_entries_are_reported():
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32, dtype=torch.bfloat16))
    report = quantize_model(model, group_size=32, ignore=["re:^1$", "gate"])
    assert list(report.quantized) == ["0"] and list(report.skipped) == ["1"]
    assert report.unmatched_ignore == ("gate",)


def test_kernel_choice_names_its_reason():
    choice = choose_linear_kernel("w4a16", torch.device("meta"), (64, 64))
    assert choice.kernel is ReferenceLinear and "runs on cpu" in choice.reason
    choice = choose_linear_kernel("w4a16", torch.device("cpu"), (48, 64))
    assert choice.kernel is ReferenceLinear and "multiples of 32" in choice.reason
    with pytest.raises(UserError, match="no kernel multiplies by fp3 weights"):
        choose_linear_kernel("fp3", torch.device("cpu"), (64, 64))
