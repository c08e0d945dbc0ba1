"""A small random FP32 model of each family that can be trained, and the lengths of a pack of rows."""

from __future__ import annotations

from typing import Any

import torch

LENGTHS = (5, 40, 1, 17)


def random_model(family: str) -> Any:
    """Two layers; where there is a sliding window, in one layer at least, it is 8 tokens."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}
    if family != "falcon":
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kind: Any = transformers.CONFIG_MAPPING[family]
    config = kind(**sizes)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
        if "sliding_attention" in kind(num_hidden_layers=8).layer_types:
            config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()
