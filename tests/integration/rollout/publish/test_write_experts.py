"""Where experts are written in the engine's model: which, where, and that vLLM would have stored the same bytes.
Modules of its names and shapes stand for vLLM's.

tests/gpu_stack/test_publish.py compares whole publishes into the locked vLLM with fresh loads."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.cpu import torch_linears
from qarl.kernels.int4 import CODES, SCALES, to_marlin
from qarl.rollout.publish import experts, writers
from qarl.rollout.publish.experts import UNCHANGED
from qarl.rollout.publish.manifest import TensorSpec, check_same_layers
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
        self.moe_config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(tp_rank=0, tp_size=1, use_ep=use_ep)
        )
        for name, shape in (("w13_weight", (2 * WIDTH, HIDDEN)), ("w2_weight", (HIDDEN, WIDTH))):
            self.register_parameter(
                name, nn.Parameter(torch.zeros(EXPERTS, *shape), requires_grad=False)
            )


def engine_model(method: Any, **sizes: Any) -> Any:
    """`mlp.experts` is vLLM's MoERunner, which has no parameters."""
    model: Any = nn.Module()
    routed = nn.ModuleDict({"routed_experts": RoutedExperts(method, **sizes)})
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": routed})})
    model.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    return model


def stacks(*, scales: bool = False, experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for name, shape in SHAPES.items():
        tensors[f"{name}.weight"] = torch.randn(experts, *shape)
        if scales:
            tensors[f"{name}.weight_scale"] = torch.randn(experts, shape[0], 1)
    return tensors


def plan_of(model: Any, tensors: dict[str, torch.Tensor], **arguments: Any) -> WritePlan:
    return WritePlan(
        model, None, {name: TensorSpec.of(t) for name, t in tensors.items()}, **arguments
    )


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
    assert [
        torch.equal(*pair) for pair in zip(method.processed, tensors.values(), strict=True)
    ] == [True, True]
    sent = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert sent.isdisjoint(
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    )


@pytest.mark.parametrize("same_bits", [False, True])
def test_prepared_fp8_stacks_are_not_the_senders_memory(
    monkeypatch: pytest.MonkeyPatch, same_bits: bool
) -> None:
    """A transport writes the next layer into its buffer, while the engine computes with this one."""
    monkeypatch.setattr(torch_linears, "_fp32_matmul_equals_scaled_mm", lambda columns: same_bits)
    tensors = {
        "weight": torch.randn(2, 16, 8).to(torch.float8_e4m3fn),
        "weight_scale": torch.rand(2, 16, 1),
    }
    prepared = torch_linears.TorchFP8Linear.prepare_stack(tensors)
    before = [(matrix.weight.clone(), matrix.scale.clone()) for matrix in prepared]
    for tensor in tensors.values():
        tensor.zero_()
    for matrix, (weight, scale) in zip(prepared, before, strict=True):
        assert torch.equal(matrix.weight.float(), weight.float()) and torch.equal(
            matrix.scale, scale
        )


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


def test_the_stacks_that_are_quantized_are_compared() -> None:
    low_bit = {name: TensorSpec.of(t) for name, t in stacks(scales=True).items()}
    plain = {name: TensorSpec.of(t) for name, t in stacks().items()}
    for method in (LowBitExpertsMethod(), CompressedTensorsWNA16MoEMethod()):
        check_same_layers(engine_model(method), low_bit)
        with pytest.raises(UserError, match=rf"only the engine: \['{DOWN}'"):
            check_same_layers(engine_model(method), plain)
    check_same_layers(engine_model(RepairedUnquantizedMethod()), plain)
    with pytest.raises(
        UserError, match=r"(?s)only the trainer: .*experts\.down_proj.*mlp\[\.\]gate"
    ):
        check_same_layers(engine_model(RepairedUnquantizedMethod()), low_bit)


CASES = [(method, backend) for method, (_, backends) in UNCHANGED.items() for backend in backends]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_is_on_cpu", lambda module: False)
    monkeypatch.setattr(experts, "as_vllm_loads", lambda config, modules: nullcontext())


def method_of(name: str, backend: str) -> Any:
    """An object of a class named as vLLM's, which counts its calls."""

    def process(self: Any, layer: Any) -> None:
        self.processed = getattr(self, "processed", 0) + 1

    made = type(name, (), {"process_weights_after_loading": process})()
    setattr(made, UNCHANGED[name.removeprefix("My")][0], SimpleNamespace(name=backend))
    return made


def model_of(method: Any, *, scales: bool, **sizes: Any) -> Any:
    model = engine_model(method, **sizes)
    routed = routed_of(model)
    for name, rows in (("w13", 2 * WIDTH), ("w2", HIDDEN)) if scales else ():
        routed.register_parameter(
            f"{name}_weight_scale", nn.Parameter(torch.zeros(EXPERTS, rows, 1))
        )
    return model


def routed_of(model: Any) -> Any:
    return model.get_submodule(f"{PREFIX}.routed_experts")


def stored(model: Any) -> dict[str, torch.Tensor]:
    return dict(routed_of(model).named_parameters())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_stacks_are_written_where_they_were(name: str, backend: str) -> None:
    scales = not name.startswith("Unquantized")
    method, tensors = method_of(name, backend), stacks(scales=scales)
    model = model_of(method, scales=scales)
    before = {leaf: tensor.data_ptr() for leaf, tensor in stored(model).items()}
    plan_of(model, tensors).write(tensors)
    assert method.processed == 1
    assert {leaf: tensor.data_ptr() for leaf, tensor in stored(model).items()} == before
    for leaf, tensor in stored(model).items():
        owner = GATE_UP if leaf.startswith("w13") else DOWN
        assert torch.equal(tensor, tensors[f"{owner}.{leaf.partition('_')[2]}"])


def padded(model: Any) -> None:
    routed_of(model).w2_weight.data = torch.zeros(EXPERTS, HIDDEN, 2 * WIDTH)


def strided(model: Any) -> None:
    routed_of(model).w13_weight.data = torch.zeros(EXPERTS, HIDDEN, 2 * WIDTH).mT


FP8 = "CompressedTensorsW8A8Fp8MoEMethod"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "backend", "change", "sizes", "direct"),
    [
        (FP8, "FLASHINFER_CUTLASS", None, {}, True),  # gate and up change places
        (FP8, "MARLIN", None, {}, True),
        (f"My{FP8}", "TRITON", None, {}, True),  # a class of which nothing is known
        (FP8, "TRITON", padded, {}, True),
        (FP8, "TRITON", strided, {}, True),
        (
            FP8,
            "TRITON",
            lambda model: setattr(routed_of(model), "w13_bias", nn.Parameter(torch.ones(4))),
            {},
            True,
        ),
        (FP8, "TRITON", None, {"use_ep": True}, True),
        (FP8, "TRITON", None, {}, False),
    ],
)
def test_other_layouts_are_reloaded(
    name: str, backend: str, change: Any, sizes: Any, direct: bool
) -> None:
    model = model_of(method_of(name, backend), scales=True, **sizes)
    if change:
        change(model)
    plan = plan_of(model, stacks(scales=True), direct=direct)
    assert plan.by_owner[GATE_UP].stored is None


def marlin_method(**settings: Any) -> Any:
    made = type("CompressedTensorsWNA16MoEMethod", (), {})()
    made.wna16_backend, made.symmetric, made.actorder = SimpleNamespace(name="MARLIN"), True, None
    made.__dict__.update(settings)
    return made


def int4_stacks(groups: tuple[int, int] = (2, 2), rows: int = 64) -> dict[str, torch.Tensor]:
    """gate_up_proj [E, `rows`, 32] and down_proj [E, 64, 32] in `groups` groups."""
    torch.manual_seed(0)
    tensors = {}
    for name, n, count in zip((GATE_UP, DOWN), (rows, 64), groups, strict=True):
        tensors[f"{name}.weight_packed"] = torch.randint(
            -(2**31), 2**31 - 1, (EXPERTS, n, 4), dtype=torch.int32
        )
        tensors[f"{name}.weight_scale"] = torch.randn(EXPERTS, n, count).bfloat16()
    return tensors


def marlin_model(method: Any, tensors: dict[str, torch.Tensor]) -> Any:
    model = engine_model(method)
    routed = routed_of(model)
    del routed.w13_weight, routed.w2_weight
    for stack, owner in (("w13", GATE_UP), ("w2", DOWN)):
        packed, scale = tensors[f"{owner}.weight_packed"], tensors[f"{owner}.weight_scale"]
        shape = (EXPERTS, packed.shape[2] // 2, 2 * packed.shape[1])
        routed.register_parameter(
            f"{stack}_weight_packed", nn.Parameter(torch.zeros(shape).int(), requires_grad=False)
        )
        routed.register_parameter(
            f"{stack}_weight_scale", nn.Parameter(torch.zeros_like(scale.mT.contiguous()))
        )
        routed.register_parameter(f"{stack}_weight_shape", nn.Parameter(torch.zeros(EXPERTS, 2)))
    routed.workspace = torch.ones(4, dtype=torch.int32)
    return model


@pytest.mark.usefixtures("as_on_a_gpu")
def test_marlins_layout_is_written_in_place() -> None:
    tensors = int4_stacks()
    model = marlin_model(marlin_method(input_dtype=torch.bfloat16), tensors)
    before = {leaf: tensor.data_ptr() for leaf, tensor in stored(model).items()}
    plan_of(model, tensors).write(tensors)
    assert {leaf: tensor.data_ptr() for leaf, tensor in stored(model).items()} == before
    for stack, owner in (("w13", GATE_UP), ("w2", DOWN)):
        made = to_marlin(
            {leaf: tensors[f"{owner}.{leaf}"] for leaf in ("weight_packed", "weight_scale")}
        )
        assert torch.equal(stored(model)[f"{stack}_weight_packed"], made[CODES])
        assert torch.equal(stored(model)[f"{stack}_weight_scale"], made[SCALES])
    assert not routed_of(model).workspace.any()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"input_dtype": torch.int8}, int4_stacks()),
        ({"marlin_input_dtype": torch.float8_e4m3fn}, int4_stacks()),
        ({"symmetric": False}, int4_stacks()),
        ({"actorder": "group"}, int4_stacks()),
        ({"wna16_backend": SimpleNamespace(name="TRITON")}, int4_stacks()),
        (
            {},
            int4_stacks(groups=(2, 1)),
        ),  # vLLM would permute the scales of gate and up as those of down
        ({}, int4_stacks(rows=96)),
    ],
)
def test_other_int4_experts_are_reloaded(
    settings: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    plan = plan_of(marlin_model(marlin_method(**settings), tensors), tensors)
    assert plan.by_owner[GATE_UP].stored is None


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_vllm_stores_what_it_has_loaded(name: str, backend: str) -> None:
    """vLLM's own conversion returns the tensors that it got."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, unquantized

    stacks: Any = [torch.randn(4, 6, 8), torch.randn(4, 8, 3)]
    layer: Any = SimpleNamespace(weight_block_size=None)
    made: Any
    if name == FP8:
        stacks = [stack.to(torch.float8_e4m3fn) for stack in stacks] + [
            torch.randn(4, 6, 1),
            torch.randn(4, 8, 1),
        ]
        convert: Any = fp8.convert_to_fp8_moe_kernel_format
        made = convert(fp8.Fp8MoeBackend[backend], layer, *stacks, None, None)
    elif name.startswith("Unquantized"):
        which = unquantized.UnquantizedMoeBackend[backend]
        made = unquantized.convert_to_unquantized_kernel_format(which, layer, *stacks)
    else:
        convert = getattr(
            int8, "convert_to_int8_moe_kernel_format", None
        )  # vLLM 0.24 converts nothing
        made = convert(int8.Int8MoeBackend[backend], *stacks) if convert else stacks
    assert [stack.data_ptr() for stack in made] == [stack.data_ptr() for stack in stacks]


def test_without_a_known_cut_vllms_loader_gets_each_matrix() -> None:
    def load(parameter: Any, matrix: torch.Tensor, name: str, shard: str, expert: int) -> None:
        assert parameter is getattr(layer, name)
        parameter[expert, WIDTH if shard == "w3" else 0 :][: len(matrix)] = matrix

    layer: Any = RoutedExperts(None)
    for parameter in layer.parameters():
        parameter.weight_loader = load
    experts.reload(layer, [{"weight": stack} for stack in stacks().values()], None)
    assert all(
        torch.equal(*pair) for pair in zip(layer.parameters(), stacks().values(), strict=True)
    )
