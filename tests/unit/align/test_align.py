"""Alignment levels: operator by operator against the engine's own, gradients against float64, fallbacks."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from cpu_features import needs_engine_attention
from random_models import save_random_model
from torch.nn.modules.module import register_module_forward_hook

from qarl.align import align_model
from qarl.align.applied_level import resolve_level
from qarl.align.cpu import AlignedAttention, AlignedRMSNorm, _Turn, add_residual, align_module
from qarl.align.router import recorded_routing, replayed_routing
from qarl.config.level import Level
from qarl.kernels.reference import ReferenceW4A16Linear
from qarl.kernels.registry import Choice
from qarl.quant import QuantLinear, quantize_model

FAMILIES = ["qwen2", "qwen3", "llama"]


def load(folder: Path, level: str = "linears") -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    align_model(model, level)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_random_model(root / family, family) for family in (*FAMILIES, "qwen3_moe")}


def vllm_layer(make: Any) -> Any:
    """A layer of vLLM's own outside an engine: its constructors ask for the current config."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return make()


@needs_engine_attention
@pytest.mark.parametrize(
    ("size", "eps"), [(32, 1e-6), (128, 1e-6), (1000, 1e-6), (128, 1e-5), (128, 0.1)]
)
def test_norms_and_residual_equal_the_engines_over_many_additions(size, eps):
    """`RMSNorm` of vLLM with a residual, fed eight outputs one after the other, as eight half layers would."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from vllm.model_executor.layers.layernorm import RMSNorm

    torch.manual_seed(size)
    theirs = vllm_layer(lambda: RMSNorm(size, eps=eps, dtype=torch.bfloat16))
    ours = Qwen3RMSNorm(size, eps=eps).bfloat16()
    ours.weight.data.normal_()
    theirs.weight.data.copy_(ours.weight.data)
    align_module(ours, AlignedRMSNorm)
    residual = torch.randn(40, size).bfloat16()
    hidden_states: torch.Tensor = residual
    with torch.no_grad():
        assert torch.equal(ours(residual), theirs.forward_native(residual.clone()))
        for i in range(8):
            output = (torch.randn(40, size) * 4.0 ** (i - 4)).bfloat16()
            hidden_states = add_residual(output, hidden_states)
            expected, residual = theirs.forward_native(output.clone(), residual.clone())
            assert torch.equal(ours(hidden_states), expected)
            assert torch.equal(hidden_states.bfloat16(), residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 3, 7), (1, 70, 1000), (1, 513, 128), (3, 700, 4, 32)]
)
def test_gradients_of_a_norm_equal_float64(shape, dtype):
    """The last two shapes have several blocks of rows, of which the last is smaller."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(len(shape))
    ours = Qwen3RMSNorm(shape[-1], eps=1e-3).bfloat16()
    ours.weight.data.normal_()
    align_module(ours, AlignedRMSNorm)
    x, grad = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).bfloat16()
    ours(x).backward(grad)
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, ours.weight))
    (weight64 * x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-3)).backward(grad.double())
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(ours.weight.grad.double(), weight64.grad, rtol=2**-8, atol=1e-5)


def test_a_residual_passes_its_gradient_to_both_operands():
    output, hidden = (
        torch.randn(3, 5).bfloat16().requires_grad_(),
        torch.randn(3, 5).requires_grad_(),
    )
    grad = torch.randn(3, 5)
    add_residual(output, hidden).backward(grad)
    assert torch.equal(hidden.grad, grad) and torch.equal(output.grad, grad.bfloat16())


@needs_engine_attention
@pytest.mark.parametrize("rope_type", ["default", "llama3"])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_rotary_embedding_equals_the_engines(rope_type, head_dim):
    """The operator with rows of cosines and sines instead of vLLM's table, and transformers' own formula with BF16
    cosines and sines in FP32, against vLLM's module; and the operator's gradients against float64."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 500000.0}
    if rope_type == "llama3":
        parameters |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        parameters |= {"original_max_position_embeddings": 1024}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )
    torch.manual_seed(0)
    positions = torch.randperm(8192)[:600]
    query, key = torch.randn(600, 4, head_dim).bfloat16(), torch.randn(600, 2, head_dim).bfloat16()
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    ours = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos.float(), sin.float()
    )
    rope = vllm_layer(
        lambda: get_rope(head_dim, 8192, rope_parameters=parameters, dtype=torch.bfloat16)
    )
    theirs = rope.forward_cpu(positions, query.clone().flatten(1), key.clone().flatten(1))
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine.bfloat16()[0].transpose(0, 1).flatten(1), expected)
    pairs = [tensor.unflatten(0, (2, 300)).requires_grad_() for tensor in (query, key)]
    by_operator = _Turn.apply(*pairs, *(turns.unflatten(1, (2, 300))[0] for turns in (cos, sin)))
    for mine, expected in zip(by_operator, theirs, strict=True):
        assert torch.equal(mine.flatten(0, 1).flatten(1), expected)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key)]
    by_formula = apply_rotary_pos_emb(
        *(t.transpose(0, 1)[None] for t in exact), cos.double(), sin.double()
    )
    for mine, formula, pair, wanted in zip(by_operator, by_formula, pairs, exact, strict=True):
        grad = torch.randn(mine.shape).bfloat16()
        mine.backward(grad, retain_graph=True)
        formula.backward(grad.double().flatten(0, 1).transpose(0, 1)[None])
        torch.testing.assert_close(
            pair.grad.flatten(0, 1).double(), wanted.grad, rtol=2**-8, atol=1e-6
        )


def unaligned_twin(layer: Any) -> Any:
    """transformers' own unaligned layer in float64, eager: its norms compute in FP32 whatever the dtype."""
    twin = copy.deepcopy(layer).double()
    for module in twin.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config)
            module.config._attn_implementation = module.config._experts_implementation = "eager"
    return twin


def of_one_layer(layer: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(layers=[layer]))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_gradients_of_an_aligned_layer_match_float64(folders, family):
    """Relative error of each gradient, in norm, at most 2^-6: a few BF16 roundings of relative size 2^-9 each. Experts
    are those that the aligned router chose."""
    model, plain = load(folders[family], "model"), load(folders[family])
    layer, truth = model.model.layers[1], unaligned_twin(plain.model.layers[1])
    torch.manual_seed(3)
    hidden = torch.randn(2, 40, 128).bfloat16().float().requires_grad_()
    grad = torch.randn(2, 40, 128).bfloat16()
    cos, sin = plain.model.rotary_emb(hidden.bfloat16(), torch.arange(40)[None])
    with recorded_routing(of_one_layer(layer)) as record:
        output = layer(hidden, attention_mask=None, position_embeddings=(cos, sin))
    output.backward(grad.float())
    hidden64 = hidden.detach().double().requires_grad_()
    mask = torch.full((40, 40), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    routing = record.experts() if family == "qwen3_moe" else torch.empty(0)
    with replayed_routing(of_one_layer(truth), routing):
        expected = truth(
            hidden64, attention_mask=mask, position_embeddings=(cos.double(), sin.double())
        )
    expected.backward(grad.double())
    tensors = {"output": output, "hidden": hidden.grad} | {
        n: p.grad for n, p in layer.named_parameters()
    }
    wanted = {"output": expected, "hidden": hidden64.grad} | {
        n: p.grad for n, p in truth.named_parameters()
    }
    assert tensors.keys() == wanted.keys() and len(tensors) > 10
    for name, value in wanted.items():
        assert (tensors[name].double() - value).norm() <= 2**-6 * value.norm(), name


@needs_engine_attention
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
def test_an_aligned_attention_passes_the_arguments_of_transformers(
    folders, family, training, monkeypatch
):
    """Everything but queries, keys and values, which transformers' class has not rounded."""
    calls: list[tuple[Any, ...]] = []

    def spy(module, query, key, value, mask, scaling, dropout=0.0, **options):
        calls.append(
            (module, [t.shape for t in (query, key, value)], mask, scaling, dropout, options)
        )
        return query.transpose(1, 2).bfloat16(), None

    monkeypatch.setattr("qarl.align.cpu.engine_attention", spy)
    transformers.AttentionInterface.register("spy", spy)
    for level in ("model", "off"):
        model = load(folders[family], level).train(training)
        attention = model.model.layers[0].self_attn
        attention.attention_dropout = 0.25
        attention.config._attn_implementation = "spy"
        hidden = torch.randn(2, 5, 128).bfloat16()
        turns = model.model.rotary_emb(hidden, torch.arange(5)[None])
        attention(
            hidden,
            position_embeddings=turns,
            attention_mask=None,
            position_ids=7,
            row_lengths=(5, 5),
        )
    (ours, *mine), (_, *theirs) = calls
    assert isinstance(ours, AlignedAttention) and mine == theirs and mine[3] == 0.25 * training


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keys_and_class_names_stay(folders, family):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.bfloat16)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    classes = [type(module).__name__ for module in model.modules()]
    keys = list(model.state_dict())
    report = align_model(model, "model")
    norms = sum("norm" in name.rsplit(".", 1)[-1] for name, _ in model.named_modules())
    assert sum(report.replaced.values()) == 2 + norms + 2
    assert list(model.state_dict()) == keys
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert [type(module).__name__ for module in model.modules()] == classes
    assert isinstance(model.model.layers[0], type(load(folders[family]).model.layers[0]))
    model.load_state_dict(load(folders[family]).state_dict())


@pytest.mark.parametrize("align_first", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(folders, align_first):
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folders["qwen3"], dtype=torch.bfloat16
        )
        quantize_model(model, scheme="w4a16", group_size=32)
        if align_first:
            align_model(model, "model")
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if not align_first:
            align_model(model, "model")
        calls = []
        handle = register_module_forward_hook(
            lambda module, *_: (
                calls.append(module) if type(module).__name__ == "Qwen3Attention" else None
            )
        )
        torch.manual_seed(0)
        model(input_ids=torch.randint(0, 64, (3, 20)), use_cache=False).logits.float().logsumexp(
            -1
        ).sum().backward()
        handle.remove()
        assert len(calls) == 2 * (1 + checkpointing)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) > 20 and all(torch.equal(plain[name], recomputed[name]) for name in plain)


SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA = transformers.LlamaConfig(**SIZES, **HEADS)
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WORKERS = "model: rollout.tensor_model_parallel_size=2: each worker"
# Config, dtype, the asked level, workers, the level that is applied, and why.
FALLBACKS: dict[str, tuple[Any, torch.dtype, str, int, str, str]] = {
    "family": (
        transformers.MistralConfig(**SIZES, **HEADS),
        torch.bfloat16,
        "exact",
        1,
        "linears",
        "not for mistral",
    ),
    "FP32": (LLAMA, torch.float32, "model", 1, "linears", "float32"),
    "off": (LLAMA, torch.bfloat16, "off", 1, "off", ""),
    "linears": (LLAMA, torch.bfloat16, "linears", 2, "linears", ""),
    "two workers": (LLAMA, torch.bfloat16, "model", 2, "linears", WORKERS),
    "two workers at exact": (LLAMA, torch.bfloat16, "exact", 2, "linears", WORKERS),
}


def tiny(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("case", FALLBACKS)
def test_what_is_not_built_falls_back_and_says_why(case):
    config, dtype, asked, workers, level, why = FALLBACKS[case]
    model = tiny(config, dtype)
    classes = [type(module) for module in model.modules()]
    alignment = align_model(model, asked, workers=workers)
    assert [type(module) for module in model.modules()] == classes and alignment.replaced == {}
    assert (alignment.asked, alignment.level) == (asked, level) and bool(alignment.why_lower) == (
        asked != level
    )
    assert why in str(alignment) and ("fell back to linears" in str(alignment)) == (asked != level)


def test_a_level_is_resolved_without_a_model():
    windows = transformers.Qwen2Config(**SIZES, **HEADS, **WINDOWS)
    applied = resolve_level(windows, Level.MODEL, device_type="cpu", kernels=set())
    assert applied.level == "linears" and "not for sliding windows" in applied.why_lower[0]
    for asked in (Level.MODEL, Level.EXACT):
        applied = resolve_level(LLAMA, asked, device_type="cuda", kernels=set(), workers=2)
        assert applied.level == "linears" and "each worker" in applied.why_lower[-1]


@needs_engine_attention
def test_exact_falls_back_to_model_where_an_operator_is_not_the_engines():
    alignment = align_model(tiny(transformers.LlamaConfig(**SIZES, **HEADS, head_dim=24)), "exact")
    assert (
        alignment.level == "model"
        and "head size 24" in str(alignment)
        and "fell back to model" in str(alignment)
    )
    model = tiny(LLAMA)
    quantize_model(model, scheme="w4a16", group_size=32)
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, QuantLinear)
    layer.choice = Choice(ReferenceW4A16Linear, ())
    alignment = align_model(model, "exact")
    assert alignment.level == "model" and "reference" in str(alignment)
    assert align_model(tiny(LLAMA), "model").level == "exact"
