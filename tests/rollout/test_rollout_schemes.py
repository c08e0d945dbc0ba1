"""BF16, W8A8 and FP8 rollouts: publishes into a running vLLM against its own layers and a freshly started vLLM.

W4A16, and what the engine refuses, are in test_rollout.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from fresh_vllm import greedy_in_a_fresh_vllm
from random_models import save_random_model

from qarl.checkpoint.compressed_tensors import ModelFiles, save_model
from qarl.quant import QuantLinear, Scheme, get_scheme, packed_state_dict, quantize_model
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

PROMPTS = [[3 + i % 7, 5, 8 + i % 11, 4] for i in range(16)]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ENGINE_KERNELS = {
    "w4a16": "CPUWNA16LinearKernel",
    "w8a8": "CPUInt8ScaledMMLinearKernel",
    "fp8": "ChannelWiseTorchFP8ScaledMMLinearKernel",
}


class Running(NamedTuple):
    scheme: Scheme
    folder: Path
    engine: RolloutEngine

    def load_model(self, noise_seed: int) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        quantize_model(model, scheme=self.scheme)
        return model

    def greedy(self, max_tokens: int = 24) -> tuple[list[list[int]], list[list[float]]]:
        batch = self.engine.generate(PROMPTS, SamplingConfig(max_tokens, temperature=0.0))
        return batch.response_token_ids, batch.rollout_log_probs


@pytest.fixture(scope="module", params=[pytest.param("bf16", marks=pytest.mark.slow), "w4a16", "w8a8", "fp8"])
def running(request, tmp_path_factory) -> Iterator[Running]:
    """Qwen2 has biases, which each engine kernel adds in its own way."""
    scheme = get_scheme(request.param, 32)
    folder = save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    config = EngineConfig(str(folder), scheme, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        yield Running(scheme, folder, engine)


def test_quant_linear_equals_the_running_engines_layers_bit_for_bit(running):
    """Inputs captured from the engine while it generates, one and many rows; fused layers slice by slice."""
    if not running.scheme.quantized:
        pytest.skip("bf16 has no QuantLinear")
    model = running.load_model(noise_seed=1)
    running.engine.publish(packed_state_dict(model), version=1)
    captured: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    handles = []
    for name, module in running.engine.model().named_modules():
        if name.rpartition(".")[2] in (*FUSED, "o_proj", "down_proj"):
            kernel = getattr(module.scheme, "kernel", None) or module.scheme.fp8_linear
            assert type(kernel).__name__ == ENGINE_KERNELS[running.scheme.name]

            def hook(module, args, output, name=name):
                captured.append((name, args[0].clone(), output[0].clone()))

            handles.append(module.register_forward_hook(hook))
    running.greedy(max_tokens=6)
    running.engine.generate(PROMPTS[:1], SamplingConfig(3, temperature=0.0))
    for handle in handles:
        handle.remove()
    assert len({name for name, _, _ in captured}) == 8
    assert {1, 16} <= {len(x) for _, x, _ in captured}
    for name, x, expected in captured:
        parent, _, leaf = name.rpartition(".")
        layers = [model.get_submodule(f"{parent}.{part}") for part in FUSED.get(leaf, (leaf,))]
        assert all(isinstance(layer, QuantLinear) for layer in layers)
        with torch.no_grad():
            ours = torch.cat([layer(x) for layer in layers], dim=-1)
        assert torch.equal(ours, expected), (name, len(x))


def test_publishes_there_and_back_are_exact(running):
    """Memory is allocated in between: a kernel that points into freed tensors would show."""
    states = {name: list(packed_state_dict(running.load_model(seed))) for seed, name in enumerate("AB")}
    outputs, junk = [], []
    for version, name in enumerate("ABBA"):
        running.engine.publish(states[name], version=version)
        junk += [torch.full((size,), float("nan")) for size in (96, 128, 192, 256) for _ in range(64)]
        outputs.append(running.greedy(max_tokens=12))
    assert outputs[0] == outputs[3] != outputs[1] == outputs[2]


def test_running_engine_equals_a_freshly_started_vllm_on_the_saved_checkpoint(running, tmp_path):
    """A vLLM in a separate process that knows nothing of QaRL loads the folder as it is."""
    from transformers import AutoTokenizer

    model = running.load_model(noise_seed=3)
    running.engine.publish(packed_state_dict(model), version=9)
    tokenizer = AutoTokenizer.from_pretrained(running.folder)
    files, tensors = ModelFiles.of(model, tokenizer), packed_state_dict(model)
    saved = save_model(tmp_path / "export", files, tensors, scheme=running.scheme, ignore=("lm_head",))
    tokens, log_probs = greedy_in_a_fresh_vllm(saved, PROMPTS, max_tokens=24, max_model_len=64)
    assert (tokens, log_probs) == running.greedy()
