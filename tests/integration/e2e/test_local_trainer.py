"""The local backend end to end on the tiny trained model: real vLLM, a few steps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from fresh_vllm import greedy_in_a_fresh_vllm
from glossary import glossary_metrics
from metrics_table import misplaced

from qarl.quant import linear
from qarl.quant.state_dict import low_bit_layers
from qarl.rollout.engine import SamplingConfig
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Iterator[LocalTrainer]:
    """A trainer three steps into the quickstart, with larger steps so that the weights really move."""
    settings = config(
        tmp_path_factory.mktemp("runs"), "optim.lr=2e-4", "trainer.val_max_prompts=64"
    )
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        trainer.metrics = [trainer.train_step() for _ in range(3)]
        trainer.seconds = trainer.timer.pop()
        yield trainer


def test_three_steps_train_publish_and_log_mismatch_bands_and_phases(trainer):
    assert trainer.step == trainer.engine.weight_version == 3
    for metrics in trainer.metrics:
        assert 0 <= metrics["mismatch/k3"] < 1e-3
        assert 0.28 < metrics["publish/quantized_ratio"] < 0.30
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_steps"] == 0
    # At this learning rate; the model, trained where the test runs, and so the fraction differ between CPU types.
    assert (
        sum(metrics["actor/inside_band_frac_after_first"] for metrics in trainer.metrics) >= 3 * 0.5
    )
    assert trainer.seconds.keys() >= {
        f"timing_s/{p}" for p in ("rollout", "old_log_prob", "update", "publish")
    }
    logged = {*trainer.seconds, *(name for metrics in trainer.metrics for name in metrics)}
    assert logged - glossary_metrics() == set()
    assert misplaced(logged, "local") == []


def test_the_weights_moved_and_the_engine_has_exactly_the_trainers_tensors(trainer, tmp_path):
    """After the last publish: the running engine, and a vLLM in a separate process on the saved folder, by token."""
    start = Policy.load(trainer.config)
    moved = []
    for name, layer in low_bit_layers(trainer.policy.model).items():
        before = start.model.get_submodule(name).quantized().tensors
        if not all(
            torch.equal(tensor, before[leaf]) for leaf, tensor in layer.quantized().tensors.items()
        ):
            moved.append(name)
    assert len(moved) == 28
    folder = trainer.policy.save(tmp_path / "export", trainer.tokenizer)
    prompts = [prompt.prompt_token_ids for prompt in trainer.parts.val_prompts][:64]
    running = trainer.engine.generate(prompts, SamplingConfig(80, temperature=0.0))
    tokens, log_probs = greedy_in_a_fresh_vllm(folder, prompts, max_tokens=80, max_model_len=112)
    assert tokens == running.response_token_ids
    assert log_probs == running.rollout_log_probs


def test_every_layer_is_quantized_once_an_optimizer_step(trainer, monkeypatch):
    """Two mini-batches of two micro-batches each, old log-probs and a publish: 28 layers, two quantizations each."""
    actor = trainer.config.actor.model_copy(update={"ppo_micro_batch_size_per_gpu": 24})
    monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"actor": actor}))
    made = []
    original = linear.quantize

    def counted(weight, scheme, *, name):
        made.append(name)
        return original(weight, scheme, name=name)

    monkeypatch.setattr(linear, "quantize", counted)
    trainer.train_step()
    assert len(set(made)) == 28 and len(made) == 2 * 28
    assert trainer.timer.pop()["timing_s/quantize"] > 0


def test_ctrl_c_ends_after_the_step_and_keeps_everything(tmp_path):
    command = [
        sys.executable,
        "-m",
        "qarl.train",
        "config=quickstart.yaml",
        f"output_dir={tmp_path}",
        "name=stopped",
    ]
    command += [
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=1000",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 2/"):
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                break
        lines += process.stdout.readlines()
        code = process.wait(timeout=120)
    output = "".join(lines)
    assert code == 130, output[-3000:]
    assert "Traceback" not in output
    run_dir = tmp_path / "stopped"
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (
        summary["interrupted"] is True
        and summary["steps"] == entries[-1]["step"] == len(entries) <= 4
    )
    assert (run_dir / "export" / "model.safetensors").is_file() and list(
        (run_dir / "plots").glob("*.png")
    )
