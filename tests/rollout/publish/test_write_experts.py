"""Where experts are written in the engine's model, without vLLM: modules of its names and shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qarl.errors import UserError
from qarl.rollout.publish import writers
from qarl.rollout.publish.manifest import TensorSpec, check_complete, check_same_layers
from qarl.rollout.publish.receive import WeightReceiver
from qarl.rollout.publish.wire import TransferFailed, encode_publish
from qarl.rollout.publish.writers import WritePlan

EXPERTS, HIDDEN, WIDTH = 11, 8, 4
PREFIX = "model.layers.0.mlp.experts"
SHAPES = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


class RoutedExperts(nn.Module):
    """vLLM's, in what the plan reads; BF16 as its CPU backend has it, or emptied as the plugin leaves low-bit ones."""

    def __init__(self, method: Any, *, use_ep: bool = False) -> None:
        super().__init__()
        self.quant_method, self.global_num_experts = method, EXPERTS
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_rank=0, tp_size=1, use_ep=use_ep))
        for name, shape in (("w13_weight", (2 * WIDTH, HIDDEN)), ("w2_weight", (HIDDEN, WIDTH))):
            self.register_parameter(name, nn.Parameter(torch.zeros(EXPERTS, *shape), requires_grad=False))


class UnquantizedFusedMoEMethod: ...


class RepairedUnquantizedMethod(UnquantizedFusedMoEMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed = [layer.w13_weight.clone(), layer.w2_weight.clone()]


class LowBitExpertsMethod:
    def write(self, layer: Any, gate_up: Any, down: Any) -> None:
        self.written = gate_up, down


class CompressedTensorsWNA16MoEMethod: ...


def engine_model(method: Any, **sizes: Any) -> Any:
    """`mlp.experts` is vLLM's MoERunner, which has no parameters."""
    model: Any = nn.Module()
    experts = nn.ModuleDict({"routed_experts": RoutedExperts(method, **sizes)})
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    model.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    return model


def matrices(*, scales: bool = False, experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    """In another order than that of the numbers, each with values of its own."""
    torch.manual_seed(0)
    found = {}
    for expert in reversed(range(experts)):
        for matrix, shape in SHAPES.items():
            found[f"{PREFIX}.{expert}.{matrix}.weight"] = torch.randn(shape)
            if scales:
                found[f"{PREFIX}.{expert}.{matrix}.weight_scale"] = torch.randn(shape[0], 1)
                found[f"{PREFIX}.{expert}.{matrix}.weight_shape"] = torch.tensor(shape)
    return found


def plan_of(model: Any, tensors: dict[str, torch.Tensor], **arguments: Any) -> WritePlan:
    return WritePlan(model, None, {name: TensorSpec.of(t) for name, t in tensors.items()}, **arguments)


def check_stacks(tensors: dict[str, torch.Tensor], leaf: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    for expert in range(EXPERTS):
        gate, up, below = (tensors[f"{PREFIX}.{expert}.{matrix}.{leaf}"] for matrix in SHAPES)
        half = len(gate)
        assert torch.equal(gate_up[expert, :half], gate) and torch.equal(gate_up[expert, half:], up)
        assert torch.equal(down[expert], below)


def test_bf16_experts_are_stacked_and_processed_once() -> None:
    method, tensors = RepairedUnquantizedMethod(), matrices()
    plan_of(engine_model(method), tensors).write(tensors)
    check_stacks(tensors, "weight", *method.processed)


def test_low_bit_experts_are_stacked_by_tensor() -> None:
    method, tensors = LowBitExpertsMethod(), matrices(scales=True)
    model = engine_model(method)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    plan_of(model, tensors).write(tensors)
    gate_up, down = method.written
    assert gate_up.keys() == down.keys() == {"weight", "weight_scale"}
    for leaf in gate_up:
        check_stacks(tensors, leaf, gate_up[leaf], down[leaf])


def test_a_layer_is_written_whole_or_not_at_all() -> None:
    method, tensors = LowBitExpertsMethod(), matrices()
    plan = plan_of(engine_model(method), tensors)
    missing = f"{PREFIX}.1.up_proj"
    with pytest.raises(UserError, match=f"routed_experts cannot be written without {missing}"):
        plan.write({name: tensor for name, tensor in tensors.items() if not name.startswith(missing)})
    assert not hasattr(method, "written")


@pytest.mark.parametrize(("experts", "side"), [(EXPERTS - 1, "engine"), (EXPERTS + 1, "trainer")])
def test_another_number_of_experts_is_refused(experts: int, side: str) -> None:
    number = min(experts, EXPERTS)
    with pytest.raises(
        UserError, match=rf"(?s)have different experts.*only the {side}: \['{PREFIX}\.{number}\.down_proj'"
    ):
        plan_of(engine_model(LowBitExpertsMethod()), matrices(experts=experts))


def test_a_parameter_of_experts_that_nothing_writes_is_refused() -> None:
    model, tensors = engine_model(RepairedUnquantizedMethod()), matrices()
    plan_of(model, tensors)
    routed = model.get_submodule(f"{PREFIX}.routed_experts")
    routed.w13_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH))
    with pytest.raises(UserError, match=r"QaRL would never write(?s:.*)w13_bias"):
        plan_of(model, tensors)


@pytest.mark.parametrize("method", [UnquantizedFusedMoEMethod(), CompressedTensorsWNA16MoEMethod()])
def test_an_engine_on_a_cpu_without_the_plugin_is_refused(method: Any) -> None:
    with pytest.raises(UserError, match="but vLLM runs without QaRL's plugin"):
        plan_of(engine_model(method), matrices())


@pytest.mark.parametrize(
    ("method", "sizes", "arguments"),
    [
        (RepairedUnquantizedMethod(), {"use_ep": True}, {}),
        (LowBitExpertsMethod(), {}, {"direct": False}),
        (CompressedTensorsWNA16MoEMethod(), {"device": "meta"}, {}),
    ],
)
def test_other_experts_are_reloaded_without_weight_shape(
    method: Any, sizes: dict[str, Any], arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert parallelism, other devices, and where direct writes are not wanted."""
    device = sizes.pop("device", "cpu")
    model, tensors = engine_model(method, **sizes).to(device), matrices(scales=True)
    found: list[Any] = []
    monkeypatch.setattr(writers, "_reload", lambda *given: found.append(given))
    plan_of(model, tensors, **arguments).write(tensors)
    ((_, _, modules, sent),) = found
    assert modules == [model.get_submodule(f"{PREFIX}.routed_experts")]
    assert sent.keys() == {name for name in tensors if not name.endswith("weight_shape")}


@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
@pytest.mark.parametrize("matrix", SHAPES)
def test_an_experts_tensor_is_checked_like_any_other(expert: int, matrix: str) -> None:
    """Where the checksums are made on the way, as in verl: NaN in it, and a bit that flips behind them."""
    method, tensors = LowBitExpertsMethod(), matrices(scales=True)
    expected = {name: TensorSpec.of(t) for name, t in tensors.items()}
    receiver = WeightReceiver(engine_model(method), None, expected, kv_caches=list)
    for leaf in ("weight", "weight_scale"):
        name = f"{PREFIX}.{expert}.{matrix}.{leaf}"
        spoilt = {**tensors, name: tensors[name].clone()}
        spoilt[name].view(-1)[-1] = torch.nan
        with pytest.raises(UserError, match=rf"1 tensors to publish hold NaN(?s:.*){name}"):
            receiver.feed(encode_publish(spoilt.items(), version=1))
        with pytest.raises(UserError, match=f"{name}: holds NaN"):
            check_complete(spoilt.items(), expected)
        stream = list(encode_publish(tensors.items(), version=1))
        flipped = [(n, _flipped(t) if n == name else t) for n, t in stream]
        with pytest.raises(TransferFailed, match=f"{name} was damaged"):
            receiver.feed(flipped)
        assert receiver.stale and not hasattr(method, "written")
    receiver.feed(stream)
    assert receiver.version == 1 and hasattr(method, "written")


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.uint8).view(-1)[0] ^= 1
    return flipped


def test_the_layers_that_are_quantized_are_compared_by_matrix() -> None:
    low_bit = {name: TensorSpec.of(t) for name, t in matrices(scales=True).items()}
    plain = {name: TensorSpec.of(t) for name, t in matrices().items()}
    for method in (LowBitExpertsMethod(), CompressedTensorsWNA16MoEMethod()):
        check_same_layers(engine_model(method), low_bit)
        with pytest.raises(UserError, match=rf"only the engine: \['{PREFIX}\.0\.down_proj'"):
            check_same_layers(engine_model(method), plain)
    check_same_layers(engine_model(RepairedUnquantizedMethod()), plain)
    with pytest.raises(UserError, match=r"(?s)only the trainer: .*experts\.0\.down_proj.*mlp\[\.\]gate"):
        check_same_layers(engine_model(RepairedUnquantizedMethod()), low_bit)
