"""The rows that scripts/family_keys.py measures: optional keys of each family's config class, and pairs of rotary keys.

A row is a name and the keys of config.json that it sets away from their defaults, in a small model. The keys are read
from the installed transformers: a key for which no value is written below ends the script and fails a test.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from typing import Any

from qarl.align.config_keys import REFUSED, UNREAD, read_keys
from qarl.align.config_keys import SIZES as SIZE_KEYS
from qarl.align.families import FAMILIES, SHOWN

ALL = (*FAMILIES, *SHOWN)
LEVELS = ("off", "linears", "model", "exact")
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": 256,
    "bos_token_id": 258,
    "eos_token_id": 257,
}
"""Sizes that W4A16's kernels take, with the vocabulary of the quickstart's tokenizer."""
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
OTHER_SIZES: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}

_WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def _by_layer(full: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": {"rope_theta": 10000.0} | full, "sliding_attention": local}


VALUES: dict[str, Any] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 0.01),
    **dict.fromkeys(("logit_scale", "residual_multiplier"), 0.5),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation"), "relu"),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), 5.0),
    **dict.fromkeys(("use_bidirectional_attention", "bias", "qkv_bias", "qk_norm", "is_matryoshka"), True),
    "is_causal": False,
    "head_dim": 64,
    "embedding_multiplier": 4.0,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
    "query_pre_attn_scalar": 64,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_heads": 2,
    "ffn_hidden_size": 256,
    "num_ln_in_parallel_attn": 1,
    "attention_chunk_size": 16,
    "dual_chunk_attention_config": {"chunk_size": 16, "local_size": 8},
    "head_dtype": "float32",
    "moe_intermediate_size": 96,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "shared_expert_intermediate_size": 96,
}
"""Key -> another value than its default. A key with a default of true or false has the other one."""
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2": (_WINDOWED, _WINDOWED | {"max_window_layers": 2}),
    "qwen3": (_WINDOWED, _WINDOWED | {"max_window_layers": 2}),
    "qwen3_moe": ({"num_experts": 0}, {"mlp_only_layers": [0, 1]}),
    "mistral": ({"sliding_window": None},),
    "cwm": ({"layer_types": ["full_attention", "full_attention"]},),
    "exaone4": (
        {"layer_types": ["full_attention"] * 2, "sliding_window": None, "sliding_window_pattern": None},
        {"sliding_window": None},
    ),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"parallel_attn": False, "bias": True},
        {"alibi": True, "parallel_attn": False},
        {"multi_query": False, "num_kv_heads": 2},
    ),
    "gemma3_text": (
        {"layer_types": ["full_attention"] * 2},
        {"rope_parameters": _by_layer({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})},
        {"rope_parameters": _by_layer({"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0}, 100.0)},
        {"rope_parameters": _by_layer({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})},
        {"rope_parameters": _by_layer({"rope_type": "default", "partial_rotary_factor": 0.5})},
    ),
    "granite": (
        {
            "embedding_multiplier": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "jais2": ({"attention_bias": False, "mlp_bias": False},),
    "seed_oss": ({"attention_bias": False, "attention_out_bias": True},),
}
"""Family -> further values, and keys that act only together."""

THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONG,
    "proportional": {"rope_type": "proportional"},
}
SCALING: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"factor": {"factor": 8.0}},
    "dynamic": {"alpha": {"alpha": 1000.0}},
    "yarn": {
        "factor": {"factor": 8.0},
        "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
        "truncate": {"truncate": False},
        "attention_factor": {"attention_factor": 2.0},
        "attn_factor": {"attn_factor": 1.3},
        "mscale": {"mscale": 2.0, "mscale_all_dim": 1.0},
    },
    "llama3": {"factors": {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0}},
    "longrope": {"attention_factor": {"attention_factor": 2.0}},
}
"""Type of rotary embedding -> name -> its own factors, away from those of `TYPES`."""
PAIRED = {"rope_theta": {"rope_theta": 100.0}, "partial_rotary_factor": {"partial_rotary_factor": 0.5}}
"""Keys that are paired with every type."""


def optional_keys(family: str) -> list[str]:
    """Return the keys of the family's config class that a forward may read, without sizes and rotary parameters."""
    import transformers

    kind = transformers.CONFIG_MAPPING[family]
    general = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    names = [field.name for field in dataclasses.fields(kind)]
    own = [name for name in names if name not in general or name in kind.__annotations__]
    return [name for name in own if name not in SIZE_KEYS | UNREAD and not name.startswith("_")]


def engine_keys(family: str) -> list[str]:
    """Return the keys without a field in the config class that vLLM or transformers reads all the same."""
    read = read_keys(family)
    found = [key for key, refusal in REFUSED.items() if family in refusal.families or (family in SHOWN and key in read)]
    return [key for key in found if key not in optional_keys(family) and key in VALUES]


@cache
def rows(family: str) -> dict[str, dict[str, Any]]:
    """Return name of a row -> keys of config.json. The row "defaults" sets none."""
    import transformers

    default = transformers.CONFIG_MAPPING[family]()
    found: dict[str, dict[str, Any]] = {"defaults": {}}
    sizes = {key: value for key, value in OTHER_SIZES.items() if _settable(default, key)}
    found["sizes"] = sizes
    changes: list[dict[str, Any]] = []
    for key in (*optional_keys(family), *engine_keys(family)):
        usual = getattr(default, key, None)
        if key not in VALUES and not isinstance(usual, bool):
            raise KeyError(f"{family}: write another value than {usual!r} for {key} into VALUES")
        changes.append({key: not usual if isinstance(usual, bool) else VALUES[key]})
    found |= {label(change): change for change in (*changes, *MORE.get(family, ()))}
    return found | rotary_rows()


def label(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in changes.items())


@cache
def rotary_rows() -> dict[str, dict[str, Any]]:
    """Each type of rotary embedding alone, with each of `PAIRED`, with its own factors, and both of `PAIRED`."""
    found: dict[str, dict[str, Any]] = {}
    for kind, keys in TYPES.items():
        found |= {f"rotary {kind}": keys} if kind != "default" else {}
        found |= {f"rotary {kind}, {name}": keys | more for name, more in (PAIRED | SCALING.get(kind, {})).items()}
    found["rotary default, both"] = TYPES["default"] | PAIRED["rope_theta"] | PAIRED["partial_rotary_factor"]
    return {name: {"rope_parameters": THETA | keys} for name, keys in found.items()}


def content(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of a small model of `family` with `changes`."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    default = CONFIG_MAPPING[family]()
    sizes = {key: value for key, value in (SIZES | EXPERTS).items() if _settable(default, key)}
    for alias, key in type(default).attribute_map.items():  # the other name would undo the change
        if alias in changes or key in changes:
            sizes = {name: value for name, value in sizes.items() if name not in (alias, key)}
    if getattr(default, "sliding_window", None) and family not in FAMILIES:
        sizes["sliding_window"] = 24
    if family == "qwen2":
        sizes["vocab_size"] = 289  # transformers' tokenizer for this family adds <|endoftext|>
    if family == "qwen3_moe":
        sizes["mlp_only_layers"] = [1]
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    name = found[0] if isinstance(found, tuple | list) else found
    return {"model_type": family, "architectures": [name], "dtype": "bfloat16", **sizes, **changes}


def small_config(family: str, **changes: Any) -> Any:
    """Return the config that transformers makes of `content`."""
    from transformers import CONFIG_MAPPING

    keys = copy.deepcopy(content(family, changes))  # a config class may write into a nested value
    return CONFIG_MAPPING[family](**{key: value for key, value in keys.items() if key != "dtype"})


def _settable(config: Any, key: str) -> bool:
    owner = getattr(type(config), key, None)
    return hasattr(config, key) and not (isinstance(owner, property) and owner.fset is None)
