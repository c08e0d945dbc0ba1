"""What `qarl diagnose calibrate` compares with a threshold, by hand; its keys; its command line."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from objective_cases import run_config

from qarl.config import ConfigError
from qarl.config.objectives import objective_names
from qarl.diagnose.arguments import request_of
from qarl.diagnose.calibrate import (
    RULES,
    Sampled,
    Update,
    band_rows,
    numbered_prompts,
    sample_of,
    threshold_row,
)
from qarl.diagnose.calibration_report import as_text
from qarl.diagnose.thresholds import Sample
from qarl.errors import UserError
from qarl.tbpo.config import TBPOConfig

LN2 = math.log(2)


def batch(*ratios: list[float]) -> Any:
    """A batch of responses with these r_corr, whose rollout log-probs are -3; NaN in the padding."""
    width = max(map(len, ratios))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in ratios])
    rollout = torch.full(mask.shape, -3.0).masked_fill(~mask, math.nan)
    return SimpleNamespace(response_mask=mask, rollout_log_probs=rollout)


def own(*ratios: list[float]) -> torch.Tensor:
    width = max(map(len, ratios))
    return torch.tensor(
        [[math.log(r) - 3 for r in row] + [math.nan] * (width - len(row)) for row in ratios]
    )


RATIOS = ([2.0, 0.5, 4.0], [0.5], [])
K3 = {r: r - 1 - math.log(r) for r in (2.0, 0.5, 4.0)}
# Of (2, 1/2, 4): product 4, geometric mean 4^(1/3), sum of K1 -2 ln 2. The response without tokens does not count.
EXPECTED = {
    "weight, token": [2.0, 0.5, 4.0, 0.5],
    "weight, sequence": [4.0, 0.5],
    "weight, geometric": [4 ** (1 / 3), 0.5],
    "rejection, token_k3": [K3[2.0], K3[0.5], K3[4.0], K3[0.5]],
    "rejection, seq_sum_k1": [-2 * LN2, LN2],
    "rejection, seq_sum_k3": [sum(K3.values()), K3[0.5]],
    "rejection, seq_mean_k1": [-2 * LN2 / 3, LN2],
    "rejection, seq_mean_k3": [sum(K3.values()) / 3, K3[0.5]],
    "rejection, seq_max_k3": [K3[4.0], K3[0.5]],
    # 1/w where w is below 1: a cap of C allows [1/C, C].
    "TBPO's cap C": [4 ** (1 / 3), 2.0],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_statistics_by_hand(rule):
    sampled = Sampled([batch(*RATIOS)], [torch.tensor([7, 8, 9])])
    sample = sample_of(rule, [own(*RATIOS)], sampled)
    assert sample.values.tolist() == pytest.approx(EXPECTED[rule.name], rel=1e-6)
    assert sample.prompts.tolist() == ([7, 7, 7, 8] if rule.of == "tokens" else [7, 8])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("loss", objective_names())
def test_the_keys_are_the_configs_and_what_it_refuses_is_said(rule, loss):
    keys = dict(rule.keys) | {rule.key: 1.5}
    correction = {
        key.partition(".")[2]: value
        for key, value in keys.items()
        if key.startswith("rollout_correction.")
    }
    actor = {
        key.partition(".")[2]: value for key, value in keys.items() if key.startswith("actor.")
    }
    assert len(correction) + len(actor) == len(keys)
    if rule.refused_with(loss):
        with pytest.raises(ConfigError):
            run_config(loss, correction, **actor)
        return
    assert run_config(loss, correction, **actor).actor.loss == loss


def one_per_prompt(values: np.ndarray) -> Sample:
    return Sample(values, np.arange(len(values)))


def test_a_row_has_the_threshold_and_what_the_papers_loses():
    """Products 1.01 to 3.00: 5% of 200 are above 2.9. Of the reference, whose products are 1, none."""
    rule = next(rule for rule in RULES if rule.name == "weight, sequence")
    sample = one_per_prompt(1 + np.arange(1, 201) / 100)
    row = threshold_row(rule, sample, one_per_prompt(np.ones(200)), run_config("grpo", {}), 0.05)
    is_ = "rollout_correction.rollout_is"
    assert row["keys"] == {is_: "sequence", f"{is_}_threshold": 2.9}
    assert (row["loses"], row["reference_loses"], row["refused_with_this_loss"]) == (
        0.05,
        0.0,
        False,
    )
    token = next(rule for rule in RULES if rule.name == "weight, token")
    row = threshold_row(token, sample, sample, run_config("tbpo", {}), 0.05)
    assert (
        row["paper"]["value"] == 2.0
        and row["paper"]["loses"] == 0.5
        and row["refused_with_this_loss"]
    )


def test_a_threshold_that_the_config_cannot_have_is_not_proposed():
    """All weights are below 1, and all K1 below 0: a bound has to be at least 1, or above 0."""
    below = one_per_prompt(-np.arange(1, 201) / 100)
    for name in ("weight, sequence", "rejection, seq_sum_k1"):
        rule = next(rule for rule in RULES if rule.name == name)
        row = threshold_row(rule, below, below, run_config("grpo", {}), 0.05)
        assert "keys" not in row and "the smallest threshold" in row["none"]


def update(deviation: torch.Tensor, advantage: float, length: int = 1) -> Update:
    count = len(deviation)
    return Update(
        deviation,
        torch.full((count,), advantage),
        torch.full((count,), length),
        torch.arange(count),
    )


def test_bands_leave_the_share_outside():
    """A > 0: r - 1 from 0.001 to 0.2. A < 0: from -0.1 to 0.1, a share of 10% is 5% on each side. A = 0 is left out."""
    updates = [
        update(torch.arange(1, 201).double() / 1000, 2.0),
        update((torch.arange(1, 202) - 101).double() / 1000, -1.0),
        update(torch.full((50,), 9.0).double(), 0.0),
    ]
    actor = run_config("tbpo", {}).actor
    rows = {row["name"].split()[-1]: row for row in band_rows(updates, actor, 0.1)}
    assert list(rows) == [
        "seq_clip_ratio_high",
        "neg_seq_clip_ratio_low",
        "neg_seq_clip_ratio_high",
    ]
    values = {name: row["keys"][f"actor.{name}"] for name, row in rows.items()}
    assert values == pytest.approx(
        {
            "seq_clip_ratio_high": 0.18,
            "neg_seq_clip_ratio_low": 0.09,
            "neg_seq_clip_ratio_high": 0.09,
        }
    )
    assert rows["seq_clip_ratio_high"]["loses"] == 0.1
    # Of 200 deviations of 0.001 and more, all are above the paper's 4e-4.
    assert rows["seq_clip_ratio_high"]["configured"]["value"] == 4e-4
    assert rows["seq_clip_ratio_high"]["configured"]["loses"] == 1.0


def test_bands_of_two_sides_and_of_a_length():
    """Deviations of 1 token are quartered for a reference of 16: sqrt(1/16)."""
    updates = [update((torch.arange(1, 202) - 101).double() / 1000, 1.0)]
    keys: dict[str, Any] = {
        "positive_band": "two_sided",
        "band_scaling": "length",
        "band_reference_length": 16,
    }
    rows = band_rows(updates, run_config("tbpo", {}, **keys).actor, 0.1)
    assert [row["name"].split()[-1] for row in rows[:2]] == [
        "seq_clip_ratio_high",
        "seq_clip_ratio_low",
    ]
    for row in rows[:2]:
        (value,) = row["keys"].values()
        assert value == pytest.approx(0.0225) and row["loses"] == pytest.approx(10 / 201)
    assert all("no sample" in row["none"] for row in rows[2:])


def test_equal_prompts_have_one_number():
    prompts = torch.tensor([[1, 2, 0], [1, 2, 5], [3, 9, 9], [1, 2, 7]])
    lengths = torch.tensor([2, 2, 1, 3])
    first = SimpleNamespace(input_ids=prompts, prompt_lengths=lengths)
    second = SimpleNamespace(input_ids=prompts[2:], prompt_lengths=lengths[2:])
    sampled = numbered_prompts([first, second])  # type: ignore[list-item]  # what of a batch it reads
    assert [numbers.tolist() for numbers in sampled.prompts] == [[0, 0, 1, 2], [1, 2]]


def test_the_command_line():
    request, rest = request_of(
        "calibrate", ["config=quickstart.yaml", "share=0.1", "quant.align=off", "batches=3"]
    )
    assert (request.batches, request.share) == (3, 0.1) and rest == [
        "config=quickstart.yaml",
        "quant.align=off",
    ]
    assert request_of("calibrate", [])[0].batches == 6
    for word in ("batches=0", "batches=x", "share=0", "share=0.6", "batches="):
        with pytest.raises(UserError, match=r"batches|share|empty"):
            request_of("calibrate", ["config=quickstart.yaml", word])


def test_the_text_has_every_row():
    sample = one_per_prompt(1 + np.arange(1, 201) / 100)
    rows = [threshold_row(rule, sample, sample, run_config("tbpo", {}), 0.05) for rule in RULES]
    mismatch = {"abs_mean": 0.1, "abs_max": 1.0, "k1": 0.0, "k3": 0.01}
    report = {
        "model": "tiny", "scheme": "w4a16", "loss": "tbpo", "level": "off", "batches": 1, "prompts": 200,
        "responses": 200, "tokens": 200, "share": 0.05, "bands": "not measured",
        "levels": {
            "off": {"mismatch": mismatch, "thresholds": rows},
            "exact": {"mismatch": dict.fromkeys(mismatch, 0.0), "thresholds": []},
        },
    }  # fmt: skip
    text = as_text(report)
    for rule in RULES:
        assert f"| {rule.name}" in text and f"{rule.key}=2.9" in text
    assert "2: 50.0% (" in text and "no mismatch" in text and "not measured" in text
    assert TBPOConfig().seq_tis_imp_ratio_cap == 2.0
