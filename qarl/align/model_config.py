"""Check that trainer and engine treat every key of a model's config in the same way.

If only one side uses a key, the same config describes two different models. scripts/config_keys.py writes the list of
the keys that vLLM or transformers reads, `config_keys_read.json`. Every key that is read for Llama, Qwen2, Qwen3 or
Qwen3-MoE is assigned to one of four groups:

    both      both sides use the key
    rotary    the key belongs to the rotary embedding, which is run on both sides and compared (`qarl.align.rotary`)
    neither   no forward of these families reads the key
    refused   only one side uses the key, so values that have an effect are refused before anything runs

For families in `SHOWN` the rule refuses by default. A key must have the default of the family's config class, unless it
is in `SIZES` or no forward reads it, or `COMPARED` allows its value. `python -m benchmarks.proofs family_keys` measures
the rows behind `COMPARED`. A key that neither side reads and no config class has is refused, unless it is null or one
of `BOOKKEEPING`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from qarl.align.families import FAMILIES, SHOWN
from qarl.align.rotary import head_size_of, is_plain, match_rotary
from qarl.errors import UserError
from qarl.process import vllm_unusable

TABLE = Path(__file__).with_name("config_keys_read.json")
SIZES = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    ]
)
"""Keys whose value is the shape of a parameter on both sides, or a limit on positions."""

Allowed = Callable[[Any, Any], bool]
"""(value, config) -> whether both sides compute the same with it."""


def _any(value: Any, config: Any) -> bool:
    return True


def _only(*values: Any) -> Allowed:
    return lambda value, config: value in values


def _head_size_of_hidden(value: Any, config: Any) -> bool:
    return value is None or bool(value * config.num_attention_heads == config.hidden_size)


def _windows(value: Any, config: Any) -> bool:
    return set(value or ()) <= {"full_attention", "sliding_attention"}


def _is_positive(value: Any, config: Any) -> bool:
    return isinstance(value, int) and value > 0


def _window_or_none(value: Any, config: Any) -> bool:
    return value is None or _is_positive(value, config)


def _window_or_full(value: Any, config: Any) -> bool:
    """EXAONE 4: without a window, all layers rotate and attend to all tokens."""
    return _is_positive(value, config) or (
        value is None and set(config.layer_types or ()) == {"full_attention"}
    )


_FLAG = _only(True, False)
_NORM: dict[str, Allowed] = {"rms_norm_eps": _any, "head_dim": _any}
_USUAL: dict[str, Allowed] = {**_NORM, "tie_word_embeddings": _FLAG}
_BIASES: dict[str, Allowed] = {"attention_bias": _FLAG, "mlp_bias": _FLAG}
_LAYERS: dict[str, Allowed] = {
    "layer_types": _windows,
    "sliding_window": _is_positive,
    "sliding_window_pattern": _any,
}
_GEMMA: dict[str, Allowed] = {
    "query_pre_attn_scalar": _any,
    "final_logit_softcapping": _any,
    "attention_bias": _FLAG,
    **_LAYERS,
}
_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
COMPARED: dict[str, dict[str, Allowed]] = {
    "arcee": {**_USUAL, **_BIASES},
    "cohere": {"layer_norm_eps": _any, "logit_scale": _any, "use_qk_norm": _FLAG},
    "cwm": {**_USUAL, "mlp_bias": _FLAG, **_LAYERS},
    "ernie4_5": _USUAL,
    "exaone4": {**_USUAL, **_LAYERS, "sliding_window": _window_or_full},
    "falcon": {
        "layer_norm_epsilon": _any,
        "tie_word_embeddings": _FLAG,
        "bias": _FLAG,
        "parallel_attn": _FLAG,
        "num_kv_heads": _any,  # not used with multi_query, whose other value is refused
        "ffn_hidden_size": lambda value, config: value == 4 * config.hidden_size,
        "head_dim": _head_size_of_hidden,
        "num_ln_in_parallel_attn": _only(None),
    },
    "gemma": _NORM,
    "gemma2": {**_NORM, **_GEMMA},
    "gemma3_text": {**_USUAL, **_GEMMA},
    "granite": {**_USUAL, **_BIASES, **dict.fromkeys(_MULTIPLIERS, _any)},
    "jais2": {
        "layer_norm_eps": _any,
        "tie_word_embeddings": _FLAG,
        **_BIASES,
        "head_dim": _head_size_of_hidden,
    },
    "mistral": {**_USUAL, "sliding_window": _window_or_none},
    "nemotron": {"norm_eps": _any, "tie_word_embeddings": _FLAG, **_BIASES, "head_dim": _any},
    "seed_oss": _USUAL,
}
"""Family -> keys whose values both sides honour. benchmarks/results/family_keys_cpu.json has the measured rows."""

_ROPE_KEYS = frozenset(
    [
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "short_factor",
        "truncate",
        "type",
    ]
)
"""Keys of `rope_parameters` that both sides' embeddings read, so that the comparison of rotations sees them."""


@cache
def read_keys(family: str) -> frozenset[str]:
    """Return the keys that vLLM or transformers reads for `family`, without those inside `rope_parameters`."""
    families = json.loads(TABLE.read_text())["families"]
    sides = (
        *families["llama"].values(),
        *families[family].values(),
    )  # Llama's list has the files that all share
    return frozenset(
        key for side in sides for key in side if not key.startswith("rope_parameters.")
    )


def check_compared_keys(config: Any, unread: Collection[str]) -> None:
    """Raise UserError if a key of this family's config has a value that was never compared.

    `unread`: keys that no forward reads, or that the comparison of the rotary embeddings covers.
    """
    family = config.model_type
    if family not in SHOWN:
        return
    usual = type(config)()
    allowed = COMPARED[family]
    for key in sorted(read_keys(family) - SIZES - set(unread)):
        value = getattr(config, key, None)
        default = getattr(usual, key, None)
        if value == default or (default is None and value is False and key != "is_causal"):
            continue
        if key in ("is_causal", "is_decoder") and value is True:
            continue
        if key == "layer_types" and default is None and set(value or ()) == {"full_attention"}:
            continue
        if key not in allowed or not allowed[key](value, config):
            raise _never_compared(family, key, value, default)
    _check_rope_keys(config)


def _check_rope_keys(config: Any) -> None:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    factor = getattr(config, "partial_rotary_factor", None)
    if factor not in (None, 1.0, parameters.get("partial_rotary_factor")):
        raise _never_compared(config.model_type, "partial_rotary_factor", factor, None)
    if by_layer(parameters):
        for name, part in parameters.items():
            if part is None or (name, part) == ("rope_type", "default"):  # transformers adds them
                continue
            part = part if isinstance(part, Mapping) else {name: part}
            plain = part.get("rope_type", "default") in ("default", "linear")
            if not plain or set(part) - {"rope_type", "rope_theta", "factor"}:
                raise _never_compared(config.model_type, f"rope_parameters.{name}", part, "default")
        return
    for key in parameters:
        if key not in _ROPE_KEYS:
            raise _never_compared(
                config.model_type, f"rope_parameters.{key}", parameters[key], None
            )


def by_layer(parameters: Mapping[str, Any]) -> bool:
    """Return whether `rope_parameters` has one entry for each type of layer, as Gemma 3's."""
    return any(
        isinstance(part, Mapping)
        for name, part in parameters.items()
        if name.endswith("_attention")
    )


def _never_compared(family: str, key: str, value: Any, default: Any) -> UserError:
    why = f"trainer and rollout engine were compared only with {key}={default!r}; with another value they may "
    return _refused(family, key, value, f"{why}compute different models")


def _refused(family: str, key: str, value: Any, why: str) -> UserError:
    return UserError(
        f"{key}={value!r} in a config of {family} is refused",
        where="model.path: config.json",
        why=why,
        fix="train a model whose config does not have this setting; deleting it from config.json would change "
        "what the model computes",
    )


ENGINE_ACTIVATIONS = ("silu",)


class Refusal(NamedTuple):
    """A config key that is refused in configs of `families`, unless its value has no effect.

    `harmless(value, config)` returns whether a value has no effect. `why`: the reason that the error shows.
    """

    families: tuple[str, ...]
    harmless: Allowed
    why: str


def _unset(value: Any, config: Any) -> bool:
    return not value


def _is(*values: Any) -> Allowed:
    return lambda value, config: value is None or value in values


def _full_attention(value: Any, config: Any) -> bool:
    return not set(value or ()) - {"full_attention"}


def _no_window(value: Any, config: Any) -> bool:
    covers = isinstance(value, int) and value >= config.max_position_embeddings
    return not value or bool(getattr(config, "layer_types", None)) or covers


def _some_experts(value: Any, config: Any) -> bool:
    return len(set(value or ()) & set(range(config.num_hidden_layers))) < config.num_hidden_layers


_MOE = ("qwen3_moe",)
REFUSED: dict[str, Refusal] = {
    "bias": Refusal(
        ("llama",), _unset, "vLLM adds biases to q, k, v and o_proj, transformers does not"
    ),
    "qkv_bias": Refusal(
        ("llama",), _unset, "vLLM adds biases to q, k and v_proj, transformers does not"
    ),
    "logit_scale": Refusal(
        ("llama",), _is(1.0), "vLLM multiplies the logits by it, transformers does not"
    ),
    "attention_bias": Refusal(
        ("qwen3", "qwen3_moe"),
        _unset,
        "transformers adds a bias to o_proj, but vLLM's class has no such parameter",
    ),
    "qk_norm": Refusal(
        ("qwen2",), _unset, "vLLM normalises queries and keys, transformers does not"
    ),
    "head_dim": Refusal(
        ("qwen2",),
        _head_size_of_hidden,
        "transformers reads it; vLLM's Qwen2 uses hidden_size / num_attention_heads",
    ),
    "hidden_act": Refusal(
        FAMILIES, _is(*ENGINE_ACTIVATIONS), "vLLM's class supports only the activation silu"
    ),
    "is_causal": Refusal(
        FAMILIES, _is(True), "vLLM would attend to later tokens, but a policy must be causal"
    ),
    "use_bidirectional_attention": Refusal(
        FAMILIES, _unset, "vLLM would attend to later tokens, but a policy must be causal"
    ),
    "sliding_window": Refusal(
        ("llama",),
        _no_window,
        "vLLM gives each layer this window, transformers' Llama attends to all tokens",
    ),
    "layer_types": Refusal(
        FAMILIES, _full_attention, "the two sides disagree on which layers have windows"
    ),
    "attention_chunk_size": Refusal(
        FAMILIES, _unset, "vLLM attends in chunks of this size, transformers does not"
    ),
    "dual_chunk_attention_config": Refusal(
        FAMILIES, _unset, "vLLM attends in chunks, transformers does not"
    ),
    "num_experts": Refusal(_MOE, _is_positive, "vLLM's class needs at least one layer of experts"),
    "mlp_only_layers": Refusal(
        _MOE, _some_experts, "vLLM's class needs at least one layer of experts"
    ),
    "decoder_sparse_step": Refusal(
        _MOE,
        _is(1),
        "vLLM does not map gate_proj and up_proj to one fused layer in the layers without experts",
    ),
    "shared_expert_intermediate_size": Refusal(
        _MOE, _unset, "vLLM adds a shared expert, transformers does not"
    ),
    "use_sliding_window": Refusal(
        _MOE, _unset, "sliding windows were never compared for a mixture of experts"
    ),
    "output_router_logits": Refusal(
        _MOE, _unset, "transformers would add a loss that balances the experts"
    ),
    "head_dtype": Refusal(
        FAMILIES, _is("bfloat16", "model"), "vLLM computes logits in it, transformers in BF16"
    ),
}

_OTHERS = "neither: it belongs to encoders, state-space or multimodal models, or is an old name of such a key"
_LOADING = "neither: only code that loads, tokenizes or generates reads it, not the forward"
_TRAINING = "neither: it is for dropout (set to 0), for initializing new weights, or for a loss that is not used"
_WINDOWS = "both: layer_types is computed from it"
_ROTARY = "rotary: the rotations of both sides are compared"
_KEYS: dict[str, str] = {
    "both": "attention_bias head_dim hidden_size intermediate_size max_position_embeddings mlp_bias "
    "moe_intermediate_size norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers "
    "num_key_value_heads rms_norm_eps tie_word_embeddings vocab_size",
    _WINDOWS: "sliding_window max_window_layers use_sliding_window",
    _ROTARY: "rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings "
    "max_trained_positions rotary_emb_dim rotary_emb_interleaved rotary_emb_scale_base xdrope_section",
    _LOADING: "architectures bos_token_id eos_token_id pad_token_id dtype use_cache model_type name_or_path "
    "sub_configs text_config to_diff_dict standardize_rope_params validate_rope model_max_length quantization_config "
    "compression_config method model is_heterogeneous",
    _TRAINING: "attention_dropout initializer_range pretraining_tp router_aux_loss_coef",
    _OTHERS: "activation_function attention_head_dim attn_config attn_type_list backbone_hidden_size block_configs "
    "canvas_length chunk_size classifier_from_token compilation_config compress_ratios embedding_size encoder "
    "encoder_config hc_count hidden_size_per_head index_topk indexer_n_heads is_decoder is_encoder_decoder "
    "is_matryoshka is_mm_prefix_lm is_original_qwen3_reranker kv_lora_rank language_config layer_norm_eps "
    "layer_norm_epsilon layers_block_type llm_config mamba_chunk_size mamba_ssm_cache_dtype mamba_ssm_dtype "
    "matryoshka_dimensions mlp_fc1_bias mlp_fc2_bias mtp_num_hidden_layers multi_query n_embd n_inner n_layer "
    "n_predict new_decoder_architecture num_labels num_nextn_predict_layers patch_size per_layer_config ple_layer_ids "
    "pooling position_embedding_type qk_nope_head_dim qkv_proj_bias retrieval_attention_contract rotary_kwargs "
    "rswa_window target_layer_count thinker_config transf_decoder use_pad_token use_sep_token vision_config",
}
VERDICTS = {key: verdict for verdict, keys in _KEYS.items() for key in keys.split()}
"""Key -> verdict `both`, `rotary` or `neither`, with a reason. A `Refusal` for the model's family overrides it."""

BOOKKEEPING: dict[str, Allowed] = {
    **dict.fromkeys(
        ("auto_map", "keys_to_ignore_at_inference", "tokenizer_class", "torch_dtype"), _any
    ),
    "attn_implementation": _any,  # verl puts it into the config that it loads
    **dict.fromkeys(
        ("finetuning_task", "pruned_heads", "task_specific_params", "torchscript"), _any
    ),
    **dict.fromkeys(
        ("unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config"), _any
    ),
    "use_mrope": _unset,
    "rope_interleaved": _unset,
}
"""Keys of published configs (Qwen2.5, SmolLM2, models saved by Unsloth) that no config class has and no forward reads,
with the values that change nothing. The last two name other rotary embeddings."""

UNREAD = frozenset(
    key for key, verdict in VERDICTS.items() if verdict in (_LOADING, _TRAINING, _ROTARY)
) | {
    "num_labels",
    "hidden_dropout",
    "residual_dropout",
}


DECIDE_NOTHING = frozenset(
    key for key, reason in VERDICTS.items() if reason in (_LOADING, _TRAINING)
)
"""Keys that change nothing of a forward."""


def verdict(family: str, key: str) -> str | None:
    """Return `both`, `rotary`, `neither` or `refused`, with a reason, or None if the key is in no group."""
    if key in REFUSED and family in REFUSED[key].families:
        return f"refused: {REFUSED[key].why}"
    if key.startswith("rope_parameters."):
        return _ROTARY
    return VERDICTS.get(
        key, "neither: the class of this family does not read it" if key in REFUSED else None
    )


@cache
def _known_keys(kind: Any) -> frozenset[str]:
    """Return the keys of a config class, those with a verdict, and those that only bookkeeping or generation reads."""
    from transformers import GenerationConfig

    own = vars(kind()).keys() | kind.attribute_map.keys()
    read = read_keys(kind.model_type) | VERDICTS.keys() | REFUSED.keys()
    return frozenset(own | read | BOOKKEEPING.keys() | GenerationConfig().to_dict().keys())


def check_known_keys(config: Any) -> None:
    """Raise UserError if a config of a trained family has a key that nobody knows, with another value than null.

    Neither transformers nor vLLM reads it, so both compute the same, but perhaps not the model that was published: a
    later release of the family may have a new layer (`use_gated_attention`) that both leave out."""
    if config.model_type not in (*FAMILIES, *SHOWN):
        return
    kind: Any = type(config)
    known = _known_keys(kind)
    for key, value in sorted(vars(config).items()):
        harmless = key in BOOKKEEPING and BOOKKEEPING[key](value, config)
        if (
            value is None
            or key.startswith("_")
            or harmless
            or (key in known and key not in BOOKKEEPING)
        ):
            continue
        raise UserError(
            f"{key}={value!r} in a config of {config.model_type} is an unknown key",
            where="model.path: config.json",
            why="neither trainer nor engine reads it, so both would compute a model without what it stands for",
            fix="train another model; or remove the key from config.json, if it changes nothing in the model",
        )


def check_config_keys(config: Any) -> None:
    """Raise UserError if the config has an unknown key, or a refused one with a value that has an effect.

    The error names the side that ignores the key. In a config of a family in `SHOWN`, every value that was never
    compared is refused (`qarl.align.model_config`). Configs of other families pass; `check_family` refuses them.
    """
    check_known_keys(config)
    if config.model_type not in FAMILIES:
        check_compared_keys(config, UNREAD)
        if config.model_type in SHOWN and not by_layer(
            getattr(config, "rope_parameters", None) or {}
        ):
            check_rotary(config)
        return
    for key, refusal in REFUSED.items():
        value = getattr(config, key, None)
        if config.model_type in refusal.families and not refusal.harmless(value, config):
            raise _refused(config.model_type, key, value, refusal.why)
    check_rotary(config)


def check_rotary(config: Any) -> None:
    """Raise UserError if the rotary embeddings of the two sides differ. If vLLM cannot build its own, do nothing."""
    if is_plain(config) or vllm_unusable():
        return
    parameters = dict(config.rope_parameters or {})
    where = f"model.path: rope_parameters in config.json: {parameters}"
    fix = "train a model with a different rotary embedding"
    unlike = "trainer and rollout engine would compute different rotary embeddings from this config"
    if "mrope_section" in parameters:
        raise UserError(
            unlike,
            where=where,
            why="vLLM uses three positions per token, but transformers one",
            fix=fix,
        )
    try:
        match = match_rotary(config)
    except Exception as error:  # each rotary class of vLLM raises its own errors for missing keys
        why = f"one side cannot create its embedding: {type(error).__name__}: {error}"
        raise UserError(unlike, where=where, why=why, fix=fix) from error
    if not match.near:
        head = head_size_of(config)
        why = (
            f"for a query of {head} dimensions, vLLM's {match.engine} and transformers differ by {match.error:.0%} of "
            "its length, so only one side honours one of these keys"
        )
        raise UserError(unlike, where=where, why=why, fix=fix)
