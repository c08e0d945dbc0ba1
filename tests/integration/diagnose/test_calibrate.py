"""`qarl diagnose calibrate`: a run on the tiny model, and what its thresholds lose in the corrections themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from objective_cases import random_rows, run_config

from qarl.__main__ import main
from qarl.diagnose.calibrate import FILE, RULES, Sampled, sample_of
from qarl.diagnose.thresholds import threshold
from qarl.objectives.loss import accepted_tokens, correction_weights
from qarl.objectives.settings import objective_settings

SHARE = 0.2


@pytest.mark.verl
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not rule.key.startswith("actor.")], ids=lambda r: r.name
)
def test_the_correction_loses_what_the_threshold_says(rule):
    """With the threshold in a config, verl's own functions reject, or the weight truncates, exactly that share."""
    rows = random_rows(seed=3)
    old, mask = rows["old_log_prob"], rows["response_mask"]
    batch = SimpleNamespace(response_mask=mask, rollout_log_probs=rows["rollout_log_prob"])
    sample = sample_of(rule, [old], Sampled([batch], [torch.arange(len(mask))]))
    value = threshold(sample.values, SHARE)
    above = int((sample.values > value).sum())
    assert 0 < above <= SHARE * len(sample.values)
    keys = dict(rule.keys) | {rule.key: value}
    config = run_config("grpo", {key.partition(".")[2]: value for key, value in keys.items()})
    correction = objective_settings(config).correction
    if correction.rejects:
        accepted = accepted_tokens(old, old, rows["rollout_log_prob"], mask, correction)
        lost = mask & ~accepted if rule.of == "tokens" else (mask & ~accepted).any(1)
    else:
        weight = correction_weights(old, rows["rollout_log_prob"], mask, correction)
        at_bound = mask & (weight == torch.tensor(value))
        lost = at_bound if rule.of == "tokens" else at_bound.any(1)
    assert int(lost.sum()) == above


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.vllm
@needs_w4a16_cpu
def test_thresholds_of_the_quickstart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At `exact` nothing is lost, at `off` the share that was asked for, and between them less than at `off`."""
    code = main(
        [
            "diagnose",
            "calibrate",
            "config=quickstart.yaml",
            "batches=2",
            f"share={SHARE}",
            f"output_dir={tmp_path}",
            "quant.align=linears",
            "rollout.cpu_kvcache_space_gib=0.25",
            "trainer.val_max_prompts=16",
        ]
    )
    assert code == 0
    report = json.loads((tmp_path / "quickstart" / FILE).read_text())
    assert list(report["levels"]) == ["linears", "off", "exact"]
    assert (report["batches"], report["responses"], report["prompts"]) == (2, 192, 24)
    exact = report["levels"]["exact"]
    assert exact["mismatch"]["abs_max"] == 0 and exact["mismatch"]["k3"] == 0
    assert all("none" in row for row in exact["thresholds"]), (
        "without a mismatch nothing is proposed"
    )
    off = {row["name"]: row for row in report["levels"]["off"]["thresholds"]}
    linears = {row["name"]: row for row in report["levels"]["linears"]["thresholds"]}
    assert off.keys() == linears.keys() == {rule.name for rule in RULES}
    for name in ("rejection, seq_sum_k3", "rejection, seq_mean_k3", "TBPO's cap C"):
        row = off[name]
        assert row["reference_loses"] == 0.0
        assert SHARE - 0.02 <= row["loses"] <= SHARE
        assert row["low"] <= row["value"] * 1.01 and row["value"] <= row["high"] * 1.01
        assert row["value"] > (linears[name].get("value") or 0.0)
    assert off["rejection, seq_sum_k3"]["paper"]["loses"] > 0.5, (
        "the paper's threshold is for equal weights"
    )
    bands = {row["name"]: row for row in report["bands"]}
    assert len(bands) == 3
    for row in bands.values():
        assert "none" in row or 0 < row["value"] < 0.5
        assert math.isfinite(row["configured"]["loses"])
    printed = capfd.readouterr().out
    assert (
        "rollout_correction.rollout_rs=seq_sum_k3 rollout_correction.rollout_rs_threshold="
        in printed
    )
    assert "quant.align=exact" in printed and "no mismatch" in printed
