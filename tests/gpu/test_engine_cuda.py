"""An engine in the trainer's process on a device: sleep, and a second engine after the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import save_random_model

from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


def test_an_engine_is_rebuilt(tmp_path: Path) -> None:
    """Awake and asleep. The second engine answers as the first."""
    from transformers import AutoModelForCausalLM

    folder = save_random_model(tmp_path / "qwen3", hidden_size=256, intermediate_size=512)
    scheme = get_scheme("w8a8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    quantize_model(model, scheme=scheme)
    answers = []
    config = EngineConfig(
        str(folder), scheme, ("lm_head",), max_model_len=64, gpu_memory_utilization=0.3
    )
    with RolloutEngine(config) as engine:
        for version, asleep in enumerate((False, True, False)):
            engine.publish(packed_state_dict(model), version=version)
            answers.append(
                engine.generate([[3, 4, 5]], SamplingConfig(8, temperature=0.0)).response_token_ids
            )
            if asleep:
                engine.sleep()
            engine.rebuild()
    assert answers[0] == answers[1] == answers[2]
