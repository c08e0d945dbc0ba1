"""Layers of several workers that QaRL cannot cut, and groups that a cut would split: without vLLM."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qarl.errors import UserError
from qarl.rollout.publish import writers
from qarl.rollout.publish.wire import TensorSpec
from qarl.rollout.publish.writers import WritePlan, cut_of


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: Any) -> None: ...


class CPUInt8ScaledMMLinearKernel:
    dnnl_handler = object()


class Layer(nn.Module):
    """By these attributes the plan knows a vLLM layer: worker 1 of 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.quant_method, self.tp_size, self.tp_rank = UnquantizedLinearMethod(), 2, 1
        for name, value in attributes.items():
            setattr(self, name, value)


class ColumnParallelLinear(Layer): ...


class MergedColumnParallelLinear(Layer): ...


class RowParallelLinear(Layer): ...


class StripedLinear(ColumnParallelLinear):
    """A class of vLLM that we do not know."""


class ReplicatedLinear(Layer): ...


class GateLinear(ReplicatedLinear): ...


def plan_of(layer: nn.Module, tensor: torch.Tensor) -> WritePlan:
    return WritePlan(nn.ModuleDict({"one": layer}), None, {"one.weight": TensorSpec.of(tensor)})


def test_a_subclass_that_is_not_known_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tensor = StripedLinear(output_partition_sizes=[2]), torch.randn(4, 4)
    found: list[Any] = []
    monkeypatch.setattr(writers, "_reloading", lambda _, modules, owners: nullcontext(found.append(modules)))
    plan = plan_of(layer, tensor)
    plan.model.load_weights = lambda weights: found.append(dict(weights))  # type: ignore[assignment]  # a ModuleDict
    plan.write({"one.weight": tensor})
    assert found == [[layer], {"one.weight": tensor}] and not layer.weight.any()


def test_a_matrix_that_is_fused_in_the_checkpoint_is_reloaded() -> None:
    """Half of gate_up is not half of gate and half of up."""
    layer = MergedColumnParallelLinear(output_partition_sizes=[1, 1])
    assert plan_of(layer, torch.zeros(4, 4)).by_owner["one"].writer is None
    assert cut_of(layer, 2) is not None


def test_w8a8_layers_that_would_be_reloaded_are_refused_by_name() -> None:
    scheme = SimpleNamespace(kernel=CPUInt8ScaledMMLinearKernel())
    with pytest.raises(
        UserError, match=r"W8A8 weights into one(?s:.*)tensor_model_parallel_size=2(?s:.*)StripedLinear"
    ):
        plan_of(StripedLinear(scheme=scheme), torch.zeros(4, 4))
    known = ColumnParallelLinear(scheme=scheme, output_partition_sizes=[2])
    assert plan_of(known, torch.zeros(4, 4)).by_owner["one"].writer is not None


@pytest.mark.parametrize("kind", [ReplicatedLinear, GateLinear])
def test_every_worker_holds_all_of_a_router(kind: Any) -> None:
    layer, tensor = kind(), torch.randn(2, 4)
    plan_of(layer, tensor).write({"one.weight": tensor})
    assert torch.equal(layer.weight, tensor)


def test_experts_that_are_spread_over_workers_are_not_cut() -> None:
    class RoutedExperts(nn.Module): ...

    layer: Any = RoutedExperts()
    for spread in (True, False):
        layer.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=spread, tp_size=2, tp_rank=0))
        assert (cut_of(layer, 3) is None) == spread


def row_part(groups: int) -> dict[str, torch.Tensor]:
    """64 columns."""
    return {"weight_packed": torch.arange(16.0).reshape(2, 8), "weight_scale": torch.arange(2.0 * groups).view(2, -1)}


def test_groups_and_biases_of_a_row_parallel_layer() -> None:
    layer: Any = RowParallelLinear(tp_rank=1)
    cut: Any = cut_of(layer, 1)
    part = row_part(2) | {"bias": torch.ones(2), "weight_shape": torch.tensor([2, 64])}
    (found,) = cut(layer, [part])
    assert torch.equal(found["weight_packed"], part["weight_packed"][:, 4:])
    assert torch.equal(found["weight_scale"], part["weight_scale"][:, 1:])
    assert found["bias"] is part["bias"] and found["weight_shape"] is part["weight_shape"]
    channel = {"weight": torch.randn(2, 8), "weight_scale": torch.randn(2, 1)}
    (found,) = cut(layer, [channel])
    assert torch.equal(found["weight"], channel["weight"][:, 4:]) and found["weight_scale"] is channel["weight_scale"]
