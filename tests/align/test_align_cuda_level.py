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
from contract_checks import add_rms_norm_reference, rotary_reference
from cpu_features import needs_vllm_cpu

from qarl.align import align_model, cuda
from qarl.align.model import resolve_level, unconfirmed
from qarl.kernels.cuda import layer_ops
from qarl.trainer.policy import Policy

pytest.importorskip("vllm")
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


@needs_vllm_cpu
def test_the_aligned_model_is_the_same_function() -> None:
    plain, model = aligned()
    keys = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == keys
    tokens = torch.randint(0, 64, (2, 50))
    ours, theirs = model(tokens).logits, plain(tokens).logits
    assert float((ours - theirs).detach().float().norm() / theirs.detach().float().norm()) < 0.02
    for out in (ours, theirs):
        out.float().logsumexp(-1).sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert float((mine.grad - other.grad).float().norm() / other.grad.float().norm()) < 0.1


def as_vllm_computes(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one row, operator by operator in the order of vLLM's Qwen3, where a norm adds the residual."""
    cosines, sines = (part[: len(tokens)] for part in model.model.rotary_emb.turns)
    states, residual = model.model.embed_tokens(tokens), None
    norm = layer_ops.rms_norm_reference

    def add(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return norm(states, weight, 1e-6), states
        return add_rms_norm_reference(states, residual, weight, 1e-6)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        states, residual = add(layer.input_layernorm.weight)
        q, k, v = (
            F.linear(states, getattr(attention, f"{name}_proj").weight).unflatten(-1, (-1, 32)) for name in "qkv"
        )
        q, k = norm(q, attention.q_norm.weight, 1e-6), norm(k, attention.k_norm.weight, 1e-6)
        q, k = (rotary_reference(x, cosines, sines) for x in (q, k))
        states = F.linear(layer_ops.flash_reference(q, k, v, 32**-0.5).flatten(1), attention.o_proj.weight)
        states, residual = add(layer.post_attention_layernorm.weight)
        gate, up = (F.linear(states, getattr(mlp, f"{name}_proj").weight) for name in ("gate", "up"))
        states = F.linear(layer_ops.silu_and_mul_reference(gate, up), mlp.down_proj.weight)
    return F.linear(add(model.model.norm.weight)[0], model.lm_head.weight)


@needs_vllm_cpu
def test_the_aligned_model_runs_vllms_operators_in_vllms_order() -> None:
    _, model = aligned()
    tokens = torch.randint(0, 64, (200,))
    with torch.no_grad():
        found = model(tokens[None]).logits[0]
        assert torch.equal(found, as_vllm_computes(model, tokens))


def test_the_first_norm_has_no_residual_and_all_others_do() -> None:
    _, model = aligned()
    after_sum = {name: norm.after_sum for name, norm in model.named_modules() if isinstance(norm, cuda.CudaRMSNorm)}
    first = {"model.layers.0.input_layernorm"} | {f"model.layers.{i}.self_attn.{n}_norm" for i in (0, 1) for n in "qk"}
    assert {name for name, found in after_sum.items() if not found} == first
    assert len(after_sum) == 9


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
        found = model(padded, row_lengths=(9, 30)).logits
        assert torch.equal(found[0, :9], alone[0]) and torch.equal(found[1], alone[1])
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[0, :21] = 0
        with pytest.raises(ValueError, match="without attention_mask"):
            model(padded, attention_mask=mask)


@needs_vllm_cpu
def test_cosines_and_sines_are_those_of_vllms_table() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    _, model = aligned()
    positions = torch.arange(40)[None]
    x = torch.zeros(1, 40, 64, dtype=torch.bfloat16)
    found, expected = model.model.rotary_emb(x, positions), Qwen3RotaryEmbedding(CONFIG)(x, positions)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs)
    assert model.model.rotary_emb.turns[0].shape == (512, 16)


@needs_vllm_cpu
def test_vllms_modules_are_neither_read_nor_left_to_engines() -> None:
    """An engine's buffers cannot be read while it sleeps, and an engine must not get a table of this process's CPU."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    from qarl.kernels.cpu import layer_ops as cpu_ops

    before = dict(_ROPE_DICT)
    engine = cpu_ops.engine_rotary(CONFIG, 32)
    assert dict(_ROPE_DICT) == before
    expected = engine.cos_sin_cache.clone()
    engine.cos_sin_cache.fill_(float("nan"))
    found = cpu_ops.computed_turns(engine, torch.device("cpu"))
    assert torch.equal(torch.cat(found, -1), expected) and found[0].dtype == torch.bfloat16


def confirmed_contracts() -> dict[str, layer_ops.Contract]:
    return {part: contract._replace(confirmed="gpu.json") for part, contract in layer_ops.CONTRACTS.items()}


def test_the_level_says_that_no_device_has_confirmed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(CONFIG)
    config.head_dim = 128
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert "unconfirmed: no GPU has confirmed" in str(report) and "fused_add_rms_norm" in str(report)
    assert report.limit_level == "linears"
    assert all(unconfirmed(*place, config, eager=True) is None for place in (("linears", "cuda"), ("model", "cpu")))
    done = confirmed_contracts()
    monkeypatch.setattr(layer_ops, "CONTRACTS", done | {"norm": layer_ops.CONTRACTS["norm"]})
    assert "rounds in rms_norm, so" in str(unconfirmed("model", "cuda", config, eager=False))
    monkeypatch.setattr(layer_ops, "CONTRACTS", done)
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert report.unconfirmed is None and report.limit_level == "model"


@pytest.mark.parametrize(
    ("size", "eager", "why"), [(64, False, "heads of 64"), (256, False, "heads of 256"), (96, True, "enforce_eager")]
)
def test_some_runs_promise_no_mismatch_on_a_confirmed_device(
    size: int, eager: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ops, "CONTRACTS", confirmed_contracts())
    config = copy.deepcopy(CONFIG)
    config.head_dim = size
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU, eager=eager)
    assert (report.level, report.limit_level) == ("model", "linears")
    assert why in str(report) and "no GPU has confirmed" not in str(report)


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_policy_hands_over_whether_the_engine_has_graphs(
    asked: bool | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qarl.align.model import AlignReport
    from qarl.config import load_config
    from qarl.trainer import policy

    seen: list[bool] = []

    def align(model: Any, level: str, *, eager: bool) -> AlignReport:
        seen.append(eager)
        return AlignReport(level, level, {})

    monkeypatch.setattr(policy, "align_model", align)
    transformers.Qwen3ForCausalLM(CONFIG).bfloat16().save_pretrained(tmp_path)
    eager = [] if asked is None else [f"rollout.enforce_eager={str(asked).lower()}"]
    given = ["config=quickstart.yaml", f"model.path={tmp_path}", "quant.scheme=bf16", *eager]
    Policy.load(load_config(given))
    assert seen == [asked is True]


def built() -> Any:
    return transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


def test_the_policy_on_a_cpu_keeps_its_limit() -> None:
    from qarl.quant.scheme import get_scheme

    policy = Policy(built(), get_scheme("bf16"), (), align="model")
    assert (policy.align, policy.limit_level) == ("model", "model")


@pytest.mark.parametrize(
    ("capability", "level", "why"),
    [((9, 0), "model", ""), (None, "model", ""), ((8, 0), "linears", "not for 8.0"), ((10, 0), "linears", "10.0")],
)
def test_where_the_level_is_built(capability: tuple[int, int] | None, level: str, why: str) -> None:
    found, reasons = resolve_level(CONFIG, "model", device_type="cuda", kernels=set(), capability=capability)
    assert found == level and why in "".join(reasons)
    found, reasons = resolve_level(CONFIG, "exact", device_type="cuda", kernels=set(), capability=capability)
    assert found == level and reasons


def test_mixtures_of_experts_and_other_devices_fall_back() -> None:
    moe = transformers.Qwen3MoeConfig(num_hidden_layers=1)
    found, reasons = resolve_level(moe, "model", device_type="cuda", kernels=set())
    assert found == "linears" and "mixtures of experts" in reasons[0]
    found, reasons = resolve_level(CONFIG, "model", device_type="npu", kernels=set())
    assert found == "linears" and "not for npu" in reasons[0]


def test_vllm_takes_the_engines_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import AttentionConfig, CompilationConfig, CompilationMode

    from qarl.quant.scheme import get_scheme
    from qarl.rollout.engine_config import EngineConfig, llm_arguments

    given = layer_ops.ENGINE_ARGUMENTS
    compilation = CompilationConfig(**given["compilation_config"])
    assert compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode.has_full_cudagraphs()
    assert AttentionConfig(**given["attention_config"]).flash_attn_max_num_splits_for_cuda_graph == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for eager, asked in ((False, True), (True, True), (False, False)):
        config = EngineConfig("x", get_scheme("bf16"), (), 8, enforce_eager=eager, aligned=asked)
        arguments = llm_arguments(config)
        assert (given.items() <= arguments.items()) == (asked and not eager)


@pytest.mark.parametrize(("applied", "one_split"), [("linears", False), ("model", True)])
def test_the_engine_follows_the_level_that_applies(
    applied: str, one_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts, or on another GPU than Hopper, one split would only cost speed. The config asks for `model`."""
    from qarl.config import load_config
    from qarl.quant.scheme import get_scheme
    from qarl.rollout.engine_config import EngineConfig, llm_arguments
    from qarl.trainer import local
    from qarl.trainer.setup import RunParts

    started: list[EngineConfig] = []
    monkeypatch.setattr(local, "RolloutEngine", started.append)
    policy = Policy(built(), get_scheme("bf16"), (), align="model")
    policy.align = applied
    parts: Any = RunParts(policy, *[None] * 6)
    local.LocalTrainer(load_config(["config=quickstart.yaml"]), parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = llm_arguments(started[0])
    assert {key: arguments[key] for key in layer_ops.ENGINE_ARGUMENTS if key in arguments} == (
        layer_ops.ENGINE_ARGUMENTS if one_split else {}
    )


def test_the_page_has_the_table_of_contracts() -> None:
    text = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    for part, contract in layer_ops.CONTRACTS.items():
        assert f"| {part} | `{contract.operator}` | {contract.rounds} | {contract.open} |" in text, part


def test_a_confirmed_contract_names_its_results() -> None:
    for contract in layer_ops.CONTRACTS.values():
        assert not contract.confirmed or (ROOT / "benchmarks" / "results" / contract.confirmed).is_file()
        file, _, function = contract.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text()
