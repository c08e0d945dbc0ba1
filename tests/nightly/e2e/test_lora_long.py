"""Runs of 50 steps with adapters have no mismatch, whatever the scheme."""

from __future__ import annotations

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config

from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
MOE = ["model.path=models/tiny-qwen3-moe", 'quant.ignore=["lm_head","re:.*mlp[.]gate$"]']


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "overrides",
    [[f"quant.scheme={name}"] for name in ("w4a16", "w8a8", "fp8", "bf16")]
    + [["quant.scheme=w4a16", *MOE]],
    ids=["w4a16", "w8a8", "fp8", "bf16", "experts"],
)
def test_fifty_steps_have_no_mismatch(tmp_path, overrides):
    settings = config(
        tmp_path, "lora.r=8", "optim.lr=1.5e-3", "trainer.total_training_steps=50", *overrides
    )
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        steps = [trainer.train_step() for _ in range(50)]
    assert [step["mismatch/abs_max"] for step in steps] == [0.0] * 50
    assert all(step["actor/grad_norm"] > 0 for step in steps)
