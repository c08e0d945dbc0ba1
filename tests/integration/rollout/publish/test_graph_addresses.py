"""After a publish, everything that a CUDA graph can have captured is where it was, and has its new value."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qarl.rollout.publish import graph_addresses
from qarl.rollout.publish.graph_addresses import addresses_kept, moved, tensor_slots
from qarl.rollout.publish.manifest import TensorSpec
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import encode_publish

GRAPHS = SimpleNamespace(
    compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"))
)


class Kernel:
    """As vLLM's kernels are: an object of its package, outside of the tree of modules."""

    __module__ = "vllm.kernels"

    def __init__(self) -> None:
        self.workspace = torch.zeros(4)


@dataclass(frozen=True)
class QuantConfig:
    scale: torch.Tensor


QuantConfig.__module__ = "vllm.fused_moe"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scheme: Any = SimpleNamespace()
        self.quant_method: Any = Kernel()
        self.quant_method.scheme = Kernel()
        self.strides = [torch.ones(2), {"c": torch.ones(5)}]
        self.plain = torch.full((2,), 7.0)
        self.quant_config = QuantConfig(self.weight)
        self.quant_method.run = functools.partial(max, torch.ones(6))


def process(layer: Layer) -> None:
    """What a `process_weights_after_loading` may do."""
    layer.quant_method = Kernel()
    layer.quant_method.scheme = Kernel()
    layer.quant_method.run = functools.partial(max, torch.ones(6))
    layer.strides = [torch.full((2,), 2.0), {"c": torch.full((5,), 3.0)}]
    layer.plain.data = torch.full((2,), 8.0)
    layer.quant_config = QuantConfig(torch.full((3,), 9.0))


def test_every_kind_of_place_is_found_and_put_back() -> None:
    layer = Layer()
    before = tensor_slots({"layer": layer})
    assert {path.removeprefix("layer.") for path in before} == {
        "weight", "plain", "strides.[0]", "strides.[1].[c]", "quant_method.workspace", "quant_method.scheme.workspace",
        "quant_config.scale", "quant_method.run.args.[0]",
    }  # fmt: skip
    layer.quant_method.workspace.fill_(5)  # locks that a failed launch left behind
    with addresses_kept({"layer": layer}):
        process(layer)
        assert len(moved(before, tensor_slots({"layer": layer}))) == 6
    after = tensor_slots({"layer": layer})
    assert {path for path in before if after[path].address != before[path].address} == {
        "layer.quant_method.run.args.[0]"  # a partial cannot be changed
    }
    assert moved(before, after) == ["layer.quant_method.run.args.[0]"]
    assert layer.quant_method.workspace.tolist() == [0] * 4
    assert layer.plain.tolist() == [8] * 2 and layer.strides[1]["c"].tolist() == [3] * 5
    assert layer.quant_config.scale is layer.weight and layer.weight.tolist() == [9] * 3
    with addresses_kept({"layer": layer}):
        layer.quant_method.workspace = torch.zeros(9)  # of another shape, which cannot be put back
    assert moved(after, tensor_slots({"layer": layer})) == ["layer.quant_method.workspace"]


def test_memory_that_is_used_again_does_not_hide_a_move() -> None:
    """The allocator gives freed memory to the next tensor of the same size: while the places are held, it cannot."""
    layers = {str(i): Layer() for i in range(8)}
    before = tensor_slots(layers)
    for layer in layers.values():
        layer.quant_method.workspace = torch.zeros(4)
    assert len(moved(before, tensor_slots(layers))) == 8


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """One layer with the parts of vLLM 0.24's Marlin layers that count: each load makes another workspace."""
    reloading = pytest.importorskip("vllm.model_executor.model_loader.reload")
    base = pytest.importorskip("vllm.model_executor.layers.linear").LinearMethodBase
    monkeypatch.setattr(graph_addresses, "on_cpu", lambda: False)

    class Method(base):
        def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, *args: Any, **kwargs: Any) -> None: ...

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data = layer.weight.data * 2
            layer.scheme.workspace = torch.zeros(4)
            if hasattr(layer, "steps"):
                layer.steps = functools.partial(max, torch.ones(6))

    class Model(nn.Module):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                parameter = self.get_parameter(name)
                getattr(parameter, "weight_loader", lambda p, t: p.data.copy_(t))(parameter, tensor)

    model: Any = Model()
    model.one = nn.Module()
    model.one.weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    model.one.quant_method, model.one.scheme = Method(), Kernel()
    reloading.record_metadata_for_reloading(model)
    model.one.quant_method.process_weights_after_loading(model.one)
    return model


def receiver(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> StreamReceiver:
    import contextlib

    import vllm.config

    monkeypatch.setattr(
        vllm.config, "set_current_vllm_config", lambda config: contextlib.nullcontext()
    )
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32), **vars(GRAPHS))
    expected = {"one.weight": TensorSpec.of(torch.zeros(3, 2))}
    weights = EngineWeights(model, config, expected, kv_caches=list, direct=False)
    return StreamReceiver(weights)


@pytest.mark.vllm
def test_a_publish_through_vllms_reload_leaves_the_workspace_in_its_place(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving = receiver(model, monkeypatch)
    weight, workspace = model.one.weight.data_ptr(), model.one.scheme.workspace
    workspace.fill_(3)
    for version in (1, 2):
        receiving.feed(
            encode_publish([("one.weight", torch.full((3, 2), float(version)))], version=version)
        )
        assert receiving.weights.version == version
        assert (
            model.one.weight.data_ptr() == weight
            and model.one.weight.tolist() == [[2 * version] * 2] * 3
        )
        assert model.one.scheme.workspace is workspace and workspace.tolist() == [0] * 4


@pytest.mark.vllm
def test_the_next_publish_reports_what_an_aborted_one_moved(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.one.table = functools.partial(max, torch.ones(6))
    receiving = receiver(model, monkeypatch)
    receiving.feed(list(encode_publish([("one.weight", torch.ones(3, 2))], version=1))[:-1])
    model.one.table = functools.partial(max, torch.ones(6))
    receiving.weights.abort("the sender died")
    with pytest.raises(ReloadFailed, match=r"(?s)version 2 moved 1 tensors.*model\.one\.table"):
        receiving.feed(encode_publish([("one.weight", torch.ones(3, 2))], version=2))


@pytest.mark.vllm
def test_an_engine_whose_graphs_lost_a_tensor_is_broken(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.one.steps = functools.partial(max, torch.ones(6))
    receiving = receiver(model, monkeypatch)
    with pytest.raises(
        TensorsMoved, match=r"(?s)version 1 moved.*model\.one\.steps.*fix: .*enforce_eager=true"
    ):
        receiving.feed(encode_publish([("one.weight", torch.ones(3, 2))], version=1))
    assert receiving.weights.broken and receiving.stale
    with pytest.raises(ReloadFailed, match="takes no more publishes"):
        receiving.feed(encode_publish([("one.weight", torch.ones(3, 2))], version=2))
