"""An own kernel of int8 weights: the engine keeps what its `prepare` returns, and a publish writes it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_features import NO_VLLM_CPU, vllm_is_for_cpus
from plugin_kernels import registered
from torch import nn

if not vllm_is_for_cpus():
    pytest.skip(NO_VLLM_CPU, allow_module_level=True)

from qarl.kernels import registry
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme, quantize
from qarl.rollout.kernel_request import KernelRequest
from qarl.rollout.publish import writers
from qarl.schemes.kernel_choice import KernelChoice

configure_vllm_process()
own_linears: Any = importlib.import_module("qarl.rollout.vllm_plugin.own_linears")
NAME = "own_int8"
QARL = KernelChoice.QARL
SCHEMES = {"w8a8": "kernel", "fp8": "fp8_linear"}
"""Scheme -> the attribute in which vLLM's scheme has its kernel."""


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with registered(NAME):
        yield


def engines_layer(kind: str, scheme: str) -> Any:
    """A fused layer of 48 + 16 channels with what vLLM has loaded, and with the class `kind`."""
    kernel_class = getattr(own_linears, kind)
    kernel = kernel_class.__new__(kernel_class)
    kernel.request = KernelRequest(QARL, scheme)
    kernel.layer_param_names = ("weight", "weight_scale", "", "", "")
    layer: Any = nn.Module()
    layer.scheme = SimpleNamespace(**{SCHEMES[scheme]: kernel})
    weight = torch.zeros(64, 32).bfloat16()
    for name, tensor in quantize(weight, get_scheme(scheme)).tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return layer


def written(layer: Any, scheme: str) -> torch.Tensor:
    """Write random weights as a publish does, and return them."""
    target = writers.Target("layer", layer, cut=writers.cut_of(layer, 2))
    stored = writers._stored_on_cpu(target, direct=True)
    assert stored is not None, "vLLM's layerwise reload would write it"
    weight = torch.randn(64, 32).bfloat16()
    parts = [quantize(rows, get_scheme(scheme)).tensors for rows in weight.split([48, 16])]
    stored.write(layer, parts)
    return weight


def test_the_engine_keeps_what_prepare_returns() -> None:
    layer = engines_layer("QaRLInt8LinearKernel", "w8a8")
    layer.scheme.kernel.process_weights_after_loading(layer)
    assert (layer.weight.dtype, layer.weight.shape) == (torch.float32, (32, 64))
    addresses = [p.data_ptr() for p in layer.parameters()]
    weight = written(layer, "w8a8")
    assert [p.data_ptr() for p in layer.parameters()] == addresses, "graphs may have captured them"
    kernel = registry.own_kernel(QARL, get_scheme("w8a8").operands)
    assert kernel is not None and kernel.name == NAME
    x = torch.randn(5, 32).bfloat16()
    bias = torch.randn(64).bfloat16()
    prepared = kernel.prepare(quantize(weight, get_scheme("w8a8")).tensors)
    expected = kernel.linear(x, prepared, bias)
    assert torch.equal(layer.scheme.kernel.apply_weights(layer, x, bias), expected)


def test_what_is_read_as_on_the_wire_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with QaRL's Triton kernels."""
    kernel = registry.own_kernel(QARL, get_scheme("w8a8").operands)
    monkeypatch.setattr(kernel, "prepare", staticmethod(lambda tensors: tuple(tensors.values())))
    layer = engines_layer("QaRLInt8LinearKernel", "w8a8")
    addresses = [p.data_ptr() for p in layer.parameters()]
    layer.scheme.kernel.process_weights_after_loading(layer)
    weight = written(layer, "w8a8")
    assert [p.data_ptr() for p in layer.parameters()] == addresses
    wire = quantize(weight, get_scheme("w8a8")).tensors
    assert all(torch.equal(layer.get_parameter(name), tensor) for name, tensor in wire.items())


def test_fp8_is_written_through_vllms_view() -> None:
    """vLLM's parameter is the [K, N] view of the codes [N, K]."""
    layer = engines_layer("QaRLFP8LinearKernel", "fp8")
    layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
    address = layer.weight.data_ptr()
    weight = written(layer, "fp8")
    assert layer.weight.data_ptr() == address and layer.weight.shape == (32, 64)
    wire = quantize(weight, get_scheme("fp8")).tensors
    assert torch.equal(layer.weight.t().float(), wire["weight"].float())
    assert torch.equal(layer.weight_scale, wire["weight_scale"])


def test_a_square_weight_may_be_a_transposed_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the parameter's own memory and shape."""
    kernel = registry.own_kernel(QARL, get_scheme("w8a8").operands)
    monkeypatch.setattr(
        kernel,
        "prepare",
        staticmethod(lambda tensors: (tensors["weight"].t(), tensors["weight_scale"])),
    )
    layer = engines_layer("QaRLInt8LinearKernel", "w8a8")
    codes = torch.arange(64, dtype=torch.int8).repeat(64, 1)
    layer.weight = nn.Parameter(codes.clone(), requires_grad=False)
    layer.scheme.kernel.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, codes.t())


def test_bf16_experts_beside_own_kernels_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs their method is a subclass of vLLM's."""

    class UnquantizedFusedMoEMethod:
        pass

    class RepairedMethod(UnquantizedFusedMoEMethod):
        pass

    monkeypatch.setattr(own_linears, "holds_experts", lambda module: True)
    assert own_linears._chosen(SimpleNamespace(quant_method=RepairedMethod())) is None
