"""Small models and runs for the tests of the memory estimate."""

from __future__ import annotations

from typing import Any

import transformers

from qarl.checks.memory import MemoryEstimate
from qarl.checks.model_size import ModelSize
from qarl.config import Config, build_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"head_dim": 32}),
    "llama with biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (transformers.Qwen2Config, {"head_dim": 32, "num_attention_heads": 2}),
    "qwen3, tied": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3-moe, some layers dense": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
}
SMALL = ModelSize(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=100)


def tiny(family: str) -> Any:
    kind, changes = FAMILIES[family]
    return kind(**SIZES | changes)


def run(**changes: Any) -> Config:
    """A run of the small model: 6 prompts of 2 responses a mini-batch, 20 tokens at most."""
    values: dict[str, Any] = {
        "name": "small",
        "model": {"path": "small"},
        "data": {
            "train_files": "train.jsonl",
            "train_batch_size": 6,
            "max_prompt_length": 8,
            "max_response_length": 12,
        },
        "rollout": {"n": 2, "cpu_kvcache_space_gib": 0.5},
        "quant": {},
        "actor": {
            "ppo_mini_batch_size": 6,
            "ppo_micro_batch_size_per_gpu": 2,
            "log_prob_micro_batch_size_per_gpu": 4,
        },
        "trainer": {"total_training_steps": 1, "val_before_train": False},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})
        if name:
            values[section] = values[section] | {name: value}
        else:
            values[section] = value
    if values["quant"].get("scheme", "w4a16") in ("w4a16", "w4a8"):
        values["quant"] = {"group_size": 32} | values["quant"]
    return build_config(values)


def parts(memory: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.bytes for part in memory.parts}
