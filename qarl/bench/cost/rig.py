"""Small models of random weights on which ceilings are measured: on the trainer's side, in the engine, or both.

Their sizes are none of a public model's, so that a prediction is one for sizes that were not measured. Weights of one
rig together are larger than a CPU's last-level cache: in a real model every product finds its weight in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine

MODEL_LEN = 1024


@dataclass(frozen=True)
class RigSize:
    """A Llama-like model; `kind` is llama or qwen3 (norms of queries and keys)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str = "qwen3"
    tied: bool = False
    head_dim: int = 64


PRODUCTS = RigSize(layers=8, hidden=640, intermediate=2304, heads=10, kv_heads=5, vocab=8192)
"""For the matrix products: 45M weights in linears."""
TINY = RigSize(layers=1, hidden=64, intermediate=128, heads=2, kv_heads=1, vocab=1024)
"""For what a step costs without any work; see `qarl.bench.cost.measure_engine`."""


def transformers_config(size: RigSize) -> Any:
    import transformers

    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[size.kind]
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[size.kind]
    return kind(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=4 * MODEL_LEN,
        tie_word_embeddings=size.tied,
        architectures=[architecture],
        dtype="bfloat16",
    )


def make_model(size: RigSize) -> Any:
    """A transformers model in BF16, random weights."""
    import transformers

    config = transformers_config(size)
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    return model.eval()


def make_engine(folder: Path, size: RigSize, scheme: str) -> RolloutEngine:
    """A stale engine; `folder` receives config and tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models

    transformers_config(size).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", unk_token="t0").save_pretrained(folder)
    config = EngineConfig(str(folder), get_scheme(scheme), ("lm_head",), max_model_len=MODEL_LEN, kv_cache_gib=0.25)
    return RolloutEngine(config)
