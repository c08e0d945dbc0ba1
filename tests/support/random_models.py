"""Small random models as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_random_model(
    folder: Path, family: str = "qwen3", *, vocab_size: int = 64, tie: bool = False, **settings: Any
) -> Path:
    """A 2-layer random model of `family` with a word-level tokenizer whose size is the model's vocabulary. `settings`:
    other values for keys of its config."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if family != "qwen2":
        sizes["head_dim"] = 32
    if family == "qwen3_moe":
        sizes |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        }
    config: Any = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "llama": transformers.LlamaConfig,
    }[family](**{**sizes, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "mlp.gate.weight")):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size)
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token: t0, t1, ..."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="t1", pad_token="t2", unk_token="t0"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
