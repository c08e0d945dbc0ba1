"""The parts of an engine's model that a publish must write, receivers that lack some, and layers that QaRL cannot cut:
without vLLM."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from publish_streams import CONFIGS, engine_model, engine_weights, receiver, weights, write_all
from torch import nn

from qarl.errors import UserError
from qarl.rollout.publish import writers
from qarl.rollout.publish.manifest import TensorSpec
from qarl.rollout.publish.writers import WritePlan, cut_of
from qarl.rollout.remote.records import COMMIT, TransferFailed
from qarl.rollout.remote.wire import encode_publish


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tie", [True, False])
def test_a_model_whose_every_tensor_is_published_is_taken(family, tie):
    model = engine_model(family, tie=tie)
    receiving = receiver(model)
    receiving.feed(encode_publish(weights(family, tie=tie), version=3))
    assert receiving.weights.version == 3
    assert all(
        torch.equal(model.state_dict()[name], tensor) for name, tensor in weights(family, tie=tie)
    )


PLANTED = {
    "a bias": lambda model: setattr(
        model.model.layers[1].mlp.up_proj, "bias", nn.Parameter(torch.randn(96))
    ),
    "a parameter": lambda model: model.model.layers[0].register_parameter(
        "bias", nn.Parameter(torch.randn(3))
    ),
    "a buffer": lambda model: model.model.norm.register_buffer("bias", torch.randn(3)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_parameter_or_buffer_that_no_publish_writes_is_refused(what):
    model = engine_model("llama")
    PLANTED[what](model)
    with pytest.raises(UserError, match=r"(?s)QaRL would never write.*bias"):
        receiver(model)


def test_a_tensor_without_a_place_in_the_engines_model_is_refused_by_name():
    expected = {
        f"model.layers.{i}.mlp.shared.weight": TensorSpec.of(torch.zeros(4)) for i in range(2)
    }
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.shared\.weight has no place"):
        WritePlan(engine_model("llama"), None, expected)


class UnquantizedLinearMethod:
    """By this name the plan knows how vLLM holds a BF16 layer; here the product is with the weight itself."""

    def process_weights_after_loading(self, layer: Any) -> None: ...


def test_a_fused_layer_is_written_whole_or_not_at_all():
    model: Any = nn.ModuleDict(
        {"mlp": nn.ModuleDict({"gate_up_proj": nn.Linear(4, 6, bias=False)})}
    )
    model.mlp.gate_up_proj.quant_method = UnquantizedLinearMethod()
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    tensors = {f"mlp.{part}_proj.weight": torch.randn(3, 4) for part in ("gate", "up")}
    plan = WritePlan(model, None, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()})
    plan.write(tensors)
    written = torch.cat([*tensors.values()])
    assert torch.equal(model.state_dict()["mlp.gate_up_proj.weight"], written)
    for name in tensors:
        with pytest.raises(KeyError):
            plan.write({name: torch.ones(3, 4)})
    assert torch.equal(model.state_dict()["mlp.gate_up_proj.weight"], written)


def test_a_tied_lm_head_multiplies_by_the_published_weight():
    model = engine_model("qwen3", tie=True)
    receiving = receiver(model)
    tensors = weights("qwen3", tie=True)
    assert "lm_head.weight" not in dict(tensors)
    receiving.feed(encode_publish(tensors, version=1))
    assert torch.equal(model.lm_head.packed, dict(tensors)["model.embed_tokens.weight"])


class UnquantizedEmbeddingMethod:
    """By this name the plan knows how vLLM holds an embedding, which it packs like a linear."""

    packed = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.packed += 1


def test_a_tied_embedding_is_packed_once_in_a_publish():
    model = engine_model("qwen3", tie=True)
    method = UnquantizedEmbeddingMethod()
    model.model.embed_tokens.quant_method = method
    tensors = weights("qwen3", tie=True)
    write_all(engine_weights(model), tensors, version=1)
    assert method.packed == 1
    assert torch.equal(model.lm_head.packed, dict(tensors)["model.embed_tokens.weight"])


def test_all_tensors_are_written_at_once_in_one_process():
    mine = engine_weights(engine_model("llama"))
    tensors = weights("llama")
    write_all(mine, tensors, version=3)
    state = mine.model.state_dict()
    assert mine.version == 3 and all(torch.equal(state[name], tensor) for name, tensor in tensors)


def test_a_write_that_fails_leaves_a_stale_engine_that_the_next_one_repairs(monkeypatch):
    mine = engine_weights(engine_model("llama"))
    tensors = weights("llama")
    write_all(mine, tensors, version=1)
    write, units = mine.plan.write, []

    def fail_at_the_second(unit, prepared):
        units.append(unit)
        if len(units) == 2:
            raise MemoryError("no memory")
        write(unit, prepared)

    monkeypatch.setattr(mine.plan, "write", fail_at_the_second)
    with pytest.raises(MemoryError):
        write_all(mine, [(name, tensor + 1) for name, tensor in tensors], version=2)
    assert mine.stale and "version 2 did not complete" in mine.stale_because and not mine.broken
    write_all(mine, tensors, version=3)
    assert mine.version == 3 and torch.equal(mine.model.state_dict()[tensors[0][0]], tensors[0][1])


def published(version: int = 1):
    """A receiver with a complete publish."""
    receiving = receiver(engine_model("llama"))
    receiving.feed(encode_publish(weights("llama"), version=version))
    assert receiving.weights.version == version and not receiving.stale
    return receiving


def test_a_publish_that_lacks_a_tensor_is_not_committed():
    receiving, tensors = published(), weights("llama")
    lacking = [(name, tensor) for name, tensor in tensors if name != "model.norm.weight"]
    with pytest.raises(
        TransferFailed, match=r"version 2 is not complete[\s\S]*missing: model\.norm\.weight"
    ):
        receiving.feed(encode_publish(lacking, version=2))
    assert receiving.stale and "version 2 did not complete" in receiving.stale_because


def test_the_end_of_one_publish_does_not_complete_another():
    receiving = published()
    mine, other = (list(encode_publish(weights("llama"), version=version)) for version in (2, 3))
    assert mine[-1][0] == other[-1][0] == COMMIT
    with pytest.raises(
        TransferFailed, match=r"version 2 is not complete[\s\S]*last record has version 3"
    ):
        receiving.feed([*mine[:-1], other[-1]])
    assert receiving.stale


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


class QKVParallelLinear(Layer): ...


class StripedLinear(ColumnParallelLinear):
    """A class of vLLM that we do not know."""


class ReplicatedLinear(Layer): ...


class GateLinear(ReplicatedLinear): ...


def plan_of(layer: nn.Module, tensor: torch.Tensor) -> WritePlan:
    return WritePlan(nn.ModuleDict({"one": layer}), None, {"one.weight": TensorSpec.of(tensor)})


def test_a_subclass_that_is_not_known_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tensor = StripedLinear(output_partition_sizes=[2]), torch.randn(4, 4)
    calls: list[Any] = []
    monkeypatch.setattr(
        writers, "_reloading", lambda _, modules, owners: nullcontext(calls.append(modules))
    )
    plan = plan_of(layer, tensor)
    plan.model.load_weights = lambda weights: calls.append(dict(weights))  # type: ignore[assignment]  # a ModuleDict
    plan.write({"one.weight": tensor})
    assert calls == [[layer], {"one.weight": tensor}] and not layer.weight.any()


def test_a_matrix_that_is_fused_in_the_checkpoint_is_reloaded() -> None:
    """Half of gate_up is not half of gate and half of up."""
    layer = MergedColumnParallelLinear(output_partition_sizes=[1, 1])
    assert plan_of(layer, torch.zeros(4, 4)).by_owner["one"].stored is None
    assert cut_of(layer, 2) is not None


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_neighbouring_workers_share_a_key_value_head(rank: int, head: int) -> None:
    """Eight heads of q and two of k and v, of one row each, over four workers: two heads of q each."""
    sizes = {"output_partition_sizes": [2, 1, 1], "num_kv_head_replicas": 2}
    layer = QKVParallelLinear(tp_size=4, tp_rank=rank, **sizes)
    q, k, v = torch.arange(8), torch.arange(10, 12), torch.arange(20, 22)
    cut = cut_of(layer, 3)
    assert cut is not None
    rows = [
        part["weight"].flatten().tolist()
        for part in cut(layer, [{"weight": x[:, None]} for x in (q, k, v)])
    ]
    assert rows == [[2 * rank, 2 * rank + 1], [10 + head], [20 + head]]


def test_w8a8_layers_that_would_be_reloaded_are_refused_by_name() -> None:
    scheme = SimpleNamespace(kernel=CPUInt8ScaledMMLinearKernel())
    with pytest.raises(
        UserError,
        match=r"W8A8 weights into one(?s:.*)tensor_model_parallel_size=2(?s:.*)StripedLinear",
    ):
        plan_of(StripedLinear(scheme=scheme), torch.zeros(4, 4))
    known = ColumnParallelLinear(scheme=scheme, output_partition_sizes=[2])
    assert plan_of(known, torch.zeros(4, 4)).by_owner["one"].stored is not None


@pytest.mark.parametrize("kind", [ReplicatedLinear, GateLinear])
def test_every_worker_holds_all_of_a_router(kind: Any) -> None:
    layer, tensor = kind(), torch.randn(2, 4)
    plan_of(layer, tensor).write({"one.weight": tensor})
    assert torch.equal(layer.weight, tensor)


def test_experts_that_are_spread_over_workers_are_not_cut() -> None:
    class RoutedExperts(nn.Module): ...

    layer: Any = RoutedExperts()
    for spread in (True, False):
        layer.moe_config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(use_ep=spread, tp_size=2, tp_rank=0)
        )
        assert (cut_of(layer, 3) is None) == spread
