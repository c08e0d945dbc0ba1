"""Where experts are written in the engine's model, without vLLM: modules of its names and shapes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_experts import DOWN, EXPERTS, GATE_UP, PREFIX, SHAPES, WIDTH, engine_model, plan_of, stacks
from torch import nn

from qarl.errors import UserError
from qarl.kernels.cpu import torch_ops
from qarl.quant.expert_names import stacked
from qarl.rollout.publish import layer_writers, writers
from qarl.rollout.publish.wire import TensorSpec, check_same_layers


class UnquantizedFusedMoEMethod: ...


class RepairedUnquantizedMethod(UnquantizedFusedMoEMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed = [layer.w13_weight.clone(), layer.w2_weight.clone()]


class LowBitExpertsMethod:
    def write(self, layer: Any, gate_up: Any, down: Any) -> None:
        self.written = gate_up, down


class CompressedTensorsWNA16MoEMethod: ...


def test_bf16_experts_are_processed_once() -> None:
    method, tensors = RepairedUnquantizedMethod(), stacks()
    model = engine_model(method)
    plan_of(model, tensors).write(tensors)
    assert [torch.equal(*pair) for pair in zip(method.processed, tensors.values(), strict=True)] == [True, True]
    sent = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert sent.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in model.parameters())


@pytest.mark.parametrize("same_bits", [False, True])
def test_prepared_fp8_stacks_are_not_the_senders_memory(monkeypatch: pytest.MonkeyPatch, same_bits: bool) -> None:
    """A transport writes the next layer into its buffer, while the engine computes with this one."""
    monkeypatch.setattr(torch_ops, "_fp32_matmul_equals_scaled_mm", lambda columns: same_bits)
    tensors = {"weight": torch.randn(2, 16, 8).to(torch.float8_e4m3fn), "weight_scale": torch.rand(2, 16, 1)}
    prepared = torch_ops.VllmCpuFP8Linear.prepare_stack(tensors)
    before = [(one.weight.clone(), one.scale.clone()) for one in prepared]
    for tensor in tensors.values():
        tensor.zero_()
    for one, (weight, scale) in zip(prepared, before, strict=True):
        assert torch.equal(one.weight.float(), weight.float()) and torch.equal(one.scale, scale)


def test_low_bit_experts_are_passed_as_they_came() -> None:
    method, tensors = LowBitExpertsMethod(), stacks(scales=True)
    model = engine_model(method)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    plan_of(model, tensors).write(tensors)
    for name, part in zip(SHAPES, method.written, strict=True):
        assert all(part[leaf] is tensors[f"{name}.{leaf}"] for leaf in ("weight", "weight_scale")) and len(part) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_matrices_of_a_checkpoint_become_stacks(order: int) -> None:
    """Whatever the order of the experts. Matrices that lack one, or that are not alike, stay as they are."""
    tensors = stacks(scales=True)
    names = [
        f"{PREFIX}.{expert}.{matrix}" for expert in range(EXPERTS) for matrix in ("gate_proj", "up_proj", "down_proj")
    ]
    single = {}
    for name in names[::order]:
        expert, matrix = int(name.split(".")[5]), name.rpartition(".")[2]
        for leaf in ("weight", "weight_scale"):
            whole = tensors[f"{DOWN if matrix == 'down_proj' else GATE_UP}.{leaf}"][expert]
            half = {"gate_proj": slice(WIDTH), "up_proj": slice(WIDTH, None), "down_proj": slice(None)}[matrix]
            single[f"{name}.{leaf}"] = whole[half]
        single[f"{name}.weight_shape"] = torch.tensor(single[f"{name}.weight"].shape)
    made = dict(stacked([("before", torch.zeros(1)), *single.items(), ("after", torch.zeros(1))]))
    assert made.keys() == {"before", *tensors, "after"}
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    one = f"{PREFIX}.3.up_proj.weight"
    for spoilt in ({n: t for n, t in single.items() if n != one}, {**single, one: single[one][:-1]}):
        assert dict(stacked(spoilt.items())) == spoilt


def test_a_layer_is_written_whole_or_not_at_all() -> None:
    method, tensors = LowBitExpertsMethod(), stacks()
    plan = plan_of(engine_model(method), tensors)
    with pytest.raises(KeyError, match=DOWN):
        plan.write({f"{GATE_UP}.weight": tensors[f"{GATE_UP}.weight"]})
    assert not hasattr(method, "written")


def test_a_parameter_of_experts_that_nothing_writes_is_refused() -> None:
    model, tensors = engine_model(RepairedUnquantizedMethod()), stacks()
    plan_of(model, tensors)
    routed = model.get_submodule(f"{PREFIX}.routed_experts")
    routed.w13_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH))
    with pytest.raises(UserError, match=r"QaRL would never write(?s:.*)w13_bias"):
        plan_of(model, tensors)


@pytest.mark.parametrize("method", [UnquantizedFusedMoEMethod(), CompressedTensorsWNA16MoEMethod()])
def test_an_engine_on_a_cpu_without_the_plugin_is_refused(method: Any) -> None:
    with pytest.raises(UserError, match="but vLLM runs without QaRL's plugin"):
        plan_of(engine_model(method), stacks())


@pytest.mark.parametrize(
    ("method", "sizes", "arguments"),
    [
        (RepairedUnquantizedMethod(), {"use_ep": True}, {}),
        (LowBitExpertsMethod(), {}, {"direct": False}),
        (CompressedTensorsWNA16MoEMethod(), {"device": "meta"}, {}),
    ],
)
def test_other_experts_are_reloaded(
    method: Any, sizes: dict[str, Any], arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert parallelism, other devices, and where direct writes are not wanted."""
    device = sizes.pop("device", "cpu")
    model, tensors = engine_model(method, **sizes).to(device), stacks(scales=True)
    found: list[Any] = []
    monkeypatch.setattr(writers, "_reloading", lambda _, modules, owners: nullcontext(found.append(modules)))
    monkeypatch.setattr(layer_writers, "reload", lambda *given: found.append(given))
    plan_of(model, tensors, **arguments).write(tensors)
    routed = model.get_submodule(f"{PREFIX}.routed_experts")
    modules, (module, parts, cut) = found
    assert modules == [routed] and module is routed
    assert [list(part) for part in parts] == [["weight", "weight_scale"]] * 2
    assert cut == (None if sizes else parts)


def test_the_stacks_that_are_quantized_are_compared() -> None:
    low_bit = {name: TensorSpec.of(t) for name, t in stacks(scales=True).items()}
    plain = {name: TensorSpec.of(t) for name, t in stacks().items()}
    for method in (LowBitExpertsMethod(), CompressedTensorsWNA16MoEMethod()):
        check_same_layers(engine_model(method), low_bit)
        with pytest.raises(UserError, match=rf"only the engine: \['{DOWN}'"):
            check_same_layers(engine_model(method), plain)
    check_same_layers(engine_model(RepairedUnquantizedMethod()), plain)
    with pytest.raises(UserError, match=r"(?s)only the trainer: .*experts\.down_proj.*mlp\[\.\]gate"):
        check_same_layers(engine_model(RepairedUnquantizedMethod()), low_bit)
