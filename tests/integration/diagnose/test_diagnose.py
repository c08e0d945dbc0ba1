"""The diagnosis on the tiny trained model with real vLLM: each cause shows where it is switched on, and only there."""

from __future__ import annotations

import json

import pytest
from cpu_features import needs_w4a16_cpu

from qarl.diagnose.__main__ import main

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


def test_the_split_names_the_cause(tmp_path, capfd):
    code = main(
        [
            "config=quickstart.yaml",
            f"output_dir={tmp_path}",
            "quant.align=off",
            "optim.lr_warmup_steps=0",
            "rollout.cpu_kvcache_space_gib=0.25",
            "trainer.val_max_prompts=16",
        ]
    )
    assert code == 0
    report = json.loads((tmp_path / "quickstart" / "diagnose.json").read_text())
    by_cause = {comparison["differs"]: comparison for comparison in report["comparisons"]}
    assert list(by_cause) == ["as configured", "quantization", "kernel floor", "none", "staleness"]
    assert (
        by_cause["none"]["mismatch/abs_max"] == 0
        and by_cause["none"]["mismatch/argmax_flip_rate"] == 0
    )
    kernel_floor = by_cause["kernel floor"]["mismatch/abs_mean"]
    assert 0 < kernel_floor < by_cause["quantization"]["mismatch/abs_mean"] / 3
    assert by_cause["as configured"]["mismatch/abs_mean"] > 3 * kernel_floor
    assert by_cause["staleness"]["mismatch/abs_max"] > 0
    printed = capfd.readouterr().out
    assert "largest mean" in printed and "| kernel floor | linears |" in printed
