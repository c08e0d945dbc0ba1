"""The configs that scripts/config_mismatch.py measures: small sizes, rotary types, and one other value of each key.

A test holds the keys to the verdicts of `qarl/align/config_keys.py`: a key that both sides honour has a row in `KEYS`,
and one that is refused a value in `REFUSED_VALUES`.
"""

from __future__ import annotations

from typing import Any

from qarl.align.families import FAMILIES

LEVELS = ("off", "linears", "model", "exact")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Keys of mixtures of experts."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, other betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "yarn, attention_factor": YARN | {"attention_factor": 1.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
}

_SPLIT = ("llama", "qwen3", "qwen3_moe")
_MOE = ("qwen3_moe",)
_WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
KEYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "rms_norm_eps": (FAMILIES, {"rms_norm_eps": 0.01}),
    "rope_theta": (FAMILIES, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "head_dim": (_SPLIT, {"head_dim": 64}),
    "hidden_size": (FAMILIES, {"hidden_size": 256}),
    "intermediate_size": (FAMILIES, {"intermediate_size": 160}),
    "num_attention_heads": (FAMILIES, {"num_attention_heads": 2}),
    "num_key_value_heads": (FAMILIES, {"num_key_value_heads": 4}),
    "num_hidden_layers": (FAMILIES, {"num_hidden_layers": 3}),
    "vocab_size": (FAMILIES, {"vocab_size": 320}),
    "max_position_embeddings": (FAMILIES, {"max_position_embeddings": 256}),
    "tie_word_embeddings": (FAMILIES, {"tie_word_embeddings": True}),
    "attention_bias": (("llama",), {"attention_bias": True}),
    "mlp_bias": (("llama",), {"mlp_bias": True}),
    "sliding_window": (("qwen2", "qwen3"), _WINDOWED),
    "moe_intermediate_size": (_MOE, {"moe_intermediate_size": 96}),
    "norm_topk_prob": (_MOE, {"norm_topk_prob": True}),
    "num_experts_per_tok": (_MOE, {"num_experts_per_tok": 3}),
    "mlp_only_layers": (_MOE, {"mlp_only_layers": [0]}),
}
"""Key -> families and another value than the default, with whatever belongs to it. `max_position_embeddings` changes no
number of a default rotary embedding, and neither does a window that begins after the last layer."""
NO_NUMBERS = ("max_position_embeddings", "sliding_window")
REFUSED_VALUES: dict[str, tuple[tuple[str, ...], Any]] = {
    "bias": (("llama",), True),
    "qkv_bias": (("llama",), True),
    "logit_scale": (("llama",), 0.5),
    "attention_bias": (("qwen3", "qwen3_moe"), True),
    "qk_norm": (("qwen2",), True),
    "head_dim": (("qwen2",), 64),
    "hidden_act": (FAMILIES, "gelu"),
    "is_causal": (FAMILIES, False),
    "use_bidirectional_attention": (FAMILIES, True),
    "sliding_window": (("llama",), 8),
    "layer_types": (FAMILIES, ["sliding_attention", "full_attention"]),
    "attention_chunk_size": (FAMILIES, 16),
    "dual_chunk_attention_config": (FAMILIES, {"chunk_size": 16, "local_size": 8}),
    "num_experts": (_MOE, 0),
    "mlp_only_layers": (_MOE, [0, 1]),
    "decoder_sparse_step": (_MOE, 2),
    "shared_expert_intermediate_size": (_MOE, 96),
    "use_sliding_window": (_MOE, True),
    "output_router_logits": (_MOE, True),
    "head_dtype": (FAMILIES, "float32"),
}


_EPS = {"rms_norm_eps": 0.01}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_LAYERS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
FAMILY_KEYS: dict[str, dict[str, dict[str, Any]]] = {
    "arcee": {"keys": _EPS | _TIED | _BIASES | {"head_dim": 64}},
    "cohere": {"keys": {"layer_norm_eps": 0.01, "logit_scale": 0.5, "use_qk_norm": True}},
    "cwm": {"keys": _EPS | _TIED | _LAYERS | {"head_dim": 64, "mlp_bias": True}},
    "ernie4_5": {"keys": _EPS | _UNTIED | {"head_dim": 64}},
    "exaone4": {
        "keys": _EPS | _TIED | _LAYERS | {"head_dim": 64},
        "no window": {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 2},
    },
    "falcon": {"keys": _UNTIED | {"layer_norm_epsilon": 0.01, "bias": True}, "serial": {"parallel_attn": False}},
    "gemma": {"keys": _EPS | {"head_dim": 64}},
    "gemma2": {
        "keys": _EPS | _LAYERS | {"head_dim": 64, "query_pre_attn_scalar": 64, "final_logit_softcapping": 5.0},
        "biases": {"attention_bias": True},
    },
    "gemma3_text": {
        "keys": _EPS | _LAYERS | {"head_dim": 64, "query_pre_attn_scalar": 64, "final_logit_softcapping": 5.0},
        "biases": _UNTIED | {"attention_bias": True},
    },
    "granite": {
        "keys": _EPS | _TIED | _BIASES | {"head_dim": 64},
        "multipliers": {
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    },
    "jais2": {"keys": _TIED | {"layer_norm_eps": 0.01, "attention_bias": False, "mlp_bias": False}},
    "mistral": {"keys": _EPS | _TIED | {"head_dim": 64, "sliding_window": None}, "window": {"sliding_window": 8}},
    "nemotron": {"keys": _TIED | _BIASES | {"norm_eps": 0.01, "head_dim": 64}},
    "seed_oss": {"keys": _EPS | _TIED | {"head_dim": 64}},
}
"""Family of `SHOWN` -> name of a row -> keys away from their defaults that the row sets together."""


def refused_row(family: str, key: str) -> str:
    """Name of the row of a refused value, beside that of another value that both sides honour."""
    return f"{family} {key}" + " refused" * (family in KEYS.get(key, ((),))[0])


def small_config(model_type: str, **keys: Any) -> Any:
    """A config of `model_type` with those of `SIZES` that the family has and lets one set."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    sizes = {key: value for key, value in (SIZES | EXPERTS).items() if _settable(default, key)}
    if getattr(default, "sliding_window", None) and model_type not in FAMILIES:
        sizes["sliding_window"] = 24
    if model_type in _MOE:  # one layer of experts, one without
        sizes["mlp_only_layers"] = [1]
    return kind(**sizes | keys)


def _settable(config: Any, key: str) -> bool:
    owner = getattr(type(config), key, None)
    return hasattr(config, key) and not (isinstance(owner, property) and owner.fset is None)
