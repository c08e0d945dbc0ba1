"""Runs with adapters: no mismatch for any scheme, a resume bit for bit, an export that a fresh vLLM serves."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, config
from fresh_vllm import greedy_in_a_fresh_vllm
from pefts_adapters import save_pefts
from random_moe import save_random_moe
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from qarl.__main__ import main
from qarl.checkpoint.resumable import open_checkpoint
from qarl.errors import UserError
from qarl.metrics.tracker import read_metrics
from qarl.trainer.local import LocalTrainer
from qarl.trainer.loop import train
from qarl.trainer.prepare import prepare_run
from qarl.trainer.resume import open_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
LORA = ["lora.r=8", "optim.lr=3e-3", "trainer.val_max_prompts=16"]
RANDOM = f"reward.function={ROOT / 'benchmarks/proofs/lengths_reward.py'}:reward"
"""Random weights get no reward for their answers."""
MOE = [RANDOM, 'quant.ignore=["lm_head","re:.*mlp[.]gate$"]']
SOME_LAYERS = "lora.target_modules=.*layers[.][02][.].*(q_proj|down_proj)"
CASES = {
    "w4a16-KL-muon": ["actor.use_kl_loss=true", "optim.name=muon", "optim.muon_lr=1e-3"],
    "w8a8-two targets-checkpointing": [
        "quant.scheme=w8a8",
        "lora.target_modules=[v_proj,down_proj]",
        "lora.alpha=32",
        "model.gradient_checkpointing=true",
    ],
    "fp8-padded rows": ["quant.scheme=fp8", "model.use_remove_padding=false"],
    "bf16-queries alone": ["quant.scheme=bf16", "lora.target_modules=[q_proj]"],
    "w4a8": ["quant.scheme=w4a8", "quant.kernels=qarl"],
    "r=12-some layers": ["lora.r=12", "lora.alpha=24", SOME_LAYERS],
    "dequantized-FP32 logits": ["quant.kernels=dequantized", "model.head_dtype=fp32"],
    "experts": MOE,
    "experts-fp8": ["quant.scheme=fp8", *MOE],
}
"""Each option is in one of them."""
ONE_OPTION = {
    "w4a16": [],
    "w8a8": ["quant.scheme=w8a8"],
    "fp8": ["quant.scheme=fp8"],
    "bf16": ["quant.scheme=bf16"],
    "experts-w8a8": ["quant.scheme=w8a8", *MOE],
    "experts-bf16": ["quant.scheme=bf16", *MOE],
    "two targets": ["lora.target_modules=[v_proj,down_proj]", "lora.alpha=32"],
    "queries alone": ["lora.target_modules=[q_proj]"],
    "some layers": [SOME_LAYERS],
    "r=3": ["lora.r=3"],
    "r=33-w8a8": ["lora.r=33", "quant.scheme=w8a8"],
    "r=100-fp8": ["lora.r=100", "quant.scheme=fp8"],
    "muon": ["optim.name=muon", "optim.muon_lr=1e-3"],
    "KL": ["actor.use_kl_loss=true"],
    "checkpointing": ["model.gradient_checkpointing=true"],
    "dequantized": ["quant.kernels=dequantized"],
    "FP32 logits": ["model.head_dtype=fp32"],
    "padded rows": ["model.use_remove_padding=false"],
}


def run_steps(tmp_path, steps: int, *overrides: str) -> list[dict[str, float]]:
    chosen = {override.partition("=")[0] for override in overrides}
    usual = [setting for setting in LORA if setting.partition("=")[0] not in chosen]
    settings = config(tmp_path, *usual, *overrides)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        first = trainer.publish()
        theirs, norm = trainer.engine.weights.storage(), "model.norm.weight"
        assert trainer.policy.model.get_parameter(norm).data_ptr() == theirs[norm].data_ptr(), (
            "not shared"
        )
        metrics = [trainer.train_step() for _ in range(steps)]
        adapter = trainer.policy.adapters.adapter().padded()
    assert any(tensor.any() for name, tensor in adapter.tensors.items() if "lora_B" in name)
    for step in metrics:
        assert step["publish/mbytes"] * 1e6 == adapter.nbytes < first.bytes
    return metrics


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in ONE_OPTION)]
)
def test_adapters_train_without_a_mismatch(tmp_path, name):
    overrides = (CASES | ONE_OPTION)[name]
    if RANDOM in overrides:
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny-qwen3")
        model = save_random_moe(tmp_path / "experts", vocab_size=len(tokenizer))
        tokenizer.save_pretrained(model)
        overrides = [*overrides, f"model.path={model}"]
    for step in run_steps(tmp_path, 2, *overrides):  # the second one samples with a B that is not 0
        assert step["mismatch/abs_max"] == 0
        assert step["actor/grad_norm"] > 0


SMALL = {
    "lora.r": "8",
    "optim.lr": "3e-3",
    "trainer.total_training_steps": "2",
    "trainer.save_freq": "1",
    "trainer.val_before_train": "false",
    "trainer.val_max_prompts": "16",
    "trainer.plots": "false",
    "trainer.report": "false",
    "trainer.logger": "[]",
}


def small(tmp_path, name: str, **overrides: str):
    settings = (
        SMALL | {"name": name} | {key.replace("__", "."): value for key, value in overrides.items()}
    )
    return config(tmp_path, *(f"{key}={value}" for key, value in settings.items()))


def run(settings) -> None:
    with open_run(settings) as checkpoint:
        train(settings, checkpoint=checkpoint)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path, monkeypatch, capfd):
    whole, part = small(tmp_path, "whole"), small(tmp_path, "part")
    run(whole)
    original = LocalTrainer.update

    def fails(self, *arguments):
        if self.step == 1:
            raise FloatingPointError("made to fail")
        return original(self, *arguments)

    monkeypatch.setattr(LocalTrainer, "update", fails)
    with pytest.raises(FloatingPointError):
        run(part)
    monkeypatch.undo()
    run(part)
    ends = [
        open_checkpoint(settings.run_dir / "checkpoints" / "step_2") for settings in (whole, part)
    ]
    for key in ("weights", "published", "sampler"):
        assert ends[0].state[key] == ends[1].state[key]
    for name in ("adapter_model.safetensors", "optimizer.pt", "rng.pt"):
        assert ends[0].state["files"][name] == ends[1].state["files"][name]
    resumed = [entry for entry in read_metrics(part.run_dir) if "resume/step" in entry]
    assert [entry["resume/published_equal"] for entry in resumed] == [1.0]
    assert not (ends[0].folder / "model.safetensors").exists()

    for format in ("bf16", "fp32"):
        assert (
            main(
                ["export", f"run={part.run_dir}", f"output={tmp_path / format}", f"format={format}"]
            )
            == 2
        )
        assert "not possible for a run with adapters" in capfd.readouterr().err
    assert main(["export", f"run={part.run_dir}", f"output={tmp_path / 'out'}"]) == 0
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, last = load_file(tmp_path / "out" / name), load_file(part.run_dir / "export" / name)
        assert ours.keys() == last.keys() and all(torch.equal(ours[key], last[key]) for key in ours)
    for folder in (
        tmp_path / "out",
        part.run_dir / "export",
    ):  # peft loads the base that is named there
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(folder.resolve())
    tokens, _ = greedy_in_a_fresh_vllm(
        tmp_path / "out",
        PROMPTS[:2],
        max_tokens=4,
        max_model_len=64,
        adapter=tmp_path / "out" / "adapter",
    )
    assert all(tokens)


def test_a_base_that_changed_is_refused_by_a_resume_and_by_an_export(tmp_path, capfd):
    model = tmp_path / "model"
    shutil.copytree("models/tiny-qwen3", model)
    keys = {"model__path": str(model), "trainer__save_final": "false", "trainer__save_freq": "1"}
    settings = small(tmp_path, "base", **keys, trainer__total_training_steps="1")
    run(settings)
    checkpoint = settings.run_dir / "checkpoints" / "step_1"
    weights, name = load_file(model / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file(
        weights | {name: -weights[name]}, model / "model.safetensors", metadata={"format": "pt"}
    )
    resume = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(checkpoint)}
    with pytest.raises(UserError, match="differ from those that the adapter was trained on"):
        run(small(tmp_path, "longer", **keys, **resume, trainer__total_training_steps="2"))
    assert main(["export", f"run={settings.run_dir}", f"output={tmp_path / 'out'}"]) == 2
    assert "is not the base that the adapter was trained on" in capfd.readouterr().err
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 8


def test_a_run_begins_from_pefts_adapter_and_a_resume_does_not_begin_again(tmp_path):
    folder = save_pefts(ROOT / "models/tiny-qwen3", tmp_path / "peft", r=12, lora_alpha=24)
    keys = {"lora__r": "null", "lora__path": str(folder)}
    settings = small(tmp_path, "begun", **keys)
    trainer = LocalTrainer(settings, prepare_run(settings))
    with trainer.engine:
        trainer.publish()
        stored, stacks = (
            load_file(folder / "adapter_model.safetensors"),
            trainer.engine.adapter._stacks,
        )
        for name, (a, b) in stacks.items():
            mine = [stored[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB"]
            assert torch.equal(a[0, 0, :12].float(), mine[0]) and not a[0, 0, 12:].any()
            assert torch.equal(b[0, 0, :, :12].float(), 2 * mine[1]) and not b[0, 0, :, 12:].any()
        assert trainer.train_step()["mismatch/abs_max"] == 0

    part = small(tmp_path, "part", **keys, trainer__total_training_steps="1")
    run(part)
    saved = load_file(part.run_dir / "checkpoints" / "step_1" / "adapter_model.safetensors")
    assert saved.keys() == stored.keys()
    assert any(not torch.equal(saved[name].float(), stored[name]) for name in stored)
    other = save_pefts(ROOT / "models/tiny-qwen3", tmp_path / "other", seed=2, r=12, lora_alpha=24)
    resume = {
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": str(part.run_dir / "checkpoints" / "step_1"),
    }
    ends = []
    for name, path in (("same", folder), ("another", other)):
        settings = small(tmp_path, name, **{**keys, "lora__path": str(path)}, **resume)
        run(settings)
        ends.append(open_checkpoint(settings.run_dir / "checkpoints" / "step_2").state["weights"])
    assert ends[0] == ends[1]
    export = settings.run_dir / "export"
    config = json.loads((export / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (12, 24)
    tokens, _ = greedy_in_a_fresh_vllm(
        export, PROMPTS[:2], max_tokens=4, max_model_len=64, adapter=export / "adapter"
    )
    assert all(tokens)
