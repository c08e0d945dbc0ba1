"""Find error tokens: responses that repeat themselves at their end, and runs of very unlikely tokens.

The QaRL paper (arXiv 2604.07853, section 3.2 and table 6) calls repetitive and garbled tokens of quantized rollouts
error tokens. According to the paper, they are mostly in negative samples and cause collapse. The paper has no rule to
detect them. Our two rules judge each response alone:

- repetition: the share of n-grams (n = 6) in the last 256 tokens that are repeats of earlier n-grams in these tokens.
  In a loop this share is near 1. In normal text it is rarely 0.3. The responses of the quickstart have at most 0.25.
- garbled: the smallest mean log-prob of 8 consecutive tokens under the rollout. A broken model samples from flat
  distributions, so it makes many unlikely tokens in a row. A single unlikely token is exploration. The limit is a mean
  log-prob of ln(1%). For vocabularies below 700 tokens it is 70% of the log-prob of random tokens.

`text_statistics` returns sums, which can be added over micro-batches and ranks. Legend: B responses, T token positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

NGRAM = 6
"""Tokens per n-gram."""
TAIL = 256
"""Tokens searched at the end of a response."""
FEWEST_NGRAMS = 10
"""The smallest number of n-grams that is judged."""
_PREFIXES = {"all": "", "pos": "pos_", "neg": "neg_"}
"""Group of responses, all or by the sign of their advantages -> prefix of its metrics."""
_RATES = {
    "repetition": "repetition",
    "repetitive": "repetitive_frac",
    "garbled": "garbled_frac",
}
"""A sum over the responses of a group -> metric of its mean."""
WINDOW = 8
"""Consecutive tokens whose mean log-prob is taken."""
REPETITIVE = 0.5
"""Smallest share of repeated n-grams at which a response counts as repetitive."""
UNLIKELY = math.log(0.01)


def garbled_limit(vocabulary: int | None) -> float:
    """Return the limit below which a mean log-prob of `WINDOW` tokens counts as garbled, in nats.

    `vocabulary`: number of tokens in the vocabulary, or None if it is not known."""
    if vocabulary is None:
        return UNLIKELY
    uniform = -math.log(max(vocabulary, 2))
    return max(UNLIKELY, 0.7 * uniform)


def repetition(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the share of repeated n-grams in each response's last `TAIL` tokens: FP64 [B], 0 if there are too few.

    tokens: int64 [B, T]. mask: bool [B, T]; only tokens with a true mask count."""
    ends, known = _tails(tokens, mask)
    if ends.shape[1] < NGRAM:
        return torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    # n-grams are compared by a hash modulo 2^64, a sum of products with fixed odd numbers.
    generator = torch.Generator().manual_seed(0)
    half = 2**62
    halves = torch.randint(-half, half, (NGRAM,), generator=generator)
    factors = (halves * 2 + 1).to(tokens.device)
    windows = (ends + 1).unfold(1, NGRAM, 1)
    grams = (windows * factors).sum(-1)
    whole = known.unfold(1, NGRAM, 1).all(-1)
    # All incomplete n-grams get the same value, so they add at most one distinct value.
    nothing = torch.iinfo(torch.int64).min
    ordered = grams.masked_fill(~whole, nothing).sort(dim=1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    distinct = (new & (ordered != nothing)).sum(1)
    count = whole.sum(1)
    repeated = 1 - distinct.double() / count.clamp(min=1)
    return torch.where(count >= FEWEST_NGRAMS, repeated, 0.0)


def least_likely_run(log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return the smallest mean log-prob of `WINDOW` consecutive tokens of each response: FP64 [B].

    A response with fewer tokens gives 0. log_prob: [B, T]; values where the mask is false are ignored."""
    valid = log_prob.detach().double().masked_fill(~mask, 0.0)
    values, known = _packed(valid, mask)
    if values.shape[1] < WINDOW:
        return torch.zeros(len(values), dtype=torch.float64, device=values.device)
    means = values.unfold(1, WINDOW, 1).mean(-1)
    whole = known.unfold(1, WINDOW, 1).all(-1)
    return means.masked_fill(~whole, 0.0).amin(1)


def text_statistics(
    tokens: Tensor,
    rollout_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    vocabulary: int | None = None,
) -> dict[str, float]:
    """Return sums over responses and tokens for `text_metrics`.

    tokens: int64 [B, T]. rollout_log_prob: [B, T]. advantages: [B], or [B, T] constant over the valid tokens of a row.
    response_mask: bool or 0/1 [B, T]. Responses without tokens are left out."""
    mask = response_mask != 0
    present = mask.any(1)
    if advantages.dim() == 2:
        first = mask.int().argmax(1, keepdim=True)
        advantages = advantages.gather(1, first).squeeze(1)
    repeats = repetition(tokens, mask)
    repetitive = repeats >= REPETITIVE
    garbled = least_likely_run(rollout_log_prob, mask) < garbled_limit(vocabulary)
    positive = present & (advantages > 0)
    negative = present & (advantages < 0)
    groups = {"all": present, "pos": positive, "neg": negative}
    sampled = rollout_log_prob.detach().double()
    surprise = -torch.where(mask, sampled, 0.0).sum()
    sums = {"sum/text/tokens": mask.sum(), "sum/text/surprise": surprise}
    for name, rows in groups.items():
        sums[f"sum/text/{name}"] = rows.sum()
        sums[f"sum/text/{name}_repetition"] = torch.where(rows, repeats, 0.0).sum()
        sums[f"sum/text/{name}_repetitive"] = (rows & repetitive).sum()
        sums[f"sum/text/{name}_garbled"] = (rows & garbled).sum()
    values = torch.stack([value.double() for value in sums.values()])
    return dict(zip(sums, values.tolist(), strict=True))


def text_metrics(statistics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics from the results of `text_statistics`, which may be mixed with other statistics.

    GROUP is empty for all responses, `pos_` for those with A > 0, and `neg_` for those with A < 0. Groups without
    responses have no metrics.
        error_tokens/GROUPrepetition: mean share of repeated n-grams
        error_tokens/GROUPrepetitive_frac: share of responses that count as repetitive
        error_tokens/GROUPgarbled_frac: share of responses that count as garbled
        rollout/entropy: entropy of the sampling distributions in nats per token, estimated by the mean of -log-prob
            over the sampled tokens, which has the same expectation
    """
    total: Counter[str] = Counter()
    for sums in statistics:
        for key, value in sums.items():
            if key.startswith("sum/text/"):
                total[key.removeprefix("sum/text/")] += value
    metrics = {}
    for group, prefix in _PREFIXES.items():
        count = total.get(group)
        if not count:
            continue
        for counted, name in _RATES.items():
            metrics[f"error_tokens/{prefix}{name}"] = total[f"{group}_{counted}"] / count
    tokens = total.get("tokens")
    if tokens:
        metrics["rollout/entropy"] = total["surprise"] / tokens
    return metrics


def _packed(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row with its valid values moved to the start, in their order, and the mask of the moved values."""
    order = (~mask).int().argsort(dim=1, stable=True)
    return values.gather(1, order), mask.gather(1, order)


def _tails(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last `TAIL` valid values of each row, and a mask, because a row may have fewer."""
    packed, known = _packed(values, mask)
    lengths = known.sum(1, keepdim=True)
    width = min(TAIL, values.shape[1])
    start = (lengths - width).clamp(min=0)
    positions = start + torch.arange(width, device=values.device)
    return packed.gather(1, positions), positions < lengths
