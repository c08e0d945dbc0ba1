"""`qarl eval` on a made-up export beside its BF16 model: the scores are those of a plain vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from fresh_vllm import greedy_in_a_fresh_vllm
from transformers import AutoTokenizer

from qarl.__main__ import main
from qarl.checkpoint.model_files import ModelFiles, linears_of, packed, read_tensors, write_model
from qarl.data.prompts import load_prompts
from qarl.data.rewards import arithmetic
from qarl.quant.scheme import get_scheme

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
BF16, FILE, PROMPTS = Path("models/tiny-qwen3"), "data/column_addition/test.parquet", 48


def test_a_quantized_model_beside_bf16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scheme, export, output = get_scheme("w4a16", group_size=32), tmp_path / "export", tmp_path / "scores.json"
    export.mkdir()
    tensors = packed(read_tensors(BF16), scheme, linears_of(BF16, scheme, ["lm_head"]))
    write_model(export, ModelFiles.from_folder(BF16), tensors, scheme=scheme, ignore=["lm_head"])
    lengths = ["max_prompt_length=32", "max_response_length=80"]
    command = ["eval", str(export), f"files={FILE}", "reward=arithmetic", f"limit={PROMPTS}", *lengths]
    assert main([*command, f"against={BF16}", f"output={output}"]) == 0
    assert f"| column_addition | {PROMPTS} | 1 | " in capfd.readouterr().out
    found = json.loads(output.read_text())["scores"]["column_addition"]

    tokenizer = AutoTokenizer.from_pretrained(BF16)
    prompts = load_prompts(FILE, tokenizer=tokenizer, max_prompt_length=32, limit=PROMPTS)
    ids = [prompt.prompt_token_ids for prompt in prompts]
    for folder in (export, BF16):
        tokens, _ = greedy_in_a_fresh_vllm(folder, ids, max_tokens=80, max_model_len=112)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        right = [arithmetic("", text, prompt.ground_truth) for text, prompt in zip(texts, prompts, strict=True)]
        assert found[str(folder)]["mean"] == pytest.approx(sum(right) / PROMPTS)
    assert found["difference"]["mean"] == pytest.approx(found[str(export)]["mean"] - found[str(BF16)]["mean"])

    assert main([*command, "n=2"]) == 2
    assert "at temperature 0 would all be the same" in capfd.readouterr().err
