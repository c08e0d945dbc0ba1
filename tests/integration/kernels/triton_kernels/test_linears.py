"""The Triton kernels behind QuantLinear: forward and gradients against float64, and what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from triton_checks import SCHEMES, assert_one_rounding
from triton_rig import DEVICE, INTERPRETED

from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.registry import kernels_of
from qarl.kernels.triton.linears import unavailable
from qarl.kernels.triton.quantize import quantize_tokens
from qarl.quant import QuantLinear, get_scheme
from qarl.schemes.base import INT4_BF16
from qarl.schemes.kernel_choice import KernelChoice


def make_layer(scheme: str, kernels: KernelChoice) -> QuantLinear:
    """A layer with the first Triton kernel that `kernels` may choose."""
    torch.manual_seed(0)
    linear = nn.Linear(128, 96, dtype=torch.bfloat16, device=DEVICE)
    candidates = kernels_of(kernels, get_scheme(scheme).operands)
    name = next(kernel.name for kernel in candidates if kernel.name.startswith("triton"))
    return QuantLinear(linear, get_scheme(scheme, 32), qualified_name="layer", kernel=name)


def operands(layer: QuantLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 x [M, K] and weight [N, K] as the layer rounds them, on the CPU."""
    tensors = {name: tensor.cpu() for name, tensor in layer.quantized().tensors.items()}
    if layer.scheme.name == "w4a16":
        return x.cpu().double(), dequantize_int4(
            tensors["weight_packed"], tensors["weight_scale"]
        ).double()
    values, scale = quantize_tokens(x, tensors["weight"].dtype)
    return values.cpu().double() * scale.cpu().double(), tensors["weight"].double() * tensors[
        "weight_scale"
    ].double()


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("kernels", [KernelChoice.ENGINE, KernelChoice.QARL], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_gradients_without_a_bf16_copy_of_the_weight(
    scheme: str, kernels: KernelChoice, rows: int
) -> None:
    layer = make_layer(scheme, kernels)
    x = (torch.randn(rows, 128) * torch.randn(rows, 1).exp()).bfloat16().to(DEVICE).requires_grad_()
    grad = torch.randn(rows, 96).bfloat16().to(DEVICE)
    y = layer(x)
    y.backward(grad)
    assert layer._dequantized is None
    x_hat, weight = operands(layer, x.detach())
    # Hopper's tensor cores keep about 14 bits of a sum of e4m3 products.
    error = 2**-11 if scheme == "fp8" and not INTERPRETED else 1e-6
    exact = x_hat @ weight.t() + layer.bias.detach().cpu().double()
    assert_one_rounding(y, exact, x_hat.abs() @ weight.abs().t(), error)
    # The backward multiplies the same operands in BF16.
    x_hat, weight, grad = x_hat.bfloat16().double(), weight.bfloat16().double(), grad.cpu().double()
    assert torch.equal(layer.kernel.dequantized_input(x.detach()).cpu().double(), x_hat)
    assert_one_rounding(x.grad, grad @ weight, grad.abs() @ weight.abs())
    assert_one_rounding(layer.weight.grad, grad.t() @ x_hat, grad.abs().t() @ x_hat.abs())


@pytest.mark.skipif(not INTERPRETED, reason="the CPU is served under the interpreter only")
def test_the_interpreter_serves_the_cpu_and_nothing_else() -> None:
    assert unavailable(INT4_BF16, torch.device("cpu")) is None
    assert "not on meta" in str(unavailable(INT4_BF16, torch.device("meta")))
