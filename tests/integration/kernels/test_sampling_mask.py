"""Tokens kept by top-k and top-p: hand-worked sets, vLLM's own function on ties, log-probs and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.kernels.log_probs import LogitsInBlocks, chosen_log_probs, log_probs_of_logits
from qarl.kernels.sampling_masks import (
    Truncation,
    pack,
    packed_sampling_mask,
    packed_width,
    sampling_mask,
    unpack,
)

INF = math.inf


def sets(mask: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask]


# Logits whose probabilities are 1/2, 1/4, 1/8, 1/16, 1/16.
HALVES = torch.tensor([[5.0, 4.0, 3.0, 2.0, 2.0]]) * math.log(2)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(), [0, 1, 2, 3, 4]),
        (Truncation(top_k=50), [0, 1, 2, 3, 4]),
        (Truncation(top_k=3), [0, 1, 2]),
        (Truncation(top_k=4), [0, 1, 2, 3, 4]),  # both tokens at the fourth place
        (Truncation(top_p=0.6), [0, 1]),
        (Truncation(top_p=0.8), [0, 1, 2]),
        (Truncation(top_p=1e-6), [0]),
        (Truncation(top_p=0.9, top_k=2), [0, 1]),  # 2/3, 1/3: the second is within 0.9
        (Truncation(top_p=0.6, top_k=2), [0]),  # 2/3 alone is over 0.6
    ],
)
def test_kept_tokens_by_hand(truncation, expected):
    assert sets(sampling_mask(HALVES, truncation)) == [expected]
    assert truncation.active == (truncation.top_p < 1 or truncation.top_k > 0)


CASES = [
    (top_p, top_k)
    for top_p in (1.0, 0.999, 0.9, 0.5, 0.05)
    for top_k in (0, 1, 5, 20, 333)
    if top_p < 1 or top_k
]


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
        assert torch.equal(sampling_mask(scaled, truncation), masked > -INF)

        tokens = masked.argmax(-1)
        packed, outside = packed_sampling_mask(logits, tokens, truncation, temperature=temperature)
        assert not outside.any()
        log_probs, _ = log_probs_of_logits(logits, tokens, temperature=temperature, mask=packed)
        theirs = masked.log_softmax(-1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0]
        assert torch.equal(log_probs, theirs)


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 333])
def test_packing_is_a_bit_a_token(vocabulary):
    mask = torch.rand(5, vocabulary, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = pack(mask)
    assert packed.dtype == torch.uint8 and packed.shape == (5, packed_width(vocabulary))
    assert torch.equal(unpack(packed, vocabulary), mask)


def test_a_sampled_token_outside_is_kept_and_counted():
    tokens = torch.tensor([4])
    packed, outside = packed_sampling_mask(HALVES, tokens, Truncation(top_p=0.4), temperature=1.0)
    assert outside.tolist() == [True] and sets(unpack(packed, 5)) == [[0, 4]]
    log_probs, _ = log_probs_of_logits(HALVES, tokens, temperature=1.0, mask=packed)
    assert log_probs.item() == pytest.approx(math.log(1 / 9), abs=1e-6)


@pytest.mark.parametrize("rows", [None, 17, 100])
def test_the_gradient_over_the_kept_tokens_against_float64(rows):
    """hidden and lm_head in float64 with the sets of the BF16 pass; blocks and the whole agree."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(60, 32, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(301, 32, generator=generator) / 2).bfloat16().requires_grad_()
    tokens, weights = (
        torch.randint(301, (60,), generator=generator),
        torch.randn(60, generator=generator),
    )
    logits = LogitsInBlocks(hidden, weight)
    packed, outside = logits.sampling_mask(tokens, Truncation(top_p=0.8, top_k=40), temperature=0.7)
    assert 0 < int(outside.sum()) < 60
    log_probs, _ = chosen_log_probs(hidden, weight, tokens, temperature=0.7, rows=rows, mask=packed)
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
