"""Engines that a test starts and closes itself: vLLM's process-wide state allows one at a time."""

from __future__ import annotations

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, load_model
from random_models import save_random_model

from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


@pytest.mark.parametrize(("family", "tie"), [("qwen2", True), ("llama", False)])
def test_other_families_with_biases_and_tied_embeddings(tmp_path, family, tie):
    """The trainer's log-probs against what vLLM sampled with, aligned and not."""
    from transformers import AutoModelForCausalLM

    folder = save_random_model(tmp_path / family, family, tie=tie)
    model = load_model(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = EngineConfig(str(folder), SCHEME, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        engine.publish(packed_state_dict(model), version=1)
        batch = engine.generate(PROMPTS, SamplingConfig(24), seeds=list(range(16)))

    def distance(trainer: torch.nn.Module) -> float:
        deltas = []
        for prompt, response, log_probs in zip(
            batch.prompt_token_ids, batch.response_token_ids, batch.rollout_log_probs, strict=True
        ):
            with torch.no_grad():
                logits = trainer(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
            ours = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            deltas.append((ours - torch.tensor(log_probs)).abs())
        return float(torch.cat(deltas).mean())

    assert distance(model) < distance(plain) / 3
