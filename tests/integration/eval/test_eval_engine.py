"""`qarl eval` on a made-up export beside its BF16 model: the scores are those of a plain vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import load_model
from fresh_vllm import greedy_in_a_fresh_vllm
from transformers import AutoTokenizer

from qarl.__main__ import main
from qarl.checkpoint.model_files import (
    ModelFiles,
    linears_of,
    packed,
    read_tensors,
    save_model,
    write_model,
)
from qarl.config.lora import LoraConfig
from qarl.data.prompts import load_prompts
from qarl.data.rewards import arithmetic
from qarl.lora.layers import Adapters
from qarl.quant import packed_state_dict
from qarl.schemes import get_scheme

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
BF16, FILE, PROMPTS = Path("models/tiny-qwen3"), "data/column_addition/test.parquet", 48
SETTINGS = [
    f"files={FILE}",
    "reward=arithmetic",
    f"limit={PROMPTS}",
    "max_prompt_length=32",
    "max_response_length=80",
]


def scored(command: list[str], output: Path) -> dict[str, dict[str, float]]:
    assert main([*command, f"output={output}"]) == 0
    scores: dict[str, dict[str, float]] = json.loads(output.read_text())["scores"][
        "column_addition"
    ]
    return scores


def accuracy_of_a_fresh_vllm(folder: Path, adapter: Path | None = None) -> float:
    tokenizer = AutoTokenizer.from_pretrained(BF16)
    prompts = load_prompts(FILE, tokenizer=tokenizer, max_prompt_length=32, limit=PROMPTS)
    ids = [prompt.prompt_token_ids for prompt in prompts]
    tokens, _ = greedy_in_a_fresh_vllm(
        folder, ids, max_tokens=80, max_model_len=112, adapter=adapter
    )
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return (
        sum(
            arithmetic("", text, prompt.ground_truth)
            for text, prompt in zip(texts, prompts, strict=True)
        )
        / PROMPTS
    )


def test_a_quantized_model_beside_bf16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scheme, export, output = (
        get_scheme("w4a16", group_size=32),
        tmp_path / "export",
        tmp_path / "scores.json",
    )
    export.mkdir()
    tensors = packed(read_tensors(BF16), scheme, linears_of(BF16, scheme, ["lm_head"]))
    write_model(export, ModelFiles.from_folder(BF16), tensors, scheme=scheme, ignore=["lm_head"])
    command = ["eval", str(export), *SETTINGS]
    found = scored([*command, f"against={BF16}"], output)
    assert f"| column_addition | {PROMPTS} | 1 | " in capfd.readouterr().out
    for folder in (export, BF16):
        assert found[str(folder)]["mean"] == pytest.approx(accuracy_of_a_fresh_vllm(folder))
    assert found["difference"]["mean"] == pytest.approx(
        found[str(export)]["mean"] - found[str(BF16)]["mean"]
    )

    assert main([*command, "n=2"]) == 2
    assert "at temperature 0 would all be the same" in capfd.readouterr().err


def test_an_export_with_an_adapter(tmp_path: Path) -> None:
    model, scheme, export = (
        load_model(BF16),
        get_scheme("w4a16", group_size=32),
        tmp_path / "export",
    )
    adapters = Adapters(model, LoraConfig(r=8), seed=0, base="base")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in adapters.layers.values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) / 32)
    files, tensors = ModelFiles.from_folder(BF16), packed_state_dict(model)
    save_model(
        export, files, tensors, scheme=scheme, ignore=["lm_head"], adapter=adapters.adapter()
    )
    found = scored(["eval", str(export), *SETTINGS], tmp_path / "scores.json")[str(export)]["mean"]
    assert found == pytest.approx(accuracy_of_a_fresh_vllm(export, export / "adapter"))
    assert found != accuracy_of_a_fresh_vllm(export)
