"""QuantLinear against autograd on the dequantized operands, and model conversion on three model families."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import unpack_from_int32
from kernels_by_scheme import LINEAR_KERNELS
from random_models import save_random_model
from same_bytes import same_bytes
from torch import nn

from qarl.errors import UserError
from qarl.kernels.cpu.vllm_linears import VllmCpuInt8TilesLinear
from qarl.kernels.reference import quantize_fp8, quantize_int8
from qarl.quant import (
    QuantLinear,
    get_scheme,
    invalidate_quantized,
    packed_state_dict,
    quantize,
    quantize_model,
)

KERNELS = [(scheme, kernel.name) for scheme, kernel in LINEAR_KERNELS]


def make_layer(
    out_features=96,
    in_features=64,
    *,
    bias=True,
    scheme="w4a16",
    group_size=32,
    kernel=None,
    seed=0,
) -> QuantLinear:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)
    return QuantLinear(
        linear, get_scheme(scheme, group_size), qualified_name="layer", kernel=kernel
    )


def dequantized_weight(layer: QuantLinear) -> torch.Tensor:
    """float64 [N, K] from the wire tensors; int4 unpacked by compressed-tensors' own function."""
    tensors = layer.quantized().tensors
    if layer.scheme.format != "pack-quantized":
        return tensors["weight"].double() * tensors["weight_scale"].double()
    q = unpack_from_int32(tensors["weight_packed"], 4, torch.Size(tensors["weight_shape"].tolist()))
    exact = (
        q.double()
        * tensors["weight_scale"].repeat_interleave(layer.scheme.group_size, dim=1).double()
    )
    return rounded(exact) if layer.scheme.name == "w4a16" else exact


def dequantized_input(layer: QuantLinear, x: torch.Tensor) -> torch.Tensor:
    """float64 [M, K]: the activations as the scheme rounds them."""
    if layer.scheme.input_activations is None:
        return x.double()
    if layer.kernel is VllmCpuInt8TilesLinear:
        return layer.kernel.dequantized_input(x).double()
    values, scale = (
        quantize_int8 if layer.scheme.input_activations.type == "int" else quantize_fp8
    )(x)
    return values.double() * scale.double()


def other_half(layer: QuantLinear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | float:
    """How far the forward may be off because vLLM's tiles round a few values next to a half the other way."""
    if layer.kernel is not VllmCpuInt8TilesLinear:
        return 0.0
    return 2 * quantize_int8(x)[1].double() * weight.abs().amax(1)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    return exact.bfloat16().double()


def assert_is_one_rounding_of(
    actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, more: torch.Tensor | float = 0.0
) -> None:
    """`terms`: the sum of the magnitudes of what was added up in FP32; `more`: what is allowed besides."""
    assert actual.dtype == torch.bfloat16
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + terms * 1e-6 + more).all()


@pytest.mark.parametrize(("rows", "bias"), [(1, True), (7, False), (300, True)])
@pytest.mark.parametrize("shape", [(96, 64), (33, 96), (256, 384)])
@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_forward_and_gradients_match_float64_autograd_on_the_dequantized_operands(
    scheme, kernel, shape, rows, bias
):
    try:
        layer = make_layer(*shape, bias=bias, scheme=scheme, kernel=kernel)
    except UserError as error:
        pytest.skip(str(error))
    x = (
        torch.randn(rows, shape[1]) * torch.randn(rows, 1).exp() * torch.randn(shape[1]).exp()
    )  # with outliers
    x[1:2] = 0
    x = x.bfloat16().requires_grad_()
    grad = torch.randn(rows, shape[0]).bfloat16()
    y = layer(x)
    y.backward(grad)
    x_hat, weight = dequantized_input(layer, x.detach()), dequantized_weight(layer)
    exact = F.linear(x_hat, weight, layer.bias.double() if bias else None)
    assert_is_one_rounding_of(
        y, exact, x_hat.abs() @ weight.abs().t(), other_half(layer, x.detach(), weight)
    )
    # The backward multiplies the same operands in BF16.
    x_hat, weight = rounded(x_hat).requires_grad_(), rounded(weight).requires_grad_()
    F.linear(x_hat, weight).backward(grad.double())
    size = grad.double().abs()
    assert_is_one_rounding_of(x.grad, x_hat.grad, size @ weight.abs())
    assert_is_one_rounding_of(layer.weight.grad, weight.grad, size.t() @ x_hat.abs())
    if bias:
        torch.testing.assert_close(
            layer.bias.grad.double(), grad.double().sum(0), rtol=2**-7, atol=1e-2
        )


def is_current(layer: QuantLinear) -> bool:
    expected = quantize(layer.weight.detach(), layer.scheme).tensors
    return all(
        same_bytes(tensor, expected[name]) for name, tensor in layer.quantized().tensors.items()
    )


def test_quantized_once_per_update_and_again_after_it():
    layer = make_layer()
    x = torch.randn(4, 64).bfloat16()
    layer(x)
    before = layer.quantized()
    layer(x)
    assert layer.quantized() is before
    with torch.no_grad():
        layer.weight.mul_(2)
    assert is_current(layer)
    layer.weight.data.mul_(2)
    invalidate_quantized(layer)
    assert is_current(layer)
    for _ in range(20):
        del layer.weight
        layer.weight = nn.Parameter(torch.randn(96, 64).bfloat16())
        assert is_current(layer)


@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_the_gradient_after_an_update_is_that_of_the_new_weight(scheme, kernel):
    """The backward keeps the dequantized weight of an update, and must drop it with the next."""
    try:
        layer = make_layer(scheme=scheme, kernel=kernel)
    except UserError as error:
        pytest.skip(str(error))
    grad = torch.randn(8, 96).bfloat16()
    for _ in range(3):
        x = torch.randn(8, 64).bfloat16().requires_grad_()
        layer(x).backward(grad)
        weight = rounded(dequantized_weight(layer))
        assert_is_one_rounding_of(
            x.grad, grad.double() @ weight, grad.double().abs() @ weight.abs()
        )
        with torch.no_grad():
            layer.weight.copy_(torch.randn(96, 64))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_a_step_of_any_optimizer_is_noticed(options):
    """Fused optimizers change weights without advancing autograd's version counter."""
    layer = make_layer(bias=False)
    layer(torch.ones(1, 64).bfloat16()).sum().backward()
    before = layer.quantized()
    torch.optim.AdamW(layer.parameters(), lr=0.1, **options).step()
    assert layer.quantized() is not before and is_current(layer)


def test_other_activation_dtypes_are_refused():
    with pytest.raises(UserError, match=r"layer got torch\.float32"):
        make_layer()(torch.randn(2, 64))


def test_an_update_between_forward_and_backward_is_refused():
    layer = make_layer()
    y = layer(torch.randn(4, 64).bfloat16().requires_grad_())
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="layer changed between"):
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


def linears(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*pair, dtype=dtype) for pair in pairwise(sizes)))


def test_models_that_cannot_be_quantized_are_refused_and_ignored_names_reported():
    with pytest.raises(
        UserError, match=r"(?s)1 linears cannot.*0 has shape \[64, 48\].*group_size"
    ):
        quantize_model(linears(48, 64, 64), group_size=32)
    with pytest.raises(UserError, match="not bfloat16"):
        quantize_model(linears(32, 32, dtype=torch.float32), group_size=32)
    report = quantize_model(linears(32, 32, 32), group_size=32, ignore=["re:^1$", "gate"])
    assert list(report.quantized) == ["0"] and list(report.skipped) == ["1"]
    assert report.unmatched_ignore == ("gate",)


@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_a_copy_makes_its_own_quantized_tensors(scheme, kernel):
    """A kernel may free the memory of its prepared weight: two owners would free it twice."""
    try:
        layer = make_layer(scheme=scheme, kernel=kernel)
    except UserError as error:
        pytest.skip(str(error))
    x = torch.randn(4, 64).bfloat16()
    before = layer(x)
    other = copy.deepcopy(layer)
    assert other.prepared is None and torch.equal(other(x), before)
    del layer
    assert torch.equal(other(x), before)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_a_frozen_layer_has_the_same_bits_from_the_published_tensors_alone(scheme, kernel, rows):
    try:
        layer = make_layer(scheme=scheme, kernel=kernel)
    except UserError as error:
        pytest.skip(str(error))  # this machine cannot run the kernel; the error says why
    x = torch.randn(rows, 64).bfloat16().requires_grad_()

    def results():
        y = layer(x)
        return y, *torch.autograd.grad(y.float().square().sum(), x)

    before = results()
    layer.freeze()
    assert all(map(torch.equal, results(), before)) and layer.prepared is layer._dequantized is None


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_a_layer_without_tokens(scheme: str) -> None:
    layer = make_layer(scheme=scheme)
    x = torch.empty(0, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 3, 96) and x.grad is not None and not layer.weight.grad.any()
