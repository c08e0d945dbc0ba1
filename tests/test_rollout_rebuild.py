"""Engines that a test starts and closes itself: vLLM's process-wide state allows one at a time."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_w4a16_cpu, save_random_model
from engine_helpers import PROMPTS, SCHEME, greedy, load_model

from qarl.errors import UserError
from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]


def test_an_exception_in_the_middle_of_vllms_reload_leaves_the_engine_refusing(tmp_path):
    """vLLM is left half loaded for real: the sixtieth tensor cannot be read. A rebuilt engine works."""
    folder = save_random_model(tmp_path / "qwen3")
    model = load_model(folder)
    config = EngineConfig(str(folder), SCHEME, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)

    class Lost(torch.Tensor):
        """A tensor that passes every check and then fails when vLLM copies it."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                raise RuntimeError("transfer lost")
            return super().__torch_function__(function, types, args, kwargs or {})

    with RolloutEngine(config) as engine:
        engine.publish(packed_state_dict(model), version=1)
        expected = greedy(engine)
        tensors = list(packed_state_dict(model))
        name, tensor = tensors[-3]
        tensors[-3] = (name, tensor.as_subclass(Lost))
        with pytest.raises(RuntimeError, match="transfer lost"):
            engine.publish(tensors, version=5)
        with pytest.raises(UserError, match="publish of version 5 did not complete"):
            engine.generate(PROMPTS, SamplingConfig(4))
    with RolloutEngine(config) as engine:
        engine.publish(packed_state_dict(model), version=6)
        assert greedy(engine) == expected


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
