"""Families with levels `model` and `exact`: Llama, Qwen2, Qwen3 and Qwen3-MoE.

`qarl.align.model_config` has a verdict on each key of their configs. A family refuses a key that only one side uses,
because the same config would then describe two different models.
"""

from __future__ import annotations

from typing import Any

from qarl.families.base import (
    Family,
    Refusal,
    full_attention,
    head_size_of_hidden,
    is_positive,
    unset,
    unset_or,
)


def _no_window(value: Any, config: Any) -> bool:
    covers = isinstance(value, int) and value >= config.max_position_embeddings
    return not value or bool(getattr(config, "layer_types", None)) or covers


def _some_experts(value: Any, config: Any) -> bool:
    return len(set(value or ()) & set(range(config.num_hidden_layers))) < config.num_hidden_layers


_ALL = {
    "hidden_act": Refusal(
        unset_or(*Family.activations), "vLLM's class supports only the activation silu"
    ),
    "is_causal": Refusal(
        unset_or(True), "vLLM would attend to later tokens, but a policy must be causal"
    ),
    "use_bidirectional_attention": Refusal(
        unset, "vLLM would attend to later tokens, but a policy must be causal"
    ),
    "layer_types": Refusal(full_attention, "the two sides disagree on which layers have windows"),
    "attention_chunk_size": Refusal(
        unset, "vLLM attends in chunks of this size, transformers does not"
    ),
    "dual_chunk_attention_config": Refusal(unset, "vLLM attends in chunks, transformers does not"),
    "head_dtype": Refusal(
        unset_or("bfloat16", "model"), "vLLM computes logits in it, transformers in BF16"
    ),
}
_LLAMA = {
    "bias": Refusal(unset, "vLLM adds biases to q, k, v and o_proj, transformers does not"),
    "qkv_bias": Refusal(unset, "vLLM adds biases to q, k and v_proj, transformers does not"),
    "logit_scale": Refusal(
        unset_or(1.0), "vLLM multiplies the logits by it, transformers does not"
    ),
    "sliding_window": Refusal(
        _no_window,
        "vLLM gives each layer this window, transformers' Llama attends to all tokens",
    ),
}
_QWEN2 = {
    "qk_norm": Refusal(unset, "vLLM normalises queries and keys, transformers does not"),
    "head_dim": Refusal(
        head_size_of_hidden,
        "transformers reads it; vLLM's Qwen2 uses hidden_size / num_attention_heads",
    ),
}
_QWEN3 = {
    "attention_bias": Refusal(
        unset, "transformers adds a bias to o_proj, but vLLM's class has no such parameter"
    ),
}
_EXPERTS = {
    "num_experts": Refusal(is_positive, "vLLM's class needs at least one layer of experts"),
    "mlp_only_layers": Refusal(_some_experts, "vLLM's class needs at least one layer of experts"),
    "decoder_sparse_step": Refusal(
        unset_or(1),
        "vLLM does not map gate_proj and up_proj to one fused layer in the layers without experts",
    ),
    "shared_expert_intermediate_size": Refusal(
        unset, "vLLM adds a shared expert, transformers does not"
    ),
    "use_sliding_window": Refusal(
        unset, "sliding windows were never compared for a mixture of experts"
    ),
    "output_router_logits": Refusal(
        unset, "transformers would add a loss that balances the experts"
    ),
}

FAMILIES = (
    Family(name="llama", aligned=True, plain_head=True, refuses={**_LLAMA, **_ALL}),
    Family(name="qwen2", aligned=True, plain_head=True, qkv_bias=True, refuses={**_QWEN2, **_ALL}),
    Family(
        name="qwen3",
        aligned=True,
        plain_head=True,
        head_norms=True,
        refuses={**_QWEN3, **_ALL},
        vllm_files=("qwen3", "qwen2"),
    ),
    Family(
        name="qwen3_moe",
        aligned=True,
        plain_head=True,
        head_norms=True,
        experts=True,
        refuses={**_QWEN3, **_ALL, **_EXPERTS},
    ),
)
