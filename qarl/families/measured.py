"""Families that were compared at level `linears` alone, on a random model, and agreed there.

Trainer and engine agree on a family if its mean |δ| (`qarl.metrics.step_metrics`) at level `linears` is at most
`LARGEST_SHARE` of its mean |δ| at `off`, in W4A16. An absolute limit would not work, because a family that scales its
logits down has a small δ even if the two sides compute different models. Llama's share is 0.03.

A family's `linears_mismatch` is from benchmarks/results/families_cpu.json, where Llama has 7.3e-3. A test compares them
with the file.
"""

from __future__ import annotations

from typing import Any

from qarl.families.base import Allowed, Family, any_value, head_size_of_hidden, is_positive, only

LARGEST_SHARE = 0.1


def _windows(value: Any, config: Any) -> bool:
    return set(value or ()) <= {"full_attention", "sliding_attention"}


def _window_or_none(value: Any, config: Any) -> bool:
    return value is None or is_positive(value, config)


def _window_or_full(value: Any, config: Any) -> bool:
    """EXAONE 4: without a window, all layers rotate and attend to all tokens."""
    return is_positive(value, config) or (
        value is None and set(config.layer_types or ()) == {"full_attention"}
    )


_FLAG = only(True, False)
_NORM: dict[str, Allowed] = {"rms_norm_eps": any_value, "head_dim": any_value}
_USUAL: dict[str, Allowed] = {**_NORM, "tie_word_embeddings": _FLAG}
_BIASES: dict[str, Allowed] = {"attention_bias": _FLAG, "mlp_bias": _FLAG}
_LAYERS: dict[str, Allowed] = {
    "layer_types": _windows,
    "sliding_window": is_positive,
    "sliding_window_pattern": any_value,
}
_GEMMA: dict[str, Allowed] = {
    "query_pre_attn_scalar": any_value,
    "final_logit_softcapping": any_value,
    "attention_bias": _FLAG,
    **_LAYERS,
}
_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)

FAMILIES = (
    Family(
        name="arcee",
        linears_mismatch=7.3e-3,
        compared={**_USUAL, **_BIASES},
        vllm_files=("arcee", "llama"),
    ),
    Family(
        name="cohere",
        linears_mismatch=3.1e-4,
        rotates_pairs=True,
        layer_norms=1,
        compared={"layer_norm_eps": any_value, "logit_scale": any_value, "use_qk_norm": _FLAG},
        vllm_files=("commandr",),
    ),
    Family(
        name="cwm",
        linears_mismatch=7.6e-3,
        compared={**_USUAL, "mlp_bias": _FLAG, **_LAYERS},
        vllm_files=("llama",),
    ),
    Family(
        name="ernie4_5",
        linears_mismatch=7.1e-3,
        compared=_USUAL,
        vllm_files=("ernie45", "llama"),
    ),
    Family(
        name="exaone4",
        linears_mismatch=8.2e-3,
        head_norms=True,
        compared={**_USUAL, **_LAYERS, "sliding_window": _window_or_full},
    ),
    Family(
        name="falcon",
        linears_mismatch=3.0e-3,
        layer_norms=1,  # 2 with parallel_attn=false
        packs=False,  # in a pack, rows would even see each other
        adapters=False,
        compared={
            "layer_norm_epsilon": any_value,
            "tie_word_embeddings": _FLAG,
            "bias": _FLAG,
            "parallel_attn": _FLAG,
            "num_kv_heads": any_value,  # not used with multi_query, whose other value is refused
            "ffn_hidden_size": lambda value, config: value == 4 * config.hidden_size,
            "head_dim": head_size_of_hidden,
            "num_ln_in_parallel_attn": only(None),
        },
    ),
    Family(name="gemma", linears_mismatch=8.0e-4, compared=_NORM),
    Family(name="gemma2", linears_mismatch=5.2e-3, layer_norms=4, compared={**_NORM, **_GEMMA}),
    Family(
        name="gemma3_text",
        linears_mismatch=5.5e-3,
        layer_norms=4,
        head_norms=True,
        compared={**_USUAL, **_GEMMA},
        vllm_files=("gemma3",),
        transformers_folder="gemma3",
    ),
    Family(
        name="granite",
        linears_mismatch=1.5e-2,
        compared={**_USUAL, **_BIASES, **dict.fromkeys(_MULTIPLIERS, any_value)},
    ),
    Family(
        name="jais2",
        linears_mismatch=6.0e-3,
        compared={
            "layer_norm_eps": any_value,
            "tie_word_embeddings": _FLAG,
            **_BIASES,
            "head_dim": head_size_of_hidden,
        },
    ),
    Family(
        name="mistral",
        linears_mismatch=7.9e-3,
        compared={**_USUAL, "sliding_window": _window_or_none},
        vllm_files=("mistral", "llama"),
    ),
    Family(
        name="nemotron",
        linears_mismatch=1.8e-2,
        rotates_part=True,
        packs=False,
        compared={
            "norm_eps": any_value,
            "tie_word_embeddings": _FLAG,
            **_BIASES,
            "head_dim": any_value,
        },
    ),
    Family(name="seed_oss", linears_mismatch=7.8e-3, compared=_USUAL),
)
