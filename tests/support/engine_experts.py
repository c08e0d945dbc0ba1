"""One layer of experts in an engine's model, without vLLM: modules of its names and shapes, and stacks to publish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from qarl.rollout.publish.wire import TensorSpec
from qarl.rollout.publish.writers import WritePlan

EXPERTS, HIDDEN, WIDTH = 11, 8, 4
PREFIX = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{PREFIX}.gate_up_proj", f"{PREFIX}.down_proj"
SHAPES = {GATE_UP: (2 * WIDTH, HIDDEN), DOWN: (HIDDEN, WIDTH)}


class RoutedExperts(nn.Module):
    """vLLM's, in what the plan reads; BF16 as its CPU backend has it, or emptied as the plugin leaves low-bit ones."""

    def __init__(self, method: Any, *, use_ep: bool = False) -> None:
        super().__init__()
        self.quant_method, self.global_num_experts = method, EXPERTS
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_rank=0, tp_size=1, use_ep=use_ep))
        for name, shape in (("w13_weight", (2 * WIDTH, HIDDEN)), ("w2_weight", (HIDDEN, WIDTH))):
            self.register_parameter(name, nn.Parameter(torch.zeros(EXPERTS, *shape), requires_grad=False))


def engine_model(method: Any, **sizes: Any) -> Any:
    """`mlp.experts` is vLLM's MoERunner, which has no parameters."""
    model: Any = nn.Module()
    routed = nn.ModuleDict({"routed_experts": RoutedExperts(method, **sizes)})
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": routed})})
    model.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    return model


def stacks(*, scales: bool = False, experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name, shape in SHAPES.items():
        found[f"{name}.weight"] = torch.randn(experts, *shape)
        if scales:
            found[f"{name}.weight_scale"] = torch.randn(experts, shape[0], 1)
    return found


def plan_of(model: Any, tensors: dict[str, torch.Tensor], **arguments: Any) -> WritePlan:
    return WritePlan(model, None, {name: TensorSpec.of(t) for name, t in tensors.items()}, **arguments)
