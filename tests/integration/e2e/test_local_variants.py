"""The local backend's options, each through a step or two with an engine of its own."""

from __future__ import annotations

import json

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from plugin_kernels import registered

from qarl.trainer.local import LocalTrainer
from qarl.trainer.loop import train
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant.scheme=bf16", "optim.name=muon", "optim.muon_lr=1e-3"],
        ["quant.align=off", "optim.master_dtype=bf16", "model.gradient_checkpointing=true"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_variants_take_a_step_and_change_the_weights(tmp_path, overrides):
    settings = config(tmp_path, "trainer.val_max_prompts=16", *overrides)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        before = {name: tensor.clone() for name, tensor in trainer.policy.published_tensors()}
        metrics = trainer.train_step()
        after = dict(trainer.policy.published_tensors())
    assert metrics["actor/grad_norm"] > 0
    assert metrics["mismatch/k3"] < (0.05 if "quant.align=off" in overrides else 1e-3)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("scheme", "kernels"), [("w4a8", "qarl"), ("w4a16", "dequantized")])
def test_own_kernels_train_without_a_mismatch(tmp_path, scheme, kernels):
    """The tiny model is trained in W4A16 and BF16, so a step in W4A8 has a mismatch if one side rounds differently."""
    overrides = [f"quant.scheme={scheme}", f"quant.kernels={kernels}", "quant.align=exact"]
    settings = config(tmp_path, "trainer.val_max_prompts=16", *overrides)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        steps = [trainer.train_step() for _ in range(2)]
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert 0.28 < metrics["publish/quantized_ratio"] < 0.30
        assert ("publish/dequantized" in metrics) == (scheme == "w4a16")
        assert metrics["mismatch/abs_max"] == 0.0


def test_an_own_kernel_of_int8_weights_trains_without_a_mismatch(tmp_path):
    """The engine multiplies by what the kernel's `prepare` has made, which is not what is on the wire."""
    plugin = "plugins=[tests/support/plugins/own_int8.py]"
    overrides = [plugin, "quant.scheme=w8a8", "quant.kernels=qarl", "quant.align=exact"]
    with registered("own_int8"):
        settings = config(tmp_path, "trainer.val_max_prompts=16", *overrides)
        trainer = LocalTrainer(settings, prepare_run(settings))
        with trainer.engine:
            trainer.publish()
            steps = [trainer.train_step() for _ in range(2)]
    for metrics in steps:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["mismatch/abs_max"] == 0.0


def test_a_failure_in_mid_run_keeps_metrics_summary_and_weights(tmp_path, monkeypatch):
    settings = config(tmp_path, "name=failing", "trainer.val_max_prompts=16", "trainer.plots=false")
    original = LocalTrainer.update

    def fail_in_the_second_step(self, *arguments):
        if self.step == 1:
            raise FloatingPointError("made to fail")
        return original(self, *arguments)

    monkeypatch.setattr(LocalTrainer, "update", fail_in_the_second_step)
    with pytest.raises(FloatingPointError, match="made to fail"):
        train(settings)
    summary = json.loads((settings.run_dir / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["failed"] == "FloatingPointError: made to fail"
    assert (settings.run_dir / "export" / "model.safetensors").is_file()
