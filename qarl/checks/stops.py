"""The tokens at which a response ends, as vLLM takes them, and whether tokenizer and model agree about them.

vLLM stops at the tokenizer's EOS and at every `eos_token_id` of generation_config.json; only if there is no such
file, at those of config.json (`SamplingParams.update_from_generation_config`, read in 0.29). The trainer learns from
whatever the engine returned, the last token included, so its masks are right in any case. What can be wrong is where
responses end: at an ordinary word of another tokenizer, or never.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checks import hub
from qarl.errors import UserError

_GENERATION = "generation_config.json"


def check_stops(path: str, tokenizer: Any, hf_config: Any) -> list[str]:
    """Warnings about the ends of responses; none if tokenizer and model agree.

    Raises:
        UserError: an `eos_token_id` is not a token, or is a token of ordinary text.
    """
    own = tokenizer.eos_token_id
    where, ids = model_stops(path, hf_config)
    for token in ids:
        _check_token(token, tokenizer, where)
    if own is None and not ids:
        return ["neither tokenizer nor model has an EOS: every response ends at data.max_response_length"]
    warnings = []
    if own is None:
        warnings.append(f"the tokenizer has no EOS: responses end at {_names(tokenizer, ids)} of {where} alone")
    elif ids and own not in ids:
        warnings.append(
            f"the tokenizer's EOS is {_names(tokenizer, [own])}, {where} says {_names(tokenizer, ids)}: responses end "
            "at either; if one of them is left over from another model, correct that file"
        )
    unused = [token for token in _ids_of(hf_config, "config.json") if token not in (*ids, own)]
    if where == _GENERATION and unused:
        for token in unused:
            _check_token(token, tokenizer, "config.json")
        warnings.append(
            f"eos_token_id of config.json, {_names(tokenizer, unused)}, ends no response: vLLM reads {_GENERATION}"
        )
    return warnings


def model_stops(path: str, hf_config: Any) -> tuple[str, list[int]]:
    """The file that vLLM takes a model's `eos_token_id` from, and its ids.

    Raises:
        UserError: generation_config.json cannot be read, or the ids are not whole numbers.
    """
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path, **hub.loading_options(path))
    except OSError as error:
        if (Path(path) / _GENERATION).exists():
            raise _unreadable(path, error) from error
        return "config.json", _ids_of(hf_config, "config.json")
    except Exception as error:  # what transformers raises depends on what is wrong with the file
        raise _unreadable(path, error) from error
    return _GENERATION, _ids_of(found, _GENERATION)


def _ids_of(config: Any, where: str) -> list[int]:
    given = getattr(config, "eos_token_id", None)
    if given is None:
        return []
    ids = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(
            f"eos_token_id is {given!r}",
            where=f"model.path: {where}",
            why="vLLM takes the number of a token, or a list of them",
            fix="correct the file, or copy the one of the model it came from",
        )
    return ids


def _check_token(token: int, tokenizer: Any, where: str) -> None:
    outside = not 0 <= token < len(tokenizer)
    text = "" if outside else str(tokenizer.convert_ids_to_tokens(token))
    # Ids of special and added tokens; a few vocabularies have markers such as <|end|> among their words.
    if token in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder) or re.fullmatch(r"<[^\s<>]+>", text):
        return
    raise UserError(
        f"responses would end at token {token}{text and f', {text!r}'}",
        where=f"model.path: eos_token_id in {where}",
        why=f"the tokenizer has {len(tokenizer)} tokens"
        if outside
        else "it is a token of ordinary text: every response with it would be cut off there",
        fix="use tokenizer and config files of one and the same model",
    )


def _names(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})" for token in ids)


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{_GENERATION} of {path!r} cannot be read",
        where="model.path",
        why=" ".join(f"{type(error).__name__}: {error}".split())[:400],
        fix="write it again, or delete it: config.json then says where responses end",
    )
