"""QuantExperts against a float64 loop over experts, its bytes against compressed-tensors', and the conversion of a
mixture-of-experts model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors_rule import PRESETS, compressed_tensors_compress
from expert_cases import exact, off
from kernels_by_scheme import experts_kernels
from random_models import save_random_model
from same_bytes import same_bytes
from torch import nn

from qarl.align.levels import bf16_experts
from qarl.errors import UserError
from qarl.quant import (
    QuantExperts,
    get_scheme,
    invalidate_quantized,
    packed_state_dict,
    quantize_model,
)
from qarl.quant.convert import linear_shapes, select_linears
from qarl.quant.experts import STACKS, ExpertsInOneCopy, stacked, unstacked, unstacked_shapes
from qarl.schemes import UNQUANTIZED

LOW_BIT = ("w4a16", "w8a8", "fp8")
SCHEMES = (*LOW_BIT, "bf16")
KERNELS = [(scheme, kernel.name) for scheme in SCHEMES for kernel in experts_kernels(scheme)]
GROUP = 32
EXPERTS, HIDDEN, INTERMEDIATE = 5, 96, 64


def make_experts(seed: int = 0) -> Any:
    """transformers' own experts, in BF16."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    torch.manual_seed(seed)
    experts = Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        experts.gate_up_proj.normal_(std=HIDDEN**-0.5)
        experts.down_proj.normal_(std=INTERMEDIATE**-0.5)
    return experts


def make_layer(scheme: str = "w4a16", seed: int = 0, **options: Any) -> QuantExperts:
    return QuantExperts(
        make_experts(seed), get_scheme(scheme, GROUP), qualified_name="mlp.experts", **options
    )


ROUTINGS: dict[str, list[list[int]]] = {
    "one has no token, one has one": [[0, 2], [2, 0], [4, 2], [0, 2], [2, 0], [3, 2], [0, 4]],
    "all tokens to two": [[3, 1]] * 9,
    "top-k 1": [[0], [4], [4], [2], [4]],
    "one token": [[4, 0]],
    "one token, top-k 1": [[2]],
    "every expert": [[4, 2, 0, 1, 3], [0, 1, 2, 3, 4]],
    "many tokens": [[(3 * t) % 5, (3 * t + 1 + t % 4) % 5] for t in range(200)],
}


def multiplied(layer: QuantExperts, leaf: str) -> torch.Tensor:
    """float64 [E, N, K] of one stack, each matrix as compressed-tensors restores it; W4A16 rounds to BF16."""
    stack = layer.quantized()[leaf]
    if not layer.scheme.quantized:
        return stack.tensors["weight"].double()
    w4a16 = compressed_tensors_compress(torch.ones(32, GROUP).bfloat16(), "w4a16", GROUP)[1]
    named = dict(stack.named())

    def restored(matrix: str) -> torch.Tensor:
        parts = {
            name.rpartition(".")[2]: tensor
            for name, tensor in named.items()
            if name.startswith(f"{matrix}.")
        }
        if "weight" in parts:
            return parts["weight"].double() * parts["weight_scale"].double()
        return PRESETS["w4a16"][1].decompress(parts, w4a16)["weight"].double()

    of_expert = [
        [f"mlp.experts.{expert}.{matrix}" for matrix in STACKS[leaf]] for expert in range(EXPERTS)
    ]
    return torch.stack([torch.cat([restored(matrix) for matrix in names]) for names in of_expert])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("scheme", "kernel"), KERNELS)
def test_forward_and_all_gradients_against_a_float64_loop_over_experts(
    scheme: str, kernel: str, routing: str
) -> None:
    """In norm: 0.6% of the output, 1% of each gradient. BF16 rounds an element by at most 0.4%, some times in a row.
    2% of the routing weights' gradients: each is a sum over a token's outputs, whose terms cancel."""
    try:
        layer, ids = make_layer(scheme, kernel=kernel), torch.tensor(ROUTINGS[routing])
    except UserError as error:
        pytest.skip(str(error))  # this machine cannot run the kernel; the error says why
    x = (
        torch.randn(len(ids), HIDDEN)
        .mul(torch.randn(len(ids), 1).exp())
        .bfloat16()
        .requires_grad_()
    )
    weights = torch.rand(ids.shape).add(0.1).bfloat16().requires_grad_()
    grad = torch.randn(len(ids), HIDDEN).bfloat16()
    y = layer(x, ids, weights)
    y.backward(grad)

    inputs = [t.detach().double().requires_grad_() for t in (x, weights)]
    stacks = [multiplied(layer, leaf).requires_grad_() for leaf in ("gate_up_proj", "down_proj")]
    expected = exact(scheme, inputs[0], inputs[1], ids, *stacks)
    expected.backward(grad.double())
    assert y.dtype == torch.bfloat16 and off(y, expected) < 0.006
    for tensor, other in zip(
        (x, weights, layer.gate_up_proj, layer.down_proj), (*inputs, *stacks), strict=True
    ):
        assert (
            tensor.grad is not None
            and other.grad is not None
            and tensor.grad.dtype == torch.bfloat16
        )
        assert off(tensor.grad, other.grad) < (0.02 if tensor is weights else 0.01)
    idle = [expert for expert in range(EXPERTS) if expert not in ids]
    for stack in (layer.gate_up_proj, layer.down_proj):
        assert stack.grad is not None and not stack.grad[idle].any()


@pytest.mark.parametrize(("scheme", "kernel"), [case for case in KERNELS if case[0] != "bf16"])
def test_frozen_experts_have_the_same_bits_from_the_published_tensors_alone(
    scheme: str, kernel: str
) -> None:
    try:
        layer = make_layer(scheme, kernel=kernel)
    except UserError as error:
        pytest.skip(str(error))  # this machine cannot run the kernel; the error says why
    inputs = (
        torch.randn(7, HIDDEN).bfloat16().requires_grad_(),
        torch.rand(7, 2).bfloat16().requires_grad_(),
    )

    def results() -> list[torch.Tensor]:
        y = layer(inputs[0], torch.tensor(ROUTINGS["one has no token, one has one"]), inputs[1])
        return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]

    before = results()
    published = {leaf: stack.tensors for leaf, stack in layer.quantized().items()}
    layer.freeze()
    assert isinstance(layer.low_bit(), ExpertsInOneCopy), "a second copy stays"
    for leaf, stack in layer.quantized().items():
        assert all(
            same_bytes(stack.tensors[name], tensor) for name, tensor in published[leaf].items()
        )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results(), before, strict=True))


@pytest.mark.parametrize("scheme", LOW_BIT)
def test_bytes_are_those_of_each_matrix_compressed_alone_by_compressed_tensors(scheme: str) -> None:
    layer = make_layer(scheme)
    with torch.no_grad():
        layer.gate_up_proj[1, :INTERMEDIATE] *= 100  # a scale of gate must not reach up
        layer.down_proj[2] = 0
    tensors = {
        name: tensor for stack in layer.quantized().values() for name, tensor in stack.named()
    }
    for expert in range(EXPERTS):
        gate, up = layer.gate_up_proj[expert].detach().chunk(2)
        down = layer.down_proj[expert].detach()
        for matrix, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            theirs = compressed_tensors_compress(weight.contiguous(), scheme, GROUP)[0]
            for leaf, tensor in theirs.items():
                tensor = tensor.float() if leaf == "weight_scale" and scheme != "w4a16" else tensor
                assert same_bytes(tensors.pop(f"mlp.experts.{expert}.{matrix}.{leaf}"), tensor)
    assert not tensors


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_once_per_update_and_again_after_it(scheme: str) -> None:
    layer = make_layer(scheme)
    x, ids, weights = (
        torch.randn(4, HIDDEN).bfloat16(),
        torch.tensor([[0, 1]] * 4),
        torch.full((4, 2), 0.5),
    )
    before = layer(x, ids, weights)
    made = layer._low_bit
    assert torch.equal(layer(x, ids, weights), before) and layer._low_bit is made
    for leaf in ("gate_up_proj", "down_proj"):
        with torch.no_grad():
            layer.get_parameter(leaf)[0, 0] += 3
        assert layer.stale
        after = layer(x, ids, weights)
        assert not torch.equal(after, before) and layer._low_bit is not made
        before, made = after, layer._low_bit
    layer.down_proj.data.mul_(2)
    assert not layer.stale
    invalidate_quantized(layer)
    assert not torch.equal(layer(x, ids, weights), before)
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach().clone())
    assert layer.stale
    assert copy.deepcopy(layer)._low_bit is None


def test_what_cannot_be_multiplied_is_refused_by_name() -> None:
    x, ids, weights = torch.randn(2, HIDDEN), torch.tensor([[0, 1]] * 2), torch.full((2, 2), 0.5)
    with pytest.raises(UserError, match=r"mlp\.experts got torch\.float32"):
        make_layer()(x, ids, weights)
    with pytest.raises(UserError, match="no kernel of experts multiplies int4"):
        make_layer("w4a8")
    for change, words in (("has_bias", "has_bias=True"), ("act_fn", "activation GELU")):
        experts = make_experts()
        setattr(experts, change, nn.GELU() if change == "act_fn" else True)
        with pytest.raises(UserError, match=words):
            QuantExperts(experts, get_scheme("w4a16", GROUP), qualified_name="mlp.experts")
    layer = make_layer()
    with torch.no_grad():
        layer.down_proj[3, 0, 0] = torch.nan
    with pytest.raises(
        UserError, match=r"1 of the \d+ values of .*mlp\.experts\.down_proj are NaN"
    ):
        layer.quantized()


def load(folder: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_random_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


@pytest.mark.parametrize("scheme", LOW_BIT)
def test_the_model_is_converted_and_published_matrix_by_matrix(folder: Any, scheme: str) -> None:
    model, plain = load(folder), load(folder)
    keys = list(model.state_dict())
    report = quantize_model(model, scheme=scheme, group_size=GROUP)
    assert list(model.state_dict()) == keys
    assert (
        len(report.quantized) == 2 * 4
        and list(report.skipped) == ["lm_head"]
        and not report.unmatched_ignore
    )
    assert list(report.experts) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert "8 linears and the experts of 2 layers" in str(report)
    assert isinstance(model.model.layers[0].mlp.experts, QuantExperts)
    published = dict(packed_state_dict(model))
    unaligned = dict(packed_state_dict(plain, scheme=get_scheme(scheme, GROUP)))
    assert published.keys() == unaligned.keys()
    for name, tensor in published.items():
        assert same_bytes(tensor, unaligned[name])
    quantized = {
        name.removesuffix(".weight_scale") for name in published if name.endswith("_scale")
    }
    assert (
        len(quantized) == 2 * (4 + 3 * 4) and "model.layers.1.mlp.experts.3.down_proj" in quantized
    )
    assert published["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert not [name for name in published if name.endswith(("gate_up_proj", "experts.down_proj"))]


def test_bf16_is_published_under_the_names_that_save_pretrained_writes(folder: Any) -> None:
    from safetensors.torch import load_file

    saved, model = load_file(folder / "model.safetensors"), load(folder)
    for published in (packed_state_dict(model), packed_state_dict(model, scheme=UNQUANTIZED)):
        tensors = dict(published)
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())
    aligned = bf16_experts(load(folder), None)
    for name, experts in aligned.items():
        model.set_submodule(name, experts)
    assert dict(packed_state_dict(model)).keys() == saved.keys()
    assert all(layer.stale for layer in aligned.values()), (
        "a kernel got the weights, which FSDP2 may have sharded"
    )
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert unstacked_shapes(shapes) == {name: tuple(t.shape) for name, t in saved.items()}
    parts = dict(unstacked(model.state_dict().items()))
    parts["model.layers.0.mlp.experts.2.up_proj.weight"].fill_(7)
    assert (model.model.layers[0].mlp.experts.gate_up_proj[2, 64:] == 7).all(), "parts are views"


def test_the_layers_experts_are_ignored_together_or_not_at_all(folder: Any) -> None:
    model = load(folder)
    ignore = ("lm_head", "re:model[.]layers[.]0[.]mlp[.]experts[.]", "model.layers.1.mlp.gate")
    report = quantize_model(model, scheme="w4a16", group_size=GROUP, ignore=ignore)
    assert list(report.experts) == ["model.layers.1.mlp.experts"] and len(report.skipped) == 1 + 12
    assert "left alone: model.layers.0.mlp.experts.*.gate_proj (in quant.ignore)" in str(report)
    published = dict(packed_state_dict(model))
    assert published["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.1.mlp.experts.3.up_proj.weight_packed" in published
    split = ("lm_head", "model.layers.1.mlp.experts.2.down_proj")
    with pytest.raises(UserError, match=r"some of the experts in 1 layers") as caught:
        quantize_model(load(folder), scheme="w4a16", group_size=GROUP, ignore=split)
    assert "model.layers.1.mlp.experts.2.down_proj" in str(caught.value)


def test_routers_and_gates_of_shared_experts_are_never_quantized() -> None:
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    selected, skipped = select_linears(model, get_scheme("w4a16", GROUP), ())
    assert skipped == {"model.layers.0.mlp.shared_expert_gate": "routes tokens"}
    assert set(select_linears(model, get_scheme("bf16"), ())[1].values()) == {"scheme bf16"}
    with pytest.raises(UserError, match="it is a list of names"):
        quantize_model(model, ignore="lm_head")
    assert len(selected) == 4 + 3 * 4 + 3 + 1 and not any(
        name.endswith("gate") for name in selected
    )
    assert linear_shapes(model)["model.layers.0.mlp.experts.3.down_proj"] == (64, 32)
    with pytest.raises(UserError, match=r"experts\.0\.down_proj has shape \[64, 32\]"):
        select_linears(model, get_scheme("w4a16", 64), ())


def test_stacks_are_in_the_order_of_the_experts_numbers() -> None:
    """Files list names as text, so that expert 10 comes before expert 2."""
    matrices = {
        f"mlp.experts.{expert}.{matrix}.weight": torch.full((1, 1), float(expert))
        for expert in range(11)
        for matrix in ("gate_proj", "up_proj", "down_proj")
    }
    stacks = dict(stacked(sorted(matrices.items(), key=lambda item: item[0])))
    numbers = torch.arange(11.0)[:, None, None]
    assert torch.equal(stacks["mlp.experts.gate_up_proj.weight"], numbers.expand(11, 2, 1))
    assert torch.equal(stacks["mlp.experts.down_proj.weight"], numbers)
