"""Tokens kept by top-k and top-p: hand-worked sets, vLLM's own function on ties, log-probs and gradients."""

from __future__ import annotations

import json
import math

import pytest
import torch
from checkout import ROOT

from qarl.kernels.logprob import (
    Truncation,
    chosen_kept,
    chosen_log_probs,
    find_kept,
    kept_tokens,
    log_probs_of_logits,
    pack,
    packed_width,
    unpack,
)

INF = math.inf


def sets(kept: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in kept]


# Logits whose probabilities are 1/2, 1/4, 1/8, 1/16, 1/16.
HALVES = torch.tensor([[5.0, 4.0, 3.0, 2.0, 2.0]]) * math.log(2)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(), [0, 1, 2, 3, 4]),
        (Truncation(top_p=1.0, top_k=0), [0, 1, 2, 3, 4]),
        (Truncation(top_k=5), [0, 1, 2, 3, 4]),
        (Truncation(top_k=50), [0, 1, 2, 3, 4]),
        (Truncation(top_k=1), [0]),
        (Truncation(top_k=3), [0, 1, 2]),
        (Truncation(top_k=4), [0, 1, 2, 3, 4]),  # both tokens at the fourth place
        (Truncation(top_p=0.4), [0]),
        (Truncation(top_p=0.6), [0, 1]),
        (Truncation(top_p=0.8), [0, 1, 2]),
        (Truncation(top_p=1e-6), [0]),
        (Truncation(top_p=0.9, top_k=2), [0, 1]),  # 2/3, 1/3: the second is within 0.9
        (Truncation(top_p=0.6, top_k=2), [0]),  # 2/3 alone is over 0.6
    ],
)
def test_kept_tokens_by_hand(truncation, expected):
    assert sets(kept_tokens(HALVES, truncation)) == [expected]
    assert truncation.active == (truncation.top_p < 1 or truncation.top_k > 0)


def test_of_two_likeliest_tokens_the_tiniest_top_p_keeps_one():
    kept = kept_tokens(torch.zeros(3, 7), Truncation(top_p=1e-6))
    assert kept.sum(1).tolist() == [1, 1, 1]


CASES = [(top_p, top_k) for top_p in (1.0, 0.999, 0.9, 0.5, 0.05) for top_k in (0, 1, 5, 20, 333) if top_p < 1 or top_k]


@pytest.mark.vllm
@pytest.mark.parametrize(("top_p", "top_k"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_set_is_vllms_and_so_are_the_log_probs(top_p, top_k, temperature):
    """On BF16 logits, which tie all over; vocabulary sizes that are no multiples of 8."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    for vocabulary in (333, 4099):
        generator = torch.Generator().manual_seed(vocabulary)
        logits = (torch.randn(24, vocabulary, generator=generator) * 4).bfloat16()
        logits[0] = 0  # all tokens alike
        scaled = logits.float().div_(torch.full((24, 1), temperature))
        k = torch.full((24,), top_k, dtype=torch.int32) if 0 < top_k < vocabulary else None
        p = torch.full((24,), top_p) if top_p < 1 else None
        masked = apply_top_k_top_p_pytorch(scaled.clone(), k, p, allow_cpu_sync=True)
        truncation = Truncation(top_p, top_k)
        assert torch.equal(kept_tokens(scaled, truncation), masked > -INF)

        tokens = masked.argmax(-1)
        packed, outside = find_kept(logits, tokens, truncation, temperature=temperature)
        assert not outside.any()
        log_probs, _ = log_probs_of_logits(logits, tokens, temperature=temperature, kept=packed)
        theirs = masked.log_softmax(-1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0]
        assert torch.equal(log_probs, theirs)


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 333])
def test_packing_is_a_bit_a_token(vocabulary):
    kept = torch.rand(5, vocabulary, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = pack(kept)
    assert packed.dtype == torch.uint8 and packed.shape == (5, packed_width(vocabulary))
    assert torch.equal(unpack(packed, vocabulary), kept)


def test_the_lowest_bit_comes_first():
    assert pack(torch.tensor([[True, False, False, True, False, False, False, False, True]])).tolist() == [[9, 1]]
    assert packed_width(151_936) == 18_992


def test_log_probs_over_the_kept_tokens_by_hand():
    kept = pack(torch.tensor([[True, True, False, False, False], [True, False, False, True, True]]))
    logits, tokens = HALVES.expand(2, 5), torch.tensor([1, 3])
    log_probs, _ = log_probs_of_logits(logits, tokens, temperature=1.0, kept=kept)
    assert log_probs.tolist() == pytest.approx([math.log(1 / 3), math.log(1 / 10)], abs=1e-6)


def test_a_sampled_token_outside_is_kept_and_counted():
    tokens = torch.tensor([4])
    packed, outside = find_kept(HALVES, tokens, Truncation(top_p=0.4), temperature=1.0)
    assert outside.tolist() == [True] and sets(unpack(packed, 5)) == [[0, 4]]
    log_probs, _ = log_probs_of_logits(HALVES, tokens, temperature=1.0, kept=packed)
    assert log_probs.item() == pytest.approx(math.log(1 / 9), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("truncation", [Truncation(0.5), Truncation(0.9), Truncation(top_k=20), Truncation(0.9, 20)])
def test_logits_that_are_off_by_rounding_lose_no_sampled_token(truncation, temperature):
    """As at level `model` beside AMX tiles, only at most of the logits: tokens at the edge of a set change sides, and
    those that were sampled stay, with finite log-probs and gradients."""
    generator = torch.Generator().manual_seed(3)
    engine = (torch.randn(4000, 300, generator=generator) * 2).bfloat16()
    steps = torch.randint(-1, 2, engine.shape, generator=generator)
    trainer = (engine.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)
    allowed = kept_tokens(engine.float() / temperature, truncation)
    theirs = (engine.float() / temperature).masked_fill(~allowed, -INF).log_softmax(-1)
    tokens = theirs.exp().multinomial(1, generator=generator)[:, 0]
    packed, outside = find_kept(trainer, tokens, truncation, temperature=temperature)
    mine = kept_tokens(trainer.float() / temperature, truncation)
    assert outside.any() and torch.equal(outside, ~mine.gather(1, tokens[:, None])[:, 0])
    leaf = trainer.detach().requires_grad_()
    log_probs, _ = log_probs_of_logits(leaf, tokens, temperature=temperature, kept=packed)
    assert log_probs.isfinite().all()
    log_probs.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert (log_probs - theirs.gather(1, tokens[:, None])[:, 0]).abs().mean() < 0.05


def test_the_measured_table():
    """Written by scripts/top_p_mismatch.py on a CPU with AMX tiles."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "top_p_cpu.json").read_text())["rows"]
    kinds = {row["kind"] for row in rows}
    assert {"top_p 0.5", "top_p 0.9", "top_k 20", "top_p 0.9, top_k 20, temperature 0.7"} <= kinds
    assert {(r["model"], r["scheme"], r["level"], r["kind"]) for r in rows} == {
        (model, scheme, level, kind)
        for model in ("trained", "random")
        for scheme in ("bf16", "w4a16")
        for level in ("model", "exact")
        for kind in kinds
    }
    for row in rows:
        assert row["finite"] and row["ratio_abs_dev_max"] == row["token_change_max"] == 0, row
        assert row["mean"] <= row["limit"] and (row["level"] == "model" or row["max"] == row["outside"] == 0), row
    assert sum(row["outside"] for row in rows) > 0 and max(row["plain_mean"] for row in rows) > 0.5


def test_the_temperature_comes_first():
    """At a temperature of 1/2 probabilities are 16 : 4 : 1 : 1/4 : 1/4, the first 74%."""
    assert find_kept(HALVES, torch.tensor([0]), Truncation(top_p=0.7), temperature=0.5)[0].tolist() == [[1]]
    assert find_kept(HALVES, torch.tensor([0]), Truncation(top_p=0.7), temperature=1.0)[0].tolist() == [[3]]


@pytest.mark.parametrize("rows", [None, 17, 100])
def test_the_gradient_over_the_kept_tokens_against_float64(rows):
    """hidden and lm_head in float64 with the sets of the BF16 pass; blocks and the whole agree."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(60, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(301, 32, generator=generator) / 2).bfloat16().requires_grad_()
    tokens, weights = torch.randint(301, (60,), generator=generator), torch.randn(60, generator=generator)
    packed, outside = chosen_kept(hidden, weight, tokens, Truncation(top_p=0.8, top_k=40), temperature=0.7)
    assert 0 < int(outside.sum()) < 60
    log_probs, _ = chosen_log_probs(hidden, weight, tokens, temperature=0.7, rows=rows, kept=packed)
    assert log_probs.isfinite().all()
    ours = torch.autograd.grad((log_probs * weights).sum(), (hidden, weight))

    hidden64, weight64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = (hidden64 @ weight64.t()) / 0.7
    logits = logits.masked_fill(~unpack(packed, 301), -INF)
    reference = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    theirs = torch.autograd.grad((reference * weights).sum(), (hidden64, weight64))
    assert (log_probs - reference).abs().max() < 0.1  # the logits were rounded to BF16
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.double() - exact).norm() <= 0.02 * exact.norm()


def test_without_a_mask_nothing_changes():
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(2)).bfloat16()
    tokens = torch.arange(9)
    everything = pack(torch.ones(9, 33, dtype=torch.bool))
    plain, over_all = (log_probs_of_logits(logits, tokens, temperature=0.9, kept=k)[0] for k in (None, everything))
    assert torch.equal(plain, over_all)
