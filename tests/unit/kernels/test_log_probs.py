"""Log-probs in blocks against the path that holds all logits, and both against float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from random_models import save_random_model
from torch import nn

import qarl.checks.activation_memory
from qarl.config.level import Level
from qarl.kernels import log_probs as kernel
from qarl.kernels.cpu import bf16_linear
from qarl.kernels.log_probs import (
    chosen_log_probs,
    log_probs_and_entropies,
    log_probs_of_logits,
    rows_at_a_time,
)
from qarl.kernels.sampling_masks import pack
from qarl.rollout.requests import RolloutBatch
from qarl.schemes import get_scheme
from qarl.trainer import policy as policy_module
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

TOKENS, HIDDEN, VOCABULARY = 300, 96, 1000


def operands(
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(dtype).requires_grad_()
    weight = (
        torch.randn(VOCABULARY, HIDDEN, generator=generator)
        .div(4)
        .bfloat16()
        .to(dtype)
        .requires_grad_()
    )
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, tokens, torch.randn(TOKENS, generator=generator)


def unfused(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, t: float) -> Any:
    return log_probs_of_logits(F.linear(hidden, weight), tokens, temperature=t)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [64, 70, 299, 300, 4096])
def test_same_bits_as_with_all_logits(rows: int, temperature: float) -> None:
    hidden, weight, tokens, grad = operands()
    expected, expected_top = unfused(hidden, weight, tokens, temperature)
    expected.backward(grad)
    mine = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    log_probs, top = chosen_log_probs(*mine, tokens, temperature=temperature, rows=rows)
    assert (
        log_probs.dtype == torch.float32
        and torch.equal(log_probs, expected)
        and torch.equal(top, expected_top)
    )
    log_probs.backward(grad)
    assert torch.equal(mine[0].grad, hidden.grad)
    assert mine[1].grad.dtype == torch.bfloat16
    if rows >= TOKENS:
        assert torch.equal(mine[1].grad, weight.grad)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [64, 300])
def test_entropies_are_torchs_and_log_probs_the_same_bits(rows: int, temperature: float) -> None:
    hidden, weight, tokens, _ = operands()
    log_probs, entropies = log_probs_and_entropies(
        hidden, weight, tokens, temperature=temperature, rows=rows
    )
    assert torch.equal(log_probs, unfused(hidden, weight, tokens, temperature)[0])
    exact = torch.distributions.Categorical(
        logits=F.linear(hidden, weight).double() / temperature
    ).entropy()
    assert float((entropies - exact).abs().max()) < 1e-5
    assert not log_probs.requires_grad and not entropies.requires_grad


@pytest.mark.parametrize("rows", [64, 300])
@pytest.mark.parametrize("vocabulary", [999, 997, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_the_weight_that_are_no_tokens(
    dtype: torch.dtype, vocabulary: int, rows: int
) -> None:
    """They are multiplied, but get neither probability nor gradient, whatever their values."""
    hidden, weight, tokens, grad = operands(dtype)
    tokens %= vocabulary
    with torch.no_grad():
        weight[vocabulary:] = 50.0
    cut = [hidden.detach().double(), weight.detach().double()[:vocabulary]]
    exact = [tensor.requires_grad_() for tensor in cut]
    logits = F.linear(*exact)
    rounded = F.linear(hidden, weight)[:, :vocabulary].double()
    logits = logits + (rounded - logits).detach()
    every = (logits / 0.7).log_softmax(-1)
    expected = every.gather(1, tokens[:, None])[:, 0]
    expected.backward(grad.double())
    chosen: Any = {"temperature": 0.7, "rows": rows, "vocabulary": vocabulary}
    log_probs, top = chosen_log_probs(hidden, weight, tokens, **chosen)
    log_probs.backward(grad)
    assert float((log_probs - expected).abs().max()) < 1e-5
    assert int(top.max()) < vocabulary
    assert not weight.grad[vocabulary:].count_nonzero()
    step = max(torch.finfo(dtype).eps, 1e-5)
    for gradient, known in (
        (hidden.grad, exact[0].grad),
        (weight.grad[:vocabulary], exact[1].grad),
    ):
        assert float((gradient - known).norm() / known.norm()) < step
    same, entropies = log_probs_and_entropies(hidden, weight, tokens, **chosen)
    assert torch.equal(same, log_probs)
    assert float((entropies + (every.exp() * every).sum(-1)).abs().max()) < 1e-5


def test_weight_gradient_is_as_near_to_float64() -> None:
    """Against the exact gradient of the rounded logits: one rounding of the sum, however many blocks."""
    hidden, weight, tokens, grad = operands()
    unfused(hidden, weight, tokens, 0.7)[0].backward(grad)
    blocks = weight.detach().clone().requires_grad_()
    chosen_log_probs(hidden.detach(), blocks, tokens, temperature=0.7, rows=64)[0].backward(grad)
    logits = F.linear(hidden, weight).detach().requires_grad_()
    log_probs_of_logits(logits, tokens, temperature=0.7)[0].backward(grad)
    exact = logits.grad.double().t() @ hidden.detach().double()
    error, theirs = (
        (gradient.double() - exact).norm() / exact.norm() for gradient in (blocks.grad, weight.grad)
    )
    assert error <= 1.001 * theirs < 3e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, TOKENS - 1, TOKENS])
def test_parts_of_rows_have_torchs_bits_and_a_gradient_as_near_to_float64(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, temperature: float
) -> None:
    monkeypatch.setattr(kernel, "_LOGITS_IN_CACHE", rows * VOCABULARY)
    hidden, weight, tokens, grad = operands()
    logits = F.linear(hidden, weight).detach().to(dtype).requires_grad_()
    mask = torch.rand(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.9
    mask.scatter_(1, tokens[:, None], True)
    assert kernel.rows_in_fp32(logits) == rows

    def of_torch(wide: torch.Tensor) -> torch.Tensor:
        scaled = (wide / temperature).masked_fill(~mask, -torch.inf)
        return scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    log_probs, top = log_probs_of_logits(logits, tokens, temperature=temperature, mask=pack(mask))
    expected = of_torch(logits.float())
    assert torch.equal(log_probs, expected)
    assert torch.equal(top, logits.float().masked_fill(~mask, -torch.inf).argmax(-1))
    (ours,) = torch.autograd.grad(log_probs, logits, grad)
    (theirs,) = torch.autograd.grad(expected, logits, grad)
    exact = logits.detach().double().requires_grad_()
    of_torch(exact).backward(grad.double())
    error, theirs_error = (
        (gradient.double() - exact.grad).norm() / exact.grad.norm() for gradient in (ours, theirs)
    )
    assert ours.dtype == dtype
    assert error <= 1.01 * theirs_error


def test_no_rows_have_no_log_probs() -> None:
    logits = torch.zeros(0, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    log_probs, top = log_probs_of_logits(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    log_probs.sum().backward()
    assert log_probs.shape == top.shape == (0,) and logits.grad.shape == logits.shape


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_bytes_for_each_logit_are_those_of_the_memory_estimate(
    monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(kernel, "_LOGITS_IN_CACHE", VOCABULARY)  # a row, whose FP32 hardly counts
    hidden, weight, tokens, grad = operands()
    rows = TOKENS // blocks
    with LiveBytes() as entropies:
        log_probs_and_entropies(hidden, weight, tokens, temperature=0.7, rows=rows)
    with LiveBytes() as forward:
        log_probs, _ = chosen_log_probs(hidden, weight, tokens, temperature=0.7, rows=rows)
    with LiveBytes() as backward:
        log_probs.backward(grad)
    packed = (
        weight.nbytes if bf16_linear.serves(weight) else 0
    )  # the operator's own copy, on a CPU with AMX
    bytes_per_logit = [
        (memory.peak - packed) / (rows * VOCABULARY) for memory in (entropies, forward, backward)
    ]
    assert bytes_per_logit[:2] == pytest.approx([2, 2], abs=0.2)
    if blocks == 1:
        assert bytes_per_logit[2] == pytest.approx(4, abs=0.3)
    else:
        assert 6 < bytes_per_logit[2] - 4 * HIDDEN / rows < 7


def test_blocks_are_whole_tiles_within_the_limit() -> None:
    assert rows_at_a_time(151936) == 832
    assert rows_at_a_time(10**9) == 64
    assert qarl.checks.activation_memory.LOGITS_AT_A_TIME == kernel.LOGITS_AT_A_TIME
    assert qarl.checks.activation_memory.LOGITS_IN_FP32 == kernel.LOGITS_IN_FP32


def response_batch() -> Batch:
    rollout = RolloutBatch(
        prompt_token_ids=[list(range(3, 9)), [10, 11], [12, 13, 14]],
        response_token_ids=[list(range(20, 50)), list(range(5, 25)), [40]],
        rollout_log_probs=[[-1.0] * 30, [-1.0] * 20, [-1.0]],
        finish_reasons=["stop"] * 3,
        weight_version=0,
    )
    return make_batch(rollout, torch.zeros(3), torch.zeros(3), pad_token_id=2)


class OtherLinear(nn.Linear):
    """A head with its own forward, as one from an adapter library."""


HEADS = [
    *(
        (family, nn.Linear(8, 1000, bias=False), True)
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe")
    ),
    *(
        (family, nn.Linear(8, 1000, bias=False), False)
        for family in ("gemma2", "cohere", "granite", "phi")
    ),
    ("qwen3", nn.Linear(8, 1000, bias=True), False),
    ("qwen3", OtherLinear(8, 1000, bias=False), False),
]


@pytest.mark.parametrize(("family", "head", "plain"), HEADS)
def test_only_a_plain_head_is_split(
    monkeypatch: pytest.MonkeyPatch, family: str, head: nn.Linear, plain: bool
) -> None:
    """In blocks the logits are hidden states times the head's weight: a cap, a scale or a bias would be lost."""
    monkeypatch.setattr(policy_module, "LOGITS_AT_A_TIME", 5000)
    config = SimpleNamespace(model_type=family)
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: head)
    policy: Any = object.__new__(Policy)
    policy.model = policy.called = model
    policy.fp32_head = False
    split = [policy.logits_in_blocks(positions) for positions in (1, 5, 6, 10**6)]
    assert split == [False, False, plain, plain]


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("align", ["linears", "model"])
def test_the_policy_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, align: str, tie: bool
) -> None:
    """Past the limit the policy goes in blocks: log-probs, top tokens and gradients of the body keep their bits."""
    from transformers import AutoModelForCausalLM

    folder = save_random_model(tmp_path / "model", tie=tie)
    results = []
    for limit in (kernel.LOGITS_AT_A_TIME, 100):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        policy = Policy(model, get_scheme("w4a16", 32), ("lm_head",), align=Level(align))
        monkeypatch.setattr(kernel, "LOGITS_AT_A_TIME", limit)
        monkeypatch.setattr(policy_module, "LOGITS_AT_A_TIME", limit)
        assert policy.logits_in_blocks(3 * 40) == (limit == 100)
        log_probs, top = policy.response_log_probs_and_top(
            response_batch(), slice(0, 3), temperature=0.7
        )
        log_probs.sum().backward()
        results.append((log_probs, top, {name: p.grad for name, p in model.named_parameters()}))
    (whole, top, grads), (blocks, blocks_top, blocks_grads) = results
    assert torch.equal(whole, blocks) and torch.equal(top, blocks_top)
    for name, grad in grads.items():
        if "embed_tokens" in name or "lm_head" in name:
            torch.testing.assert_close(blocks_grads[name], grad, rtol=2**-7, atol=1e-4)
        else:
            assert torch.equal(blocks_grads[name], grad), name
