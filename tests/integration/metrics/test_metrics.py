"""Metrics against verl's own functions, FP64 arithmetic and hand-computed numbers."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from qarl.metrics.step_metrics import mismatch_metrics, response_metrics, token_mismatch


def make_batch(spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """16 responses of 1 to 40 tokens; δ normal with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(16, 40, generator=generator) * 3
    old = rollout + spread * torch.randn(16, 40, generator=generator)
    lengths = torch.randint(1, 41, (16, 1), generator=generator)
    return old, rollout, torch.arange(40).expand(16, 40) < lengths


@pytest.mark.verl
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_definitions_are_verls(spread: float) -> None:
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_offpolicy_metrics,
        compute_rollout_correction_weights,
    )
    from verl.utils.debug.metrics import pearson_correlation_coefficient

    old, rollout, mask = make_batch(spread)
    ours = mismatch_metrics(old, rollout, mask)
    theirs = compute_offpolicy_metrics(old, rollout, mask)
    _, weights = compute_rollout_correction_weights(
        old - rollout, mask, rollout_is="token", rollout_is_threshold=2.0
    )
    # verl works in FP32 throughout: k3 near 2e-4 is the difference of numbers near 1, good to 1e-7.
    assert ours["mismatch/k1"] == pytest.approx(theirs["kl"], rel=1e-5, abs=1e-7)
    assert ours["mismatch/k3"] == pytest.approx(theirs["k3_kl"], rel=1e-5, abs=2e-8)
    assert ours["mismatch/training_ppl"] == pytest.approx(theirs["training_ppl"], rel=1e-6)
    assert ours["mismatch/ppl_ratio"] == pytest.approx(theirs["ppl_ratio"], rel=1e-6)
    assert ours["mismatch/ess"] == pytest.approx(weights["rollout_is_eff_sample_size"], rel=1e-6)
    assert ours["mismatch/pearson"] == pytest.approx(
        pearson_correlation_coefficient(old.exp(), rollout.exp(), mask), rel=1e-5
    )


def test_the_histogram_of_w_by_hand() -> None:
    """One response in each bin, and one of NaN, which is in none."""
    of_responses = torch.tensor([0.4, 0.7, 0.9, 0.97, 1.0, 1.03, 1.2, 1.9, 5.0, math.nan, 7.0])
    mask = torch.ones(11, 3, dtype=torch.bool)
    mask[10] = False  # an empty response is in none, either
    old = of_responses.double().log()[:, None] + torch.tensor([0.1, -0.1, 0.0])
    metrics = mismatch_metrics(old, torch.zeros(11, 3), mask)
    shares = {name: value for name, value in metrics.items() if name.startswith("mismatch/w_")}
    assert shares == pytest.approx(dict.fromkeys(shares, 0.1))
    assert len(shares) == 9


def test_bf16_log_probs_are_subtracted_in_fp32() -> None:
    old, rollout = torch.tensor([[-4.03125]]).bfloat16(), torch.tensor([[-0.0078125]]).bfloat16()
    metrics = mismatch_metrics(old, rollout, torch.ones(1, 1))
    assert metrics["mismatch/abs_max"] == 4.03125 - 0.0078125


def test_padding_and_empty_responses_do_not_count() -> None:
    old, rollout, mask = make_batch(0.1)
    expected = mismatch_metrics(old, rollout, mask)
    old[~mask], rollout[~mask] = math.nan, -math.inf
    empty = torch.zeros(1, 40)
    padded = mismatch_metrics(
        torch.cat([old, empty]), torch.cat([rollout, empty]), torch.cat([mask, empty.bool()])
    )
    assert padded == expected


def in_float64(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The definitions in NumPy, over the padded batch."""
    chosen = mask.numpy().astype(bool)
    p, q = (np.exp(log_probs.numpy()[chosen].astype(np.float64)) for log_probs in (old, rollout))
    all_deltas = np.where(chosen, (old - rollout).numpy().astype(np.float64), 0.0)
    delta, weights = all_deltas[chosen], np.minimum(np.exp(all_deltas[chosen]), 2.0)
    of_responses = (all_deltas.sum(1) / chosen.sum(1).clip(1))[chosen.any(1)]
    trainer = np.where(chosen, old.numpy().astype(np.float64), 0.0)
    of_trainer = (trainer.sum(1) / chosen.sum(1).clip(1))[chosen.any(1)]
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    edges = [-np.inf, 0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2, np.inf]
    counts, _ = np.histogram(np.exp(of_responses), edges)
    names = (
        "to_50",
        "to_80",
        "to_95",
        "to_99",
        "to_101",
        "to_105",
        "to_125",
        "to_200",
        "above_200",
    )
    return {
        f"mismatch/abs_{name}": np.quantile(abs(delta), share) for name, share in shares.items()
    } | {
        "mismatch/abs_mean": abs(delta).mean(),
        "mismatch/k1": -delta.mean(),
        "mismatch/k3": (np.expm1(delta) - delta).mean(),
        "mismatch/ess": weights.mean() ** 2 / (weights**2).mean(),
        "mismatch/training_ppl": np.exp(-of_trainer).mean(),
        "mismatch/ppl_ratio": np.exp(-of_responses).mean(),
        "mismatch/pearson": np.corrcoef(p, q)[0, 1],
        **{
            f"mismatch/w_{name}": count / len(of_responses)
            for name, count in zip(names, counts, strict=True)
        },
    }


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("spread", [1e-4, 0.5])
def test_ranks_with_different_responses_find_the_figures_of_the_whole_batch(
    ranks: int, spread: float
) -> None:
    """Threads stand for ranks. With five, the last has no response."""
    old, rollout, mask = make_batch(spread)
    mask[3] = False
    shares = [*torch.arange(16).tensor_split(max(ranks - 1, 1)), torch.arange(0)][:ranks]
    barrier, sent = threading.Barrier(ranks), [torch.zeros(0)] * ranks

    def run(rank: int) -> dict[str, float]:
        def reduce(value: torch.Tensor) -> torch.Tensor:
            sent[rank] = value
            barrier.wait(20)
            total = torch.stack(sent).sum(0)
            barrier.wait(20)
            return total

        o, r, m = (tensor[shares[rank]] for tensor in (old, rollout, mask))
        return token_mismatch(o[m], r[m], m.sum(-1), reduce)

    with ThreadPoolExecutor(ranks) as pool:
        for metrics in pool.map(run, range(ranks)):
            assert metrics == pytest.approx(in_float64(old, rollout, mask), rel=1e-9, abs=1e-15)


@pytest.mark.verl
def test_response_metrics_are_verls() -> None:
    from verl import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    lengths, prompt_lengths, width = [3, 6, 0, 2], [2, 4, 4, 1], 6
    scores = [1.0, 0.0, 5.0, 0.5]
    response_mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    prompt_mask = (torch.arange(4) < torch.tensor(prompt_lengths)[:, None]).long()
    token_scores = torch.zeros(4, width)
    token_scores[:, 0] = torch.tensor(scores)
    tensors = {
        "prompts": torch.zeros(4, 4),
        "responses": torch.zeros(4, width),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "response_mask": response_mask,
        "token_level_scores": token_scores,
        "token_level_rewards": token_scores,
        "advantages": token_scores,
        "returns": token_scores,
    }
    theirs = compute_data_metrics(DataProto.from_dict(tensors), use_critic=False)
    ours = response_metrics(
        scores, lengths, ["length" if length == width else "stop" for length in lengths]
    )
    assert ours.pop("critic/score/std") == pytest.approx(np.std([1.0, 0.0, 0.5]))
    assert len(ours) == 8
    for name, value in ours.items():
        assert value == pytest.approx(theirs[name], rel=1e-6), name


def test_clip_ratio_follows_the_finish_reason() -> None:
    assert response_metrics([0, 0], [8, 8], ["stop", "length"])["response_length/clip_ratio"] == 0.5
