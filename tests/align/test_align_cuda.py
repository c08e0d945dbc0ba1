"""Level `model` on a GPU, as far as a CPU can show it: the PyTorch functions that stand for vLLM's operators against
vLLM's own CPU operators, its Triton kernel and float64; the gradients; and what the level says about itself.

tests/gpu/test_align_cuda.py compares the operators themselves.
"""

from __future__ import annotations

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkout import ROOT
from contract_checks import ATTENTION, attention_roundings, differing_shares, vllm_logits

from qarl.align import align_model, cuda
from qarl.align.model import resolve_level, unconfirmed
from qarl.kernels.cuda import contracts, flash, layer_ops
from qarl.trainer.policy import Policy

pytest.importorskip("vllm")
GPU = torch.device("cuda")
BF16_STEP = 2**-7
CONFIG = transformers.Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2,
)  # fmt: skip


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.fixture(scope="module")
def operators() -> Any:
    """vLLM's operators with the same names on a CPU. Its norms have the same rounding there."""
    if missing := layer_ops.unavailable():
        pytest.skip(missing)
    return torch.ops._C


def differing(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of outputs that differ, none by more than a BF16 step."""
    step = (found.float() - expected.float()).abs()
    assert bool((step <= BF16_STEP * expected.float().abs() + 1e-6).all())
    return float((step > 0).float().mean())


@pytest.mark.parametrize("size", [128, 1024, 4096])
def test_norms_round_as_vllms_do(operators: Any, size: int) -> None:
    x, residual, weight = random(200, size), random(200, size, seed=1, scale=3), random(size, seed=2)
    found = torch.empty_like(x)
    operators.rms_norm(found, x, weight, 1e-6)
    assert differing(layer_ops.rms_norm_reference(x, weight, 1e-6), found) < 1e-3
    rounded_twice = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert float((rounded_twice.bfloat16() * weight != found).float().mean()) > 0.1
    # vLLM's CPU operator takes the variance from the unrounded sum, so only sums that need no rounding are compared.
    for exact in (False, True):
        parts = [torch.randint(-64, 64, x.shape).bfloat16() for _ in range(2)] if exact else [x, residual]
        ours, total = layer_ops.add_rms_norm_reference(*parts, weight, 1e-6)
        normed, summed = (part.clone() for part in parts)
        operators.fused_add_rms_norm(normed, summed, weight, 1e-6)
        assert torch.equal(total, summed)
        assert differing(ours, normed) < (1e-3 if exact else 1e-1)


def test_a_residual_sum_plus_zeros_is_the_sum(operators: Any) -> None:
    """Why `fused_add_rms_norm` may be handed the sum and zeros instead of the two parts."""
    x, residual = (torch.randint(-64, 64, (50, 256)).bfloat16() for _ in range(2))  # sums that need no rounding
    weight = random(256, seed=2)
    parts, parts_residual = x.clone(), residual.clone()
    operators.fused_add_rms_norm(parts, parts_residual, weight, 1e-6)
    whole, zeros = parts_residual.clone(), torch.zeros_like(x)
    operators.fused_add_rms_norm(whole, zeros, weight, 1e-6)
    assert torch.equal(zeros, parts_residual)
    assert torch.equal(whole, parts)


def test_swiglu_rounds_as_vllms_does() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    both = random(100, 2 * 320, scale=3)
    gate, up = both.chunk(2, -1)
    assert torch.equal(layer_ops.silu_and_mul(gate, up), SiluAndMul.forward_native(both))
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    assert float((once != layer_ops.silu_and_mul(gate, up)).float().mean()) > 0.1


def test_the_rotary_formula_is_vllms_bit_for_bit(operators: Any) -> None:
    cache = torch.rand(600, 128, generator=torch.Generator().manual_seed(3)).mul(2).sub(1).bfloat16()
    positions = torch.randperm(600)
    x = random(600, 4, 128, scale=5)
    found = x.clone().flatten(1)
    operators.rotary_embedding(positions, found, x.clone().flatten(1), 128, cache, True)
    cosines, sines = cache[positions].chunk(2, -1)
    assert torch.equal(layer_ops.rotary_reference(x, cosines, sines).flatten(1), found)
    # transformers' formula on FP32 copies, which the trainer computes
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    doubled = [torch.cat((part, part), -1).float()[None] for part in (cosines, sines)]
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *doubled)
    assert torch.equal(theirs.bfloat16()[0].transpose(0, 1).flatten(1), found)


@pytest.mark.slow
def test_the_log_softmax_is_that_of_vllms_triton_kernel(tmp_path: Any) -> None:
    """`compute_token_logprobs` of Model Runner V2, in Triton's interpreter."""
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"
    script.write_text(
        "import sys, torch, triton, triton.language as tl, vllm.triton_utils as utils\n"
        "utils.triton, utils.tl = triton, tl\n"  # vLLM turns Triton off in a process without a GPU
        "from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs\n"
        "logits, tokens = torch.load(sys.argv[1])\n"
        "torch.save(compute_token_logprobs(logits.float() / 0.7, tokens[:, None])[:, 0], sys.argv[2])\n"
    )
    logits = random(6, 5000, scale=6)
    tokens = torch.tensor([int(row.argmax()) if i % 2 else i * 7 for i, row in enumerate(logits)])
    torch.save((logits, tokens), tmp_path / "in.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    found = torch.load(tmp_path / "out.pt")
    ours = layer_ops.log_softmax_reference(logits, tokens, 0.7)
    bits = 2**-22 * found.abs() + 1e-6  # two roundings of an FP32 number of this size
    assert bool(((ours - found).abs() <= bits).all())
    pytorchs = (logits.float() / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert bool(((pytorchs - found).abs() <= bits).all())  # what the contract says of the trainer's own


def attention_inputs(length: int, heads: int = 4, kv_heads: int = 2, size: int = 128) -> tuple[torch.Tensor, ...]:
    shapes = ((length, heads, size), (length, kv_heads, size), (length, kv_heads, size))
    return tuple(random(*shape, seed=i, scale=2.0 if i < 2 else 1.0) for i, shape in enumerate(shapes))


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("length", [1, 16, 128, 129, 400])
def test_flash_attention_against_float64(length: int) -> None:
    inputs, scale = attention_inputs(length), 128**-0.5
    found, exact = flash.flash_reference(*inputs, scale), exact_attention(*inputs, scale)
    error = (found.double() - exact).abs()
    assert float(error.max()) < 2e-2 and float(error.mean()) < 1e-3
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


def tiled_attention(inputs: tuple[torch.Tensor, ...], scale: float, tile: int, rounded: bool) -> torch.Tensor:
    """FlashAttention's formula with sums in float64, `rounded` or exact weights."""
    query, key, value = (tensor.double().transpose(0, 1) for tensor in inputs)
    key, value = (tensor.repeat_interleave(len(query) // len(tensor), 0) for tensor in (key, value))
    length = query.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(later, -torch.inf)
    largest = scores.new_full((len(query), length, 1), -1e300)
    divisor, output = torch.zeros_like(largest), torch.zeros_like(query)
    for start in reversed(range(0, length, tile)):
        part = scores[:, :, start : start + tile]
        before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, kept = (part - largest).exp(), (before - largest).exp()
        divisor = divisor * kept + weights.sum(-1, keepdim=True)
        weights = weights.float().bfloat16().double() if rounded else weights
        output = output * kept + weights @ value[:, start : start + tile]
    return (output / divisor).float().bfloat16().transpose(0, 1)


@pytest.mark.parametrize(
    ("tile", "rounded", "expected"),
    [(128, True, ATTENTION), (64, True, "the same, tiles of 64"), (128, False, "weights in FP32")],
)
def test_the_device_test_tells_roundings_of_attention_apart(tile: int, rounded: bool, expected: str) -> None:
    inputs = attention_inputs(333)
    shares = differing_shares(tiled_attention(inputs, 0.1, tile, rounded), attention_roundings(*inputs, 0.1))
    others = [share for name, share in shares.items() if name != expected]
    assert shares[expected] < 5e-3 and min(others) > 2e-2


def test_the_device_test_of_the_head_calls_vllms_method() -> None:
    hidden, weight = random(30, 256), random(512, 256, seed=1, scale=0.1)
    assert differing(vllm_logits(hidden, weight), F.linear(hidden, weight)) < 1e-2


@pytest.mark.parametrize("length", [5, 128, 300])
def test_a_row_of_a_prefill_is_a_decode_step_if_the_tiles_are_the_same(length: int) -> None:
    """What one split gives: neither later tokens nor other queries change a row's bits. With other tiles they change,
    which is why heads of 64 are left out of `flash.HEAD_SIZES`."""
    query, key, value = attention_inputs(length)
    prefill = flash.flash_reference(query, key, value, 0.1)
    other = 0
    for place in {0, length // 2, length - 1}:
        rows = slice(0, place + 1)
        step = flash.flash_reference(query[place : place + 1], key[rows], value[rows], 0.1)
        assert torch.equal(step[0], prefill[place])
        step = flash.flash_reference(query[place : place + 1], key[rows], value[rows], 0.1, tile=160)
        other += int((step[0] != prefill[place]).sum())
    assert (other > 0) == (length > flash.TILE)


def test_rows_of_a_pack_do_not_see_each_other() -> None:
    lengths = (3, 130, 1)
    inputs = attention_inputs(sum(lengths))
    found = flash.flash_attention(*inputs, 0.1, lengths)
    for row in zip(*(tensor.split(lengths) for tensor in (*inputs, found)), strict=True):
        assert torch.equal(flash.flash_attention(*row[:3], 0.1, (len(row[0]),)), row[3])


@pytest.mark.parametrize("lengths", [(1,), (16,), (17, 1, 40), (5, 160, 16, 3)], ids=str)
def test_pages_hold_every_token_of_their_row(lengths: tuple[int, ...]) -> None:
    table, slots = flash.pages(torch.tensor(lengths, dtype=torch.int32))
    assert table.dtype == torch.int32 and table.shape == (len(lengths), -(-max(lengths) // flash.PAGE))
    tensor = random(sum(lengths), 2, 8)
    paged = flash.into_pages(tensor, slots, int(table.max()) + 1)
    for pages, row in zip(table, tensor.split(lengths), strict=True):
        assert torch.equal(paged[pages].flatten(0, 1)[: len(row)], row)
    used = [pages[: -(-length // flash.PAGE)].tolist() for pages, length in zip(table, lengths, strict=True)]
    flat = [page for pages in used for page in pages]
    assert sorted(flat) == list(range(len(paged)))


def test_the_call_fits_vllms_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the arguments, and shapes of the pages, on a function with the signature of vLLM 0.24.0."""
    seen: dict[str, Any] = {}

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
        q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
    ):  # fmt: skip
        seen.update(locals())
        return q

    module = type(sys)("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    inputs = attention_inputs(20)
    assert flash.vllm_flash_attention(*inputs, 0.25, (17, 3)) is not None
    assert (seen["fa_version"], seen["num_splits"], seen["causal"], seen["softmax_scale"]) == (3, 1, True, 0.25)
    assert seen["cu_seqlens_q"].tolist() == [0, 17, 20] and seen["seqused_k"].tolist() == [17, 3]
    assert seen["block_table"].tolist() == [[0, 1], [2, 0]] and seen["k"].shape == (3, 16, 2, 128)
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (17, 17)


GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "norm": (
        lambda x, w: cuda._Norm.apply(x, w, 1e-6, True),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        (random(3, 7, 96, scale=2), random(96, seed=1)),
    ),
    "SwiGLU": (
        lambda gate, up: cuda._SiluAndMul.apply(gate, up),
        lambda gate, up: F.silu(gate) * up,
        (random(9, 80, scale=2), random(9, 80, seed=1)),
    ),
    "attention": (
        lambda q, k, v: cuda._Flash.apply(q, k, v, 0.2, (30, 12)),
        lambda q, k, v: torch.cat([exact_attention(*(t[rows] for t in (q, k, v)), 0.2)
                                   for rows in (slice(0, 30), slice(30, 42))]),
        attention_inputs(42, size=32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_float64(name: str) -> None:
    function, exact, given = GRADIENTS[name]
    ours = [tensor.clone().requires_grad_() for tensor in given]
    truth = [tensor.double().requires_grad_() for tensor in given]
    output = function(*ours)
    grad = random(*output.shape, seed=9)
    output.backward(grad)
    exact(*truth).backward(grad.double())
    for found, expected in zip(ours, truth, strict=True):
        assert found.grad is not None and expected.grad is not None and found.grad.dtype == torch.bfloat16
        assert float((found.grad.double() - expected.grad).norm() / expected.grad.norm()) < 6e-3


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
        return layer_ops.add_rms_norm_reference(states, residual, weight, 1e-6)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        states, residual = add(layer.input_layernorm.weight)
        q, k, v = (
            F.linear(states, getattr(attention, f"{name}_proj").weight).unflatten(-1, (-1, 32)) for name in "qkv"
        )
        q, k = norm(q, attention.q_norm.weight, 1e-6), norm(k, attention.k_norm.weight, 1e-6)
        q, k = (layer_ops.rotary_reference(x, cosines, sines) for x in (q, k))
        states = F.linear(flash.flash_reference(q, k, v, 32**-0.5).flatten(1), attention.o_proj.weight)
        states, residual = add(layer.post_attention_layernorm.weight)
        gate, up = (F.linear(states, getattr(mlp, f"{name}_proj").weight) for name in ("gate", "up"))
        states = F.linear(layer_ops.silu_and_mul_reference(gate, up), mlp.down_proj.weight)
    return F.linear(add(model.model.norm.weight)[0], model.lm_head.weight)


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


def test_cosines_and_sines_are_those_of_vllms_table() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    _, model = aligned()
    positions = torch.arange(40)[None]
    x = random(1, 40, 64)
    found, expected = model.model.rotary_emb(x, positions), Qwen3RotaryEmbedding(CONFIG)(x, positions)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, theirs)
    assert model.model.rotary_emb.turns[0].shape == (512, 16)


def test_vllms_modules_are_neither_read_nor_left_to_engines() -> None:
    """An engine's buffers cannot be read while it sleeps, and an engine must not get a table of this process's CPU."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    from qarl.kernels.cpu import rotary

    before = dict(_ROPE_DICT)
    engine = rotary.engine_rotary(CONFIG, 32)
    assert dict(_ROPE_DICT) == before
    expected = engine.cos_sin_cache.clone()
    engine.cos_sin_cache.fill_(float("nan"))
    found = rotary.computed_turns(engine, torch.device("cpu"))
    assert torch.equal(torch.cat(found, -1), expected) and found[0].dtype == torch.bfloat16


def confirmed_contracts() -> dict[str, contracts.Contract]:
    return {part: contract._replace(confirmed="gpu.json") for part, contract in contracts.CONTRACTS.items()}


def test_the_level_says_that_no_device_has_confirmed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(CONFIG)
    config.head_dim = 128
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert "unconfirmed: no GPU has confirmed" in str(report) and "fused_add_rms_norm" in str(report)
    assert report.limit_level == "linears"
    assert all(unconfirmed(*place, config, eager=True) is None for place in (("linears", "cuda"), ("model", "cpu")))
    done = confirmed_contracts()
    monkeypatch.setattr(contracts, "CONTRACTS", done | {"norm": contracts.CONTRACTS["norm"]})
    assert "rounds in rms_norm, so" in str(unconfirmed("model", "cuda", config, eager=False))
    monkeypatch.setattr(contracts, "CONTRACTS", done)
    report = align_model(transformers.Qwen3ForCausalLM(config).bfloat16(), "model", device=GPU)
    assert report.unconfirmed is None and report.limit_level == "model"


@pytest.mark.parametrize(
    ("size", "eager", "why"), [(64, False, "heads of 64"), (256, False, "heads of 256"), (96, True, "enforce_eager")]
)
def test_some_runs_promise_no_mismatch_on_a_confirmed_device(
    size: int, eager: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts, "CONTRACTS", confirmed_contracts())
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


def test_the_policy_on_a_cpu_keeps_its_limit() -> None:
    from qarl.quant.scheme import get_scheme

    policy = Policy(transformers.Qwen3ForCausalLM(CONFIG).bfloat16(), get_scheme("bf16"), (), align="model")
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

    given = contracts.ENGINE_ARGUMENTS
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
    policy = Policy(transformers.Qwen3ForCausalLM(CONFIG).bfloat16(), get_scheme("bf16"), (), align="model")
    policy.align = applied
    parts: Any = RunParts(policy, *[None] * 6)
    local.LocalTrainer(load_config(["config=quickstart.yaml"]), parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = llm_arguments(started[0])
    assert arguments["compilation_config"] == contracts.ENGINE_ARGUMENTS["compilation_config"]
    assert ("attention_config" in arguments) == one_split


def test_the_page_has_the_table_of_contracts() -> None:
    text = " ".join((ROOT / "docs" / "alignment_cuda.md").read_text().split())
    for part, contract in contracts.CONTRACTS.items():
        assert f"| {part} | `{contract.operator}` | {contract.rounds} | {contract.open} |" in text, part


def test_a_confirmed_contract_names_its_results() -> None:
    for contract in contracts.CONTRACTS.values():
        assert not contract.confirmed or (ROOT / "benchmarks" / "results" / contract.confirmed).is_file()
        file, _, function = contract.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text()


def test_a_contract_that_rounds_is_confirmed_by_a_test_of_its_rounding() -> None:
    """By comparing candidates. `log-softmax` rounds nothing."""
    tree = ast.parse((ROOT / "tests" / "gpu" / "test_align_cuda.py").read_text())
    called = {
        function.name: {node.func.id for node in ast.walk(function)
                        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        for function in tree.body if isinstance(function, ast.FunctionDef)
    }  # fmt: skip
    for part, contract in contracts.CONTRACTS.items():
        if part != "log-softmax":
            assert called[contract.test.partition("::")[2]] & {"compare", "attention_roundings"}, part
    assert "vllm_logits" in called["test_lm_head"]
