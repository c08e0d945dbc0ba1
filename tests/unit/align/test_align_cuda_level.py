"""Level `model` on a GPU, as far as a CPU can show it: the whole model with PyTorch functions for vLLM's operators, the
fallbacks, and what the level says about itself.

test_align_cuda.py has the operators one by one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkout import ROOT
from contract_checks import (
    flash_reference,
    rotary_reference,
    silu_and_mul_reference,
    stand_in_for_vllm,
)
from cpu_features import needs_vllm_cpu
from waits import Waits

from qarl.align import align_model, cuda, packed_attention
from qarl.align.applied_level import resolve_level, unconfirmed
from qarl.config.level import Level
from qarl.kernels import reference
from qarl.kernels.cuda import layer_ops
from qarl.trainer.policy import Policy

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)


GPU = torch.device("cuda")
CONFIG = transformers.Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2,
)  # fmt: skip


def aligned() -> tuple[Any, Any]:
    """(a random Qwen3 in BF16, the same at level `model` for a GPU)"""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(CONFIG).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
    other = copy.deepcopy(model)
    report = align_model(other, "model", device=GPU)
    assert report.level == "model"
    return model, other


def as_vllm_computes(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one row, operator by operator in the order of vLLM's Qwen3, where a norm adds the residual."""
    cosines, sines = (part[: len(tokens)] for part in model.model.rotary_emb.turns)
    states, residual = model.model.embed_tokens(tokens), None
    norm = reference.rms_norm

    def add(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return norm(states, weight, 1e-6), states
        return reference.add_rms_norm(states, residual, weight, 1e-6)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        states, residual = add(layer.input_layernorm.weight)
        q, k, v = (
            F.linear(states, getattr(attention, f"{name}_proj").weight).unflatten(-1, (-1, 32))
            for name in "qkv"
        )
        q, k = norm(q, attention.q_norm.weight, 1e-6), norm(k, attention.k_norm.weight, 1e-6)
        q, k = (rotary_reference(x, cosines, sines) for x in (q, k))
        states = F.linear(flash_reference(q, k, v, 32**-0.5).flatten(1), attention.o_proj.weight)
        states, residual = add(layer.post_attention_layernorm.weight)
        gate, up = (
            F.linear(states, getattr(mlp, f"{name}_proj").weight) for name in ("gate", "up")
        )
        states = F.linear(silu_and_mul_reference(gate, up), mlp.down_proj.weight)
    return F.linear(add(model.model.norm.weight)[0], model.lm_head.weight)


@needs_vllm_cpu
def test_the_aligned_model_runs_vllms_operators_in_vllms_order() -> None:
    _, model = aligned()
    tokens = torch.randint(0, 64, (200,))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
        assert torch.equal(logits, as_vllm_computes(model, tokens))


def test_every_norm_runs_the_engines_kernel() -> None:
    _, model = aligned()
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert len(norms) == 9 and all(isinstance(norm, cuda.CudaRMSNorm) for norm in norms)


@pytest.mark.parametrize(("width", "why"), [(60, "not of 60"), (16384, "up to 8192")])
def test_widths_without_a_norm_fall_back(width: int, why: str) -> None:
    config = copy.deepcopy(CONFIG)
    config.hidden_size = width
    applied = resolve_level(
        config, Level.MODEL, device_type="cuda", kernels=set(), capability=(9, 0)
    )
    assert applied.level == Level.LINEARS and why in "".join(applied.why_lower)


@needs_vllm_cpu
def test_packed_and_padded_rows_have_the_same_bits() -> None:
    _, model = aligned()
    rows = [torch.randint(0, 64, (n,)) for n in (9, 30)]
    with torch.no_grad():
        alone = [model(row[None]).logits[0] for row in rows]
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        packed = model(torch.cat(rows)[None], position_ids=positions, row_lengths=(9, 30)).logits[0]
        assert torch.equal(packed, torch.cat(alone))
        padded = torch.stack([F.pad(row, (0, 30 - len(row))) for row in rows])
        logits = model(padded, row_lengths=(9, 30)).logits
        assert torch.equal(logits[0, :9], alone[0]) and torch.equal(logits[1], alone[1])
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[0, :21] = 0
        with pytest.raises(ValueError, match="without attention_mask"):
            model(padded, attention_mask=mask)


@needs_vllm_cpu
@pytest.mark.parametrize("packed", [True, False])
def test_no_layer_waits_for_the_device(packed: bool) -> None:
    """Nor its backward. The places of padded rows' tokens are sent once for all layers."""
    _, model = aligned()
    lengths = (9, 30)
    ids = torch.randint(0, 64, (1, 39) if packed else (2, 30))
    inputs: dict[str, Any] = {"input_ids": ids}
    if packed:
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = positions[None]
    packed_attention.places_of_tokens.cache_clear()
    packed_attention._ends.cache_clear()
    with Waits("qarl/align/packed_attention.py:places_of_tokens") as waits:
        model(
            use_cache=False, row_lengths=lengths, **inputs, **packed_attention.no_mask(model)
        ).logits.sum().backward()
    assert not waits.waits
    assert waits.places["upload", "qarl/kernels/base.py:upload"] <= 1


def test_the_level_says_if_no_device_has_confirmed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(CONFIG)
    config.head_dim = 128
    files = [file for file in layer_ops.CONTRACTS.values() if file]
    assert files and all((ROOT / "benchmarks/results" / file).is_file() for file in files)
    monkeypatch.setattr(layer_ops, "CONTRACTS", dict.fromkeys(layer_ops.CONTRACTS, files[0]))
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert report.unconfirmed is None and report.limit_level == "model"
    monkeypatch.setattr(layer_ops, "CONTRACTS", layer_ops.CONTRACTS | {"silu_and_mul": ""})
    assert "computes in silu_and_mul, so" in str(
        unconfirmed(Level.MODEL, "cuda", config, eager=False)
    )
    assert all(
        unconfirmed(*place, config, eager=True) is None
        for place in ((Level.LINEARS, "cuda"), (Level.MODEL, "cpu"))
    )
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert "unconfirmed: no GPU has confirmed" in str(report) and report.limit_level == "linears"


@pytest.mark.parametrize(
    ("size", "eager", "why"),
    [(64, False, "heads of 64"), (192, False, "heads of 192"), (96, True, "enforce_eager")],
)
def test_some_runs_promise_no_mismatch_on_a_confirmed_device(
    size: int, eager: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ops, "CONTRACTS", dict.fromkeys(layer_ops.CONTRACTS, "gpu.json"))
    config = copy.deepcopy(CONFIG)
    config.head_dim = size
    report = align_model(
        transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU, eager=eager
    )
    assert (report.level, report.limit_level) == ("model", "linears")
    assert why in str(report) and "no GPU has confirmed" not in str(report)


@pytest.mark.parametrize(
    ("config", "device", "capability", "level", "why"),
    [
        (CONFIG, "cuda", (9, 0), "model", ""),
        (CONFIG, "cuda", None, "model", ""),
        (CONFIG, "cuda", (8, 0), "linears", "not for 8.0"),
        (CONFIG, "npu", None, "linears", "not for npu"),
        (
            transformers.Qwen3MoeConfig(num_hidden_layers=1),
            "cuda",
            None,
            "linears",
            "experts in BF16",
        ),
    ],
    ids=["hopper", "unknown", "ampere", "npu", "experts"],
)
def test_where_the_level_is_built(
    config: Any, device: str, capability: Any, level: str, why: str
) -> None:
    applied = resolve_level(
        config, Level.MODEL, device_type=device, kernels=set(), capability=capability
    )
    assert applied.level == level and why in "".join(applied.why_lower)
    applied = resolve_level(
        config, Level.EXACT, device_type=device, kernels=set(), capability=capability
    )
    assert applied.level == level and applied.why_lower


def test_vllm_takes_the_engines_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import AttentionConfig, CompilationConfig, CompilationMode
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from qarl.rollout.engine_config import GRAPHS, EngineConfig, llm_arguments
    from qarl.schemes import get_scheme

    compilation = CompilationConfig(**GRAPHS["compilation_config"])
    assert (
        compilation.mode == CompilationMode.NONE
        and compilation.cudagraph_mode.has_full_cudagraphs()
    )
    operators = layer_ops.ENGINE_ARGUMENTS
    attention = AttentionConfig(**operators["attention_config"])
    assert attention.backend is AttentionBackendEnum.CUSTOM
    priority = IrOpPriorityConfig(**operators["ir_op_priority"])
    assert priority.rms_norm == priority.fused_add_rms_norm == ["qarl"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for eager, asked in ((False, True), (True, True), (False, False)):
        config = EngineConfig("x", get_scheme("bf16"), (), 8, enforce_eager=eager, aligned=asked)
        arguments = llm_arguments(config)
        assert (operators.items() <= arguments.items()) == asked
        assert (GRAPHS.items() <= arguments.items()) == (asked and not eager)


@pytest.mark.parametrize(("applied", "one_split"), [(Level.LINEARS, False), (Level.MODEL, True)])
def test_the_engine_follows_the_level_that_applies(
    applied: Level, one_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts, or on another GPU than Hopper, one split would only cost speed. The config asks for `model`."""
    from qarl.config import load_config
    from qarl.rollout.engine_config import EngineConfig, llm_arguments
    from qarl.schemes import get_scheme
    from qarl.trainer import local
    from qarl.trainer.prepare import RunParts

    started: list[EngineConfig] = []
    monkeypatch.setattr(local, "RolloutEngine", started.append)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    policy = Policy(model, get_scheme("bf16"), (), align=Level.MODEL)
    policy.align = applied
    parts: Any = RunParts(policy, *[None] * 7)
    local.LocalTrainer(load_config(["config=quickstart.yaml"]), parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = llm_arguments(started[0])
    assert {key: arguments[key] for key in layer_ops.ENGINE_ARGUMENTS if key in arguments} == (
        layer_ops.ENGINE_ARGUMENTS if one_split else {}
    )
