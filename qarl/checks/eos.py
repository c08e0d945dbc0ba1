"""Checks whether tokenizer and model agree about the tokens at which vLLM ends a response.

vLLM stops at the tokenizer's EOS and at every `eos_token_id` of generation_config.json. If that file is missing, it
uses the ids of config.json instead (`SamplingParams.update_from_generation_config` in vLLM 0.29). If one of these ids
belongs to a different tokenizer, responses may end too early or never.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checks import hub_access
from qarl.errors import UserError

_GENERATION = "generation_config.json"


def eos_warnings(path: str, tokenizer: Any, hf_config: Any) -> list[str]:
    """Return warnings about the ends of responses. The list is empty if tokenizer and model agree.

    Raise UserError if an `eos_token_id` is not a token, or is a token of ordinary text.
    """
    own = tokenizer.eos_token_id
    where, ids = model_eos(path, hf_config)
    for token in ids:
        _check_token(token, tokenizer, where)
    if own is None and not ids:
        return ["neither tokenizer nor model has an EOS: every response ends at data.max_response_length"]
    warnings = []
    if own is None:
        warnings.append(f"the tokenizer has no EOS, so responses end only at {_names(tokenizer, ids)} of {where}")
    elif ids and own not in ids:
        warnings.append(
            f"the tokenizer's EOS is {_names(tokenizer, [own])}, but {where} says {_names(tokenizer, ids)}: responses "
            "end at both; if one of them comes from a different model, correct that file"
        )
    unused = [token for token in _ids_of(hf_config, "config.json") if token not in (*ids, own)]
    if where == _GENERATION and unused:
        for token in unused:
            _check_token(token, tokenizer, "config.json")
        warnings.append(
            f"no response ends at {_names(tokenizer, unused)}, the eos_token_id of config.json, because vLLM reads "
            f"{_GENERATION} instead"
        )
    return warnings


def model_eos(path: str, hf_config: Any) -> tuple[str, list[int]]:
    """Return the name of the file from which vLLM reads a model's `eos_token_id`, and the ids in it.

    Raise UserError if generation_config.json cannot be read, or if the ids are not whole numbers.
    """
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path, **hub_access.loading_options(path))
    except OSError as error:
        if (Path(path) / _GENERATION).exists():
            raise _unreadable(path, error) from error
        return "config.json", _ids_of(hf_config, "config.json")
    except Exception as error:  # the type that transformers raises depends on the file's fault
        raise _unreadable(path, error) from error
    return _GENERATION, _ids_of(generation, _GENERATION)


def _ids_of(config: Any, where: str) -> list[int]:
    given = getattr(config, "eos_token_id", None)
    if given is None:
        return []
    ids = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(
            f"eos_token_id is {given!r}",
            where=f"model.path: {where}",
            why="vLLM expects the id of a token, or a list of ids",
            fix="correct the file, or copy it from the original model",
        )
    return ids


def _check_token(token: int, tokenizer: Any, where: str) -> None:
    outside = not 0 <= token < len(tokenizer)
    text = "" if outside else str(tokenizer.convert_ids_to_tokens(token))
    # Special and added tokens are fine. A few vocabularies list markers such as <|end|> among ordinary words.
    if token in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder) or re.fullmatch(r"<[^\s<>]+>", text):
        return
    raise UserError(
        f"responses would end at token {token}{text and f', {text!r}'}",
        where=f"model.path: eos_token_id in {where}",
        why=f"this id does not exist: the tokenizer has {len(tokenizer)} tokens"
        if outside
        else "it is a token of ordinary text, so every response that contains it would be cut off there",
        fix="use tokenizer and config files of the same model",
    )


def _names(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in ids)


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{_GENERATION} of {path!r} cannot be read",
        where="model.path",
        why=" ".join(f"{type(error).__name__}: {error}".split())[:400],
        fix="write the file again, or delete it; without it, config.json says where responses end",
    )
