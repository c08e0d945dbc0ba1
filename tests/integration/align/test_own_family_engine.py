"""δ = 0 of a plugin's family (`tests/support/plugins/one_plus_norm.py`) against a real vLLM with its class of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_tokenizer

from qarl.config.level import Level
from qarl.families import unregister
from qarl.plugins import VARIABLE, load_plugins
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.trainer.batch import make_batch
from qarl.trainer.policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_w4a16_cpu]
NAME = "one_plus_norm"


@pytest.fixture
def plugin() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "")
        load_plugins([str(ROOT / f"tests/support/plugins/{NAME}.py")])
        yield sys.modules[f"qarl_plugin_{NAME}"]
        unregister(NAME)
        del sys.modules[f"qarl_plugin_{NAME}"]
    torch._C.set_num_threads(threads)


def register_with_vllm() -> None:
    """Llama with vLLM's GemmaRMSNorm, by vLLM's registry of models."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    class OnePlusForCausalLM(LlamaForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for name, module in list(self.named_modules()):
                if name.endswith("norm"):
                    norm = GemmaRMSNorm(module.weight.numel(), eps=module.variance_epsilon)
                    self.set_submodule(name, norm.to(module.weight.dtype))

    ModelRegistry.register_model("OnePlusForCausalLM", OnePlusForCausalLM)


def save_model(plugin: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    config = plugin.OnePlusConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = plugin.OnePlusForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, 64)
    return folder


def test_trainer_and_engine_agree_bit_for_bit(plugin, tmp_path):
    register_with_vllm()
    folder = save_model(plugin, tmp_path)
    scheme = get_scheme("w4a16", group_size=32)

    def policy(level: Level) -> Policy:
        model = plugin.OnePlusForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return Policy(model, scheme, ("lm_head",), align=level)

    prompts = [[3 + i, 5, 7 + i] for i in range(8)]
    settings = EngineConfig(str(folder), scheme, ("lm_head",), 64, kv_cache_gib=0.25)
    with RolloutEngine(settings) as engine:
        engine.publish(policy(Level.LINEARS).published_tensors(), version=1)
        rollout = engine.generate(prompts, SamplingConfig(32), seeds=list(range(8)))
    zeros = torch.zeros(8)
    batch = make_batch(rollout, zeros, zeros, pad_token_id=2)
    (rows,) = batch.micro_batches(8)

    def delta(level: Level) -> float:
        with torch.no_grad():
            log_probs = policy(level).response_log_probs(batch, rows, temperature=1.0)
        return float((log_probs - batch.rollout_log_probs)[batch.response_mask].abs().max())

    assert delta(Level.MODEL) == 0 < delta(Level.LINEARS)
