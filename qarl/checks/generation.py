"""Whether the trainer's log-probs can follow the sampling of training responses, and where responses end.

vLLM stops at the tokenizer's EOS and at every `eos_token_id` of generation_config.json. If that file is missing, it
uses the ids of config.json instead (vLLM's `SamplingParams.update_from_generation_config`). If one of these ids
belongs to a different tokenizer, responses may end too early or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checks.model_folder import loading_options
from qarl.config import Config
from qarl.config.level import Level
from qarl.config.schema import RolloutConfig
from qarl.data.chat_variables import check_variables
from qarl.errors import UserError
from qarl.kernels.sampling_masks import Truncation, packed_width
from qarl.rollout.engine_config import SamplingConfig, sampling_params

_GENERATION = "generation_config.json"
MASKS_GIB = 4.0
"""Memory limit in GiB for the masks of one batch. A mask says which tokens top-p or top-k keep."""


def check_sampling(config: Config, *, level: Level, vocabulary: int, on_cpu: bool = True) -> None:
    """Raise UserError if the trainer cannot compute log-probs for the engine's sampling, or needs too much memory.

    `level`: the applied alignment level, which may be lower than `quant.align`. `vocabulary`: rows of lm_head.
    `on_cpu`: whether the engine runs on a CPU. On a GPU vLLM may sample from other tokens (docs/lookup/results/gpu.md).
    """
    sampling_params(SamplingConfig.of_run(config))
    refuse_unknown_ids(config.rollout.stop_token_ids, vocabulary)
    if not Truncation(config.rollout.top_p, config.rollout.top_k).active:
        return
    where = f"rollout.top_p={config.rollout.top_p}, rollout.top_k={config.rollout.top_k}"
    if not level.follows_engine or not on_cpu:
        why = f"quant.align={config.quant.align} fell back to {level}"
        if level.follows_engine:
            why = "no GPU has shown which tokens vLLM samples from"
        raise UserError(
            f"the trainer cannot apply the engine's top-p or top-k at alignment level {level}",
            where=where,
            why=f"{why}. If the trainer's logits differ from the engine's, the trainer would keep different tokens",
            fix="set rollout.top_p=1 and rollout.top_k=-1",
        )
    responses = config.data.train_batch_size * config.rollout.n
    gib = responses * config.data.max_response_length * packed_width(vocabulary) / 2**30
    if gib > MASKS_GIB:
        raise UserError(
            f"the sets of tokens that top-p or top-k keep may need {gib:.1f} GiB; the limit is {MASKS_GIB:.0f} GiB",
            where=where,
            why=f"there are {responses} responses of up to {config.data.max_response_length} tokens, and each token "
            f"needs a set of {vocabulary} bits (one per vocabulary entry) until the update is finished",
            fix="set rollout.top_p=1 and rollout.top_k=-1, or lower data.train_batch_size, rollout.n or "
            "data.max_response_length",
        )


def eos_warnings(path: str, tokenizer: Any, hf_config: Any) -> list[str]:
    """Return warnings about the ends of responses. The list is empty if tokenizer and model agree."""
    own = tokenizer.eos_token_id
    where, ids = model_eos(path, hf_config)
    if own is None and not ids:
        return [
            "neither tokenizer nor model has an EOS: every response ends at data.max_response_length"
        ]
    if own is None or (ids and own not in ids):
        ours = "no token" if own is None else _names(tokenizer, [own])
        return [
            f"the tokenizer's EOS is {ours}, but {where} says {_names(tokenizer, ids)}: responses end at all of them"
        ]
    return []


def model_eos(path: str, hf_config: Any) -> tuple[str, list[int]]:
    """Return the name of the file from which vLLM reads a model's `eos_token_id`, and the ids in it.

    Raise UserError if generation_config.json cannot be read.
    """
    from transformers import GenerationConfig

    try:
        return _GENERATION, _ids_of(GenerationConfig.from_pretrained(path, **loading_options(path)))
    except OSError as error:
        if not (Path(path) / _GENERATION).exists():  # nor need a model on the Hub have such a file
            return "config.json", _ids_of(hf_config)
        raise UserError(
            f"{_GENERATION} of {path!r} cannot be read",
            where="model.path",
            why=" ".join(str(error).split())[:400],
            fix="write the file again, or delete it; without it, config.json says where responses end",
        ) from error


def stop_token_ids(path: str, tokenizer: Any, hf_config: Any) -> list[int]:
    """Return the token ids at which vLLM ends a turn: the tokenizer's EOS, and those of the model's config."""
    _, ends = model_eos(path, hf_config)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return sorted({*ends, *own})


def ends_of_turns(config: Config, tokenizer: Any, hf_config: Any) -> tuple[int, ...]:
    """Return the token ids at which vLLM ends a turn of this run, those of `rollout.stop_token_ids` among them."""
    ends = stop_token_ids(config.model.path, tokenizer, hf_config)
    return tuple(sorted({*ends, *config.rollout.stop_token_ids}))


def check_template(config: Config, tokenizer: Any) -> None:
    """Raise UserError if the chat template lacks one of `data.apply_chat_template_kwargs`."""
    check_variables(tokenizer, config.data.apply_chat_template_kwargs)


def check_stops(rollout: RolloutConfig, tokenizer: Any, section: str = "rollout.") -> None:
    """Raise UserError if `rollout.stop` or `rollout.stop_token_ids` names what no response can have.

    `section`: how names of the two begin where they were given."""
    refuse_unknown_ids(rollout.stop_token_ids, len(tokenizer), section)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): number for number, token in added.items() if token.special}
    for text in rollout.stop:
        inside = {name: number for name, number in special.items() if name in text}
        if inside:
            raise UserError(
                f"the text {text!r} would never end a response",
                where=f"{section}stop",
                why=f"{', '.join(inside)} is a special token, and vLLM leaves special tokens out of the text that it "
                "compares",
                fix=f"set {section}stop_token_ids=[{', '.join(map(str, inside.values()))}] instead",
            )


def refuse_unknown_ids(
    token_ids: Sequence[int], vocabulary: int, section: str = "rollout."
) -> None:
    """Raise UserError if one of `rollout.stop_token_ids` is no token. `vocabulary`: number of tokens. `section`: as in
    `check_stops`."""
    if unknown := [token for token in token_ids if token >= vocabulary]:
        raise UserError(
            f"token {unknown[0]} does not exist",
            where=f"{section}stop_token_ids",
            why=f"the model has {vocabulary} tokens, numbered from 0",
            fix="give the tokenizer's own ids (tokenizer.convert_tokens_to_ids)",
        )


def check_sessions(config: Config, sessions: int | None) -> None:
    """Raise UserError if conversations are held in `sessions` and a key ends their turns that ends a whole session."""
    rollout = config.rollout
    keys = {"rollout.stop": rollout.stop, "rollout.min_tokens": rollout.min_tokens}
    used = [key for key, value in keys.items() if value]
    if sessions is None or not used:
        return
    raise UserError(
        f"{' and '.join(used)} cannot be used in conversations of this length",
        where=", ".join(used),
        why="prompts of later turns may be so long that vLLM must keep their keys and values from turn to turn, and "
        "it then ends the conversation with a text of rollout.stop, and counts rollout.min_tokens over all turns",
        fix="use rollout.stop_token_ids, or lower data.max_response_length or data.max_prompt_length",
    )


def _ids_of(config: Any) -> list[int]:
    ids = getattr(config, "eos_token_id", None)
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]


def _names(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in ids)
