"""New operands need no entry in a table: experts, their engine and their writers take them from scheme and kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import NO_VLLM_CPU, vllm_is_for_cpus
from expert_cases import make, stacked

from qarl.errors import UserError
from qarl.kernels import registry
from qarl.kernels.base import ExpertsShape
from qarl.kernels.cpu.vllm_experts import CpuOwnExperts
from qarl.kernels.experts import LowBitExperts, ReferenceExperts, fused_experts
from qarl.plugins import VARIABLE, load_plugins
from qarl.quant import get_scheme
from qarl.schemes import unregister
from qarl.schemes.kernel_choice import KernelChoice

NAME = "w8a16"
CPU = torch.device("cpu")
SHAPE = ExpertsShape(experts=6, top_k=3, hidden=64, intermediate=32)
QARL = KernelChoice.QARL


@pytest.fixture(autouse=True, scope="module")
def _plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        load_plugins([str(ROOT / "tests/support/plugins/w8a16.py")])
        yield
    unregister(NAME)
    for name in ("reference_w8a16", "fast_w8a16"):
        registry.unregister(name)


def exact(stack: dict[str, torch.Tensor]) -> torch.Tensor:
    return stack["weight"].double() * stack["weight_scale"].double()


def test_experts_are_multiplied_by_the_registered_linear() -> None:
    """Against float64, with BF16 roundings where the kernels round; and each token as if it were alone."""
    scheme = get_scheme(NAME)
    x, weights, ids, gate_up, down = make(SHAPE, 17)
    wire = stacked(gate_up, NAME), stacked(down, NAME)
    kernel = registry.choose_experts_kernel(scheme, CPU, SHAPE, kernels=QARL).kernel
    assert kernel is CpuOwnExperts
    prepared = kernel.prepare(*wire, scheme.operands)
    assert prepared.gate_up.kernel.name == "fast_w8a16"
    y = kernel.forward(x, weights, ids, prepared)
    expected = torch.zeros_like(x, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for weight, expert in zip(weights[token].double(), chosen, strict=True):
            gate, up = (exact(wire[0])[expert] @ x[token].double()).chunk(2)
            expected[token] += weight * (
                exact(wire[1])[expert] @ (torch.nn.functional.silu(gate) * up)
            )
    # Four BF16 roundings of 2^-9 each, of which the first three are averaged by a product.
    error = (y.double() - expected).norm() / expected.norm()
    assert error < 2**-7
    alone = [
        kernel.forward(x[i : i + 1], weights[i : i + 1], ids[i : i + 1], prepared)
        for i in range(17)
    ]
    assert torch.equal(torch.cat(alone), y)


def test_their_backward_multiplies_by_the_dequantized_weight() -> None:
    """The gradients of the reference kernel, whose activations are not rounded to int8 either."""
    scheme = get_scheme(NAME)
    x, weights, ids, gate_up, down = make(SHAPE, 17)
    wire = stacked(gate_up, NAME), stacked(down, NAME)
    gradients = []
    for kernel in (CpuOwnExperts, ReferenceExperts):
        inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
        experts = LowBitExperts.of(kernel, *wire, scheme.operands)
        fused_experts(*inputs[:2], ids, *inputs[2:], experts).sum().backward()
        gradients.append([t.grad for t in inputs])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in gradients[0])
    dense = [(exact(stack)).bfloat16().double().requires_grad_() for stack in wire]
    rows = x.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for weight, expert in zip(weights[token].double(), chosen, strict=True):
            gate, up = (dense[0][expert] @ rows[token]).chunk(2)
            total = total + (
                weight * (dense[1][expert] @ (torch.nn.functional.silu(gate) * up)).sum()
            )
    total.backward()
    for found, expected in ((gradients[0][0], rows.grad), (gradients[0][2], dense[0].grad)):
        assert (found.double() - expected).norm() / expected.norm() < 2**-6


def test_only_the_own_kernels_are_for_it() -> None:
    """A linear that says nothing of experts is not called for them, as w4a8's, and one of QaRL's not by the engine."""
    with pytest.raises(UserError, match=r"no kernel of experts .*multiplies int4 weights by int8"):
        registry.check_experts_registered(get_scheme("w4a8", 32), QARL)
    scheme = get_scheme(NAME)
    names = [kernel.name for kernel in registry.experts_kernels_of(scheme.operands)]
    assert names == ["reference"]


def engine_modules() -> tuple[Any, Any]:
    if not vllm_is_for_cpus():
        pytest.skip(NO_VLLM_CPU)
    from qarl.process import configure_vllm_process

    configure_vllm_process()
    names = ("cpu_experts", "expert_weights")
    experts, weights = (importlib.import_module(f"qarl.rollout.vllm_plugin.{n}") for n in names)
    return experts, weights


def test_the_engine_knows_it_by_the_name_in_the_request() -> None:
    """vLLM's reading of its config is that of w8a8."""
    from qarl.rollout.kernel_request import KernelRequest

    experts, weights = engine_modules()
    scheme = get_scheme(NAME)
    config = experts.CompressedTensorsConfig.from_config(scheme.quantization_config(["lm_head"]))
    read = config.target_scheme_map["Linear"]
    assert weights.scheme_of_weights(read, KernelRequest(QARL, NAME)) == scheme
    assert weights.scheme_of_weights(read, KernelRequest(QARL, "fp8")) is None
    assert weights.scheme_of_weights(read) == get_scheme("w8a8")


def test_the_engine_stores_and_writes_it() -> None:
    """Parameters as on the wire, and a publish into the trainer's kernel."""
    from qarl.rollout.kernel_request import KernelRequest
    from qarl.rollout.publish.experts import stored_on_cpu

    experts, weights = engine_modules()
    parallel = SimpleNamespace(use_ep=False, tp_size=1)
    moe: Any = SimpleNamespace(experts_per_token=3, has_bias=False, moe_parallel_config=parallel)
    scheme = get_scheme(NAME)
    method = experts.LowBitExpertsMethod(moe, scheme, KernelRequest(QARL, NAME))
    assert method.kernel is CpuOwnExperts
    layer: Any = torch.nn.Module()  # with what `create_weights` reads of vLLM's RoutedExperts
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.activation = weights.MoEActivation.SILU
    layer.apply_router_weight_on_input = False
    layer.quant_method = method
    method.create_weights(layer, 6, 64, 32, torch.bfloat16)
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in layer.named_parameters()}
    assert shapes == {
        "w13_weight": (torch.int8, (6, 64, 64)),
        "w13_weight_scale": (torch.float32, (6, 64, 1)),
        "w2_weight": (torch.int8, (6, 64, 32)),
        "w2_weight_scale": (torch.float32, (6, 64, 1)),
    }
    assert layer.w13_weight_scale.quant_method == "channel"
    x, topk_weights, ids, gate_up, down = make(SHAPE, 5)
    wire = stacked(gate_up, NAME), stacked(down, NAME)
    inner = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    method.moe_kernel = SimpleNamespace(fused_experts=inner)
    stored_on_cpu(layer).write(layer, list(wire))
    prepared = CpuOwnExperts.prepare(*wire, scheme.operands)
    expected = CpuOwnExperts.forward(x, topk_weights, ids, prepared)
    assert torch.equal(inner.kernel.forward(x, topk_weights, ids, inner.prepared), expected)
    assert method.storage() == [{}, {}]


def test_prepared_experts_do_not_read_the_transports_memory() -> None:
    """A transport uses the memory of a unit again for the next one."""
    scheme = get_scheme(NAME)
    x, weights, ids, gate_up, down = make(SHAPE, 5)
    wire = stacked(gate_up, NAME), stacked(down, NAME)
    prepared = CpuOwnExperts.prepare(*wire, scheme.operands)
    expected = CpuOwnExperts.forward(x, weights, ids, prepared)
    for stack in wire:
        for tensor in stack.values():
            tensor.zero_()
    assert torch.equal(CpuOwnExperts.forward(x, weights, ids, prepared), expected)
    assert expected.count_nonzero() and CpuOwnExperts.layout is None
