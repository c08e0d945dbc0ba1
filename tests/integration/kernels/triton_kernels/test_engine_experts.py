"""`quant.kernels=qarl` for experts on both sides: the method that vLLM calls against QuantExperts, on any tokens.

The method is the one of QaRL's plugin for GPUs (`qarl.rollout.vllm_plugin.cuda_experts`), with a layer of vLLM's names.
tests/gpu_stack builds it in vLLM's own layer.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import SHAPE, make
from torch import nn
from triton_checks import SCHEMES
from triton_rig import DEVICE

from qarl.kernels.experts import TritonInvariantExperts
from qarl.process import configure_vllm_process
from qarl.quant import get_scheme
from qarl.quant.experts import QuantExperts
from qarl.rollout.kernel_request import KernelRequest
from qarl.schemes.kernel_choice import KernelChoice

pytest.importorskip("vllm")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    configure_vllm_process()
    module = importlib.import_module("qarl.rollout.vllm_plugin.cuda_experts")
    monkeypatch.setattr(module.OwnExpertsMethod, "device_type", DEVICE)
    monkeypatch.setattr(
        TritonInvariantExperts, "device_type", DEVICE
    )  # the interpreter is on a CPU
    return module


def trainers_layer(scheme: str, gate_up: torch.Tensor, down: torch.Tensor) -> QuantExperts:
    experts: Any = nn.Module()
    experts.gate_up_proj, experts.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
    experts.act_fn, experts.config = nn.SiLU(), SimpleNamespace(num_experts_per_tok=SHAPE.top_k)
    kernels = KernelChoice.QARL
    return QuantExperts(experts, get_scheme(scheme, 32), qualified_name="layer", kernels=kernels)


def engines_layer(plugin: Any, scheme: str) -> Any:
    """A layer with what the method reads of vLLM's RoutedExperts, and empty parameters."""
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe").MoEActivation
    layer: Any = nn.Module()
    layer.layer_name, layer.activation = "model.layers.0.mlp.experts", activation.SILU
    layer.apply_router_weight_on_input = False
    parallel = SimpleNamespace(use_ep=False, tp_size=1)
    moe = SimpleNamespace(
        experts_per_token=SHAPE.top_k, has_bias=False, moe_parallel_config=parallel
    )
    request = KernelRequest(KernelChoice.QARL, scheme)
    layer.quant_method = plugin.OwnExpertsMethod(moe, get_scheme(scheme, 32), request)
    with torch.device(DEVICE):
        layer.quant_method.create_weights(
            layer, SHAPE.experts, SHAPE.hidden, SHAPE.intermediate, torch.bfloat16
        )
    return layer


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_sides_have_the_same_bits_for_any_batch(plugin: Any, scheme: str) -> None:
    """The engine gets the tokens one after another, in pieces, and all at once; the trainer all at once. A publish
    writes to the parameters' addresses, and an expert without tokens changes nothing."""
    x, weights, ids, gate_up, down = (tensor.to(DEVICE) for tensor in make())
    trainer, layer = trainers_layer(scheme, gate_up, down), engines_layer(plugin, scheme)
    addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
    published = [stack.tensors for stack in trainer.quantized().values()]
    layer.quant_method.write(layer, *published)
    layer.quant_method.process_weights_after_loading(layer)
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
    with torch.no_grad():
        whole = trainer(x, ids.long(), weights)
    assert whole.isfinite().all() and whole.float().std() > 0.1
    for cut in ([1] * 3 + [20], [23]):
        rows = zip(x.split(cut), weights.split(cut), ids.split(cut), strict=True)
        pieces = [layer.quant_method.apply(layer, *piece, None, None) for piece in rows]
        assert torch.equal(torch.cat(pieces), whole), cut


def test_what_the_kernel_does_not_multiply_is_refused(plugin: Any) -> None:
    from qarl.errors import UserError

    request = KernelRequest(KernelChoice.QARL, "w4a8")
    moe = SimpleNamespace()
    with pytest.raises(UserError, match="no own kernel for w4a8 experts"):
        plugin.OwnExpertsMethod(moe, get_scheme("w4a8"), request)
