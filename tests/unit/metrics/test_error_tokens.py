"""Repetitive and garbled responses, by hand and against sets of n-grams in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from qarl.metrics.error_tokens import (
    NGRAM,
    TAIL,
    WINDOW,
    garbled_limit,
    least_likely_run,
    repetition,
    text_metrics,
    text_statistics,
)


def rows(*responses: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask, padded on the right with a token that would be repetitive if it counted."""
    width = max(map(len, responses))
    tokens = torch.tensor([[*response, *[7] * (width - len(response))] for response in responses])
    mask = (
        torch.arange(width)[None, :]
        < torch.tensor([len(response) for response in responses])[:, None]
    )
    return tokens, mask


def by_sets(response: list[int]) -> float:
    """The definition, a response at a time."""
    tail = response[-TAIL:]
    grams = [tuple(tail[i : i + NGRAM]) for i in range(len(tail) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= 10 else 0.0


LOOP = [1, 2, 3] * 20
REPETITION = {
    "a loop of three tokens has three distinct n-grams": (LOOP, 1 - 3 / 55),
    "nine n-grams are too few": ([5] * 14, 0.0),
    "ten are enough": ([5] * 15, 0.9),
    "only the tail counts": (list(range(100, 400)) + [5] * TAIL, 1 - 1 / (TAIL - NGRAM + 1)),
    "a loop before the tail does not": ([5] * 300 + list(range(100, 100 + TAIL)), 0.0),
    "no token": ([], 0.0),
}


@pytest.mark.parametrize(("response", "expected"), REPETITION.values(), ids=REPETITION)
def test_repetition_by_hand(response: list[int], expected: float) -> None:
    tokens, mask = rows(response, [1] * 70)
    assert repetition(tokens, mask)[0].item() == pytest.approx(expected)


def test_repetition_equals_the_sets_on_random_text() -> None:
    rng = random.Random(0)
    responses = [[rng.randrange(3) for _ in range(rng.randrange(1, 400))] for _ in range(60)]
    tokens, mask = rows(*responses)
    shares = repetition(tokens, mask)
    assert shares.tolist() == pytest.approx([by_sets(response) for response in responses])
    assert 0.1 < float(shares.mean()) < 0.9


def test_masked_tokens_do_not_count() -> None:
    # Tokens of a tool in the middle, with mask 0, are as if they were not there.
    tokens = torch.tensor([[5] * 10 + list(range(30, 60)) + [5] * 10])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 10:40] = False
    assert repetition(tokens, mask).item() == pytest.approx(by_sets([5] * 20))
    log_prob = torch.where(mask, -1.0, float("nan"))
    assert least_likely_run(log_prob, mask).item() == pytest.approx(-1.0)


RUNS = {
    "a run of eight": ([-0.1] * 10 + [-6.0] * 8 + [-0.1] * 10, -6.0),
    "seven and one likely token": ([-0.1] * 10 + [-6.0] * 7 + [-0.1] * 10, (-6.0 * 7 - 0.1) / 8),
    "unlikely tokens that stand alone": ([-0.1, -0.1, -0.1, -9.0] * 8, (-9.0 * 2 - 0.6) / 8),
    "too short for a run": ([-9.0] * 7, 0.0),
}


@pytest.mark.parametrize(("log_probs", "expected"), RUNS.values(), ids=RUNS)
def test_runs_of_unlikely_tokens_by_hand(log_probs: list[float], expected: float) -> None:
    width = 40
    values = torch.full((1, width), -99.0)
    values[0, : len(log_probs)] = torch.tensor(log_probs)
    mask = torch.arange(width)[None, :] < len(log_probs)
    assert least_likely_run(values, mask).item() == pytest.approx(expected)


def test_the_limit_of_garbled_text() -> None:
    assert garbled_limit(None) == garbled_limit(150_000) == math.log(0.01)
    # Random tokens of a vocabulary of 20 have log-prob -3.0; the limit is 70% of that.
    assert garbled_limit(20) == pytest.approx(-0.7 * math.log(20))
    assert garbled_limit(20) > -math.log(20)


def test_metrics_by_hand_over_two_micro_batches() -> None:
    good, loop = list(range(50, 90)), [5] * 40
    tokens, mask = rows(good, loop, good, loop, [])
    advantages = torch.tensor([1.0, -1.0, -1.0, 0.0, 1.0])
    log_prob = torch.full(mask.shape, -0.25)
    log_prob[2, 10 : 10 + WINDOW] = -8.25  # the negative sample that does not repeat is garbled
    parts = [
        text_statistics(tokens[part], log_prob[part], advantages[part], mask[part], vocabulary=1000)
        for part in (slice(0, 3), slice(3, 5))
    ]
    repeated = 1 - 1 / 35
    assert text_metrics([{"sum/loss": 3.0}, *parts]) == pytest.approx(
        {
            "error_tokens/repetition": 2 * repeated / 4,
            "error_tokens/repetitive_frac": 2 / 4,
            "error_tokens/garbled_frac": 1 / 4,
            "error_tokens/pos_repetition": 0.0,
            "error_tokens/pos_repetitive_frac": 0.0,
            "error_tokens/pos_garbled_frac": 0.0,
            "error_tokens/neg_repetition": repeated / 2,
            "error_tokens/neg_repetitive_frac": 1 / 2,
            "error_tokens/neg_garbled_frac": 1 / 2,
            "rollout/entropy": 0.25 + 8 * 8 / 160,
        }
    )
