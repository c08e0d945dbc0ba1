"""`quant.kernels=qarl` on both sides: the classes that vLLM calls against QuantLinear, on rows cut in any way.

The classes are those that QaRL's plugin registers in vLLM (`qarl.rollout.vllm_plugin.own_linears`), built and called as
vLLM builds and calls them. One of them multiplies fused layers, the trainer's multiply one layer each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from triton_rig import DEVICE

from qarl.kernels.registry import own_kernel
from qarl.kernels.triton.linears import unavailable
from qarl.process import configure_vllm_process
from qarl.quant import QuantLinear, get_scheme
from qarl.rollout.kernel_request import engine_arguments, kernel_request
from qarl.schemes.kernel_choice import KernelChoice

load_general_plugins = pytest.importorskip("vllm.plugins").load_general_plugins

pytestmark = pytest.mark.slow  # `make test` has each kernel by itself: test_w4a16, test_scaled_mm

SCHEMES = ("w4a16", "w8a8", "fp8")
K, PARTS = 64, (48, 16)
ROWS = 300
CUTS = ([1, 7, 64, 228], [292, 7, 1])
"""Numbers of rows in one call each; they add up to ROWS."""


@pytest.fixture
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    """The scheme, inside the vLLM config of an engine that was asked for our kernels."""
    if reason := unavailable(get_scheme(request.param).operands, torch.device(DEVICE)):
        pytest.skip(reason)
    configure_vllm_process()
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(
        VllmConfig(**engine_arguments(kernel_request(KernelChoice.QARL, request.param)))
    ):
        yield request.param


def trainers_layers(scheme: str) -> list[QuantLinear]:
    torch.manual_seed(0)
    linears = [nn.Linear(K, n, dtype=torch.bfloat16, device=DEVICE) for n in PARTS]
    return [
        QuantLinear(
            linear, get_scheme(scheme, 32), qualified_name="layer", kernels=KernelChoice.QARL
        )
        for linear in linears
    ]


def engines_kernel(scheme: str) -> Any:
    """Let vLLM's own functions choose among all registered classes, and return what they choose."""
    from vllm.model_executor.kernels import linear as kernels

    from qarl.kernels.cuda.vllm_linears import uint4b8
    from qarl.rollout.vllm_plugin.own_linears import own_kernels_only

    n = sum(PARTS)
    with own_kernels_only():
        if scheme == "w4a16":
            config = kernels.MPLinearLayerConfig(
                (K, n), (K, n), uint4b8(), torch.bfloat16, 32, False, False
            )
            return kernels.choose_mp_linear_kernel(config)(config, "weight_packed", "weight_scale")
        if scheme == "w8a8":
            return kernels.init_int8_linear_kernel(True, False, True, "test")
        from vllm.model_executor.layers.quantization.utils import quant_utils

        keys = quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym
        return kernels.init_fp8_linear_kernel(*keys, torch.bfloat16, torch.bfloat16, (n, K))


def engines_layer(scheme: str, layers: list[QuantLinear], kernel: Any) -> nn.Module:
    """One fused layer with the published tensors, after vLLM's processing of loaded weights."""
    module = nn.Module()
    for name, value in published(scheme, layers).items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    kernel.process_weights_after_loading(module)
    return module


def published(scheme: str, layers: list[QuantLinear]) -> dict[str, torch.Tensor]:
    """The tensors of one fused layer as vLLM loads them."""
    parts = [layer.quantized().tensors for layer in layers]
    names = ("weight_packed" if scheme == "w4a16" else "weight", "weight_scale")
    tensors = {name: torch.cat([part[name] for part in parts]) for name in names}
    if scheme == "fp8":
        tensors["weight"] = tensors["weight"].t()  # as CompressedTensorsW8A8Fp8 leaves it
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES, indirect=True)
def test_rows_cut_in_any_way_have_the_same_bits_on_both_sides(scheme: str) -> None:
    load_general_plugins()
    layers, kernel = trainers_layers(scheme), engines_kernel(scheme)
    assert type(kernel).__name__.startswith("QaRL")
    own = own_kernel(KernelChoice.QARL, get_scheme(scheme).operands)
    assert {layer.kernel for layer in layers} == {own}
    module = engines_layer(scheme, layers, kernel)
    x = (torch.randn(ROWS, K) * torch.randn(ROWS, 1).exp()).bfloat16().to(DEVICE)
    bias = torch.cat([layer.bias.detach() for layer in layers])
    with torch.no_grad():
        whole = torch.cat([layer(x) for layer in layers], dim=1)
        assert whole.float().std() > 0.1
        for number, cut in enumerate(
            CUTS[:1] if scheme == "fp8" else CUTS
        ):  # e4m3 takes minutes in the interpreter
            assert sum(cut) == ROWS
            pieces = x.split(cut)
            engine = torch.cat([kernel.apply_weights(module, piece, bias) for piece in pieces])
            assert torch.equal(engine, whole), (cut, "engine")
            layer, columns = (
                layers[number],
                slice(0, PARTS[0]) if number == 0 else slice(PARTS[0], None),
            )
            trainer = torch.cat([layer(piece) for piece in pieces])
            assert torch.equal(trainer, whole[:, columns]), (cut, "trainer")


@pytest.mark.parametrize("scheme", SCHEMES, indirect=True)
def test_the_engine_calls_one_operator_on_the_wire_tensors(scheme: str) -> None:
    """torch.compile sees shapes alone: the operator's fake result has those of the real one. A CUDA graph may have
    captured addresses: another publish moves no parameter, whose values are those of a kernel's copy in W4A16."""
    load_general_plugins()
    layers, kernel = trainers_layers(scheme), engines_kernel(scheme)
    module = engines_layer(scheme, layers, kernel)
    before = {name: (p.data_ptr(), p.dtype, p.clone()) for name, p in module.named_parameters()}
    if scheme == "w4a16":
        module.weight_packed.data.zero_()
        kernel.write(module, published(scheme, layers))
    else:
        kernel.process_weights_after_loading(module)
    for name, parameter in module.named_parameters():
        address, dtype, values = before[name]
        assert (parameter.data_ptr(), parameter.dtype) == (address, dtype), name
        assert torch.equal(parameter.view(torch.uint8), values.view(torch.uint8)), name
    weight, scale = (p.detach() for p in module.parameters())
    operands = (weight.t() if scheme == "fp8" else weight, scale, None, "qarl", scheme, sum(PARTS))
    x = torch.randn(5, K).bfloat16().to(DEVICE)
    torch.library.opcheck(
        torch.ops.qarl.linear.default, (x, *operands), test_utils="test_faketensor"
    )
    output = kernel.apply_weights(module, x.view(1, 5, K))
    assert output.shape == (1, 5, sum(PARTS)) and output.dtype == torch.bfloat16
