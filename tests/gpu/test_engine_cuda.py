"""An engine in the trainer's process on a device: sleep, a second engine after the first, and experts at `model`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.align import align_model
from qarl.quant import get_scheme, packed_state_dict, quantize_model
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.schemes.kernel_choice import KernelChoice

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


def test_an_engine_is_rebuilt(tmp_path: Path) -> None:
    """Awake and asleep. The second engine answers as the first."""
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


@pytest.mark.parametrize(
    ("scheme", "kernels"), [("w4a16", "qarl"), ("w8a8", "qarl"), ("fp8", "qarl"), ("fp8", "engine")]
)
def test_experts_at_level_model(tmp_path: Path, scheme: str, kernels: str) -> None:
    """δ of one batch of a random mixture of experts, before any update: heads of 128, and a hidden size of 512."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "head_dim": 128}
    folder = save_random_model(tmp_path / "experts", "qwen3_moe", **sizes)
    ignore = ("lm_head", "re:.*[.]mlp[.]gate$")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    choice, quantization = KernelChoice(kernels), get_scheme(scheme, 128)
    quantize_model(model, scheme=quantization, ignore=ignore, kernels=choice)
    assert align_model(model, "model").level == "model"
    config = EngineConfig(
        str(folder),
        quantization,
        ignore,
        max_model_len=128,
        gpu_memory_utilization=0.3,
        aligned=True,
        kernels=choice,
    )
    prompts = [[3 + i % 40, 4, 5 + i % 7] for i in range(64)]
    with RolloutEngine(config) as engine:
        engine.publish(packed_state_dict(model, stacks=True), version=0)
        batch = engine.generate(prompts, SamplingConfig(64), seeds=list(range(64)))
    largest = 0.0
    for prompt, response, sampled in zip(
        prompts, batch.response_token_ids, batch.rollout_log_probs, strict=True
    ):
        row = torch.tensor([[*prompt, *response]], device="cuda")
        with torch.no_grad():
            logits = model(row).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
        largest = max(largest, float((own.cpu() - torch.tensor(sampled)).abs().max()))
    assert largest <= 1e-5
