"""Check that trainer and engine treat every key of a model's config in the same way.

If only one side uses a key, the same config describes two different models. scripts/config_keys.py writes the list of
the keys that vLLM or transformers reads, `config_keys_read.json`. Every key that is read for a family of
`qarl.families.aligned` is assigned to one of four groups:

    both      both sides use the key
    rotary    the key belongs to the rotary embedding, which is run on both sides and compared (`qarl.align.rotary`)
    neither   no forward of these families reads the key
    refused   only one side uses the key, so values that have an effect are refused before anything runs

A family says itself what it refuses, and why, and what becomes of keys that only it has (`qarl.families.aligned`).
`qarl.align.compared_keys` has the rule for the families that were compared only at `linears`. A key that neither side
reads and no config class has is refused, unless it is null or one of `BOOKKEEPING`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from qarl.align.compared_keys import by_layer, check_compared_keys, read_keys, refused_value
from qarl.align.rotary import head_size_of, is_plain, match_rotary
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED, family_named, family_of
from qarl.families.base import Allowed, any_value, unset
from qarl.process import vllm_unusable

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
"""Key -> verdict `both`, `rotary` or `neither`, with a reason. What the model's family says overrides it."""

BOOKKEEPING: dict[str, Allowed] = {
    **dict.fromkeys(
        ("auto_map", "keys_to_ignore_at_inference", "tokenizer_class", "torch_dtype"), any_value
    ),
    "unk_token_id": any_value,  # transformers writes it into the config of a model from a GGUF file
    "attn_implementation": any_value,  # verl puts it into the config that it loads
    **dict.fromkeys(
        ("finetuning_task", "pruned_heads", "task_specific_params", "torchscript"), any_value
    ),
    **dict.fromkeys(
        ("unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config"), any_value
    ),
    "use_mrope": unset,
    "rope_interleaved": unset,
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


def refused_keys() -> frozenset[str]:
    """Return the keys that at least one family refuses."""
    return frozenset(key for family in ALIGNED.values() for key in family.refuses)


def _keys_of_families() -> frozenset[str]:
    """Return the keys on which at least one family says something."""
    return refused_keys() | {key for family in ALIGNED.values() for key in family.keys}


def verdict(family: str, key: str) -> str | None:
    """Return `both`, `rotary`, `neither` or `refused`, with a reason, or None if the key is in no group."""
    described = family_named(family)
    if refusal := described.refuses.get(key):
        return f"refused: {refusal.why}"
    if key in described.keys:
        return described.keys[key]
    if key.startswith("rope_parameters."):
        return _ROTARY
    return VERDICTS.get(
        key,
        "neither: the class of this family does not read it"
        if key in _keys_of_families()
        else None,
    )


@cache
def _known_keys(kind: Any) -> frozenset[str]:
    """Return the keys of a config class, those with a verdict, and those that only bookkeeping or generation reads."""
    from transformers import GenerationConfig

    own = vars(kind()).keys() | kind.attribute_map.keys()
    read = read_keys(kind.model_type) | VERDICTS.keys() | _keys_of_families()
    return frozenset(own | read | BOOKKEEPING.keys() | GenerationConfig().to_dict().keys())


def check_known_keys(config: Any) -> None:
    """Raise UserError if a config of a trained family has a key that nobody knows, with another value than null.

    Neither transformers nor vLLM reads it, so both compute the same, but perhaps not the model that was published: a
    later release of the family may have a new layer (`use_gated_attention`) that both leave out."""
    if not family_of(config).trained:
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

    The error names the side that ignores the key. In a config of a family in `MEASURED`, every value that was
    never compared is refused (`qarl.align.compared_keys`). Configs of other families pass; `check_family` refuses them.
    """
    check_known_keys(config)
    if config.model_type not in ALIGNED:
        check_compared_keys(config, UNREAD)
        if config.model_type in MEASURED and not by_layer(
            getattr(config, "rope_parameters", None) or {}
        ):
            check_rotary(config)
        return
    for key, refusal in family_of(config).refuses.items():
        value = getattr(config, key, None)
        if not refusal.harmless(value, config):
            raise refused_value(config.model_type, key, value, refusal.why)
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
