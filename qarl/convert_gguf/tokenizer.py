"""The tokenizer of a GGUF file, with what transformers' conversion (5.10) gets wrong put right.

transformers takes the end-of-sequence token of Llama's family from the key of the beginning-of-sequence token, sets no
padding token, and ignores `tokenizer.ggml.pre`, the name of the rule by which text is cut before byte pairs are merged.
Of Qwen's whole tokens, such as `<think>`, it knows three. A response would then never end, or text would become other
tokens than those that the model was trained with.

Every change is reported as one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qarl.convert_gguf.gguf_file import GGUFFile
from qarl.errors import UserError

TRUSTED = {"qwen2": ("qwen2", "qwen3", "qwen2moe", "qwen3moe"), "gpt-2": ("llama", "falcon")}
"""Rule of cutting -> the architectures for which transformers' conversion follows it."""
CONTROL = 3
USER_DEFINED = 4
"""Values of `tokenizer.ggml.token_type` (gguf.TokenType)."""
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = "the-answer"


def digits_apart() -> Any:
    """SmolLM's rule: each digit is a piece of its own, and the text between digits is cut as GPT-2 does."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


RULES: dict[str, Callable[[], Any]] = {"smollm": digits_apart}
"""Rule of cutting -> the pre-tokenizer that follows it, for byte-level vocabularies. Source: llama.cpp's
`llm_tokenizer_bpe`, which names the regular expressions of each `tokenizer.ggml.pre`."""


def convert_tokenizer(file: GGUFFile, max_positions: int) -> tuple[Any, list[int], list[str]]:
    """Return the tokenizer, the ids of the tokens that end a response, and what was changed, in sentences.

    max_positions: the longest sequence of the model, in tokens."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    converted: Any = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    changes = [*correct_cutting(converted, file), *correct_whole_tokens(converted, file)]
    # A new object: the converted one would save the conversion's arguments and clean_up_tokenization_spaces=true.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converted.backend_tokenizer,
        chat_template=converted.chat_template,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        bos_token=converted.bos_token,
        eos_token=converted.eos_token,
        pad_token=converted.pad_token,
        unk_token=converted.unk_token,
    )
    ends, sentences = correct_special_tokens(tokenizer, file)
    return tokenizer, ends, [*changes, *sentences]


def correct_cutting(tokenizer: Any, file: GGUFFile) -> list[str]:
    """Make `tokenizer` cut text by the file's rule. Return what was changed, or what may be wrong."""
    if file.get("tokenizer.ggml.model") != "gpt2":
        return []
    rule = file.get("tokenizer.ggml.pre")
    if rule in RULES:
        from tokenizers.decoders import ByteLevel

        tokenizer.backend_tokenizer.pre_tokenizer = RULES[rule]()
        tokenizer.backend_tokenizer.decoder = ByteLevel()
        return [f"text is cut by the rule {rule!r} that the file names; transformers ignores it"]
    if file.architecture in TRUSTED.get(str(rule), ()):
        return []
    return [
        f"warning: the file names {rule!r} as the rule by which text is cut, and transformers ignores it; text may "
        "become other tokens than the original model's. Compare, or copy the original's tokenizer files"
    ]


def correct_whole_tokens(tokenizer: Any, file: GGUFFile) -> list[str]:
    """Add what the file calls control tokens and tokens of its user, which text must never be cut into.

    Return what was changed."""
    from tokenizers import AddedToken

    words = file.get("tokenizer.ggml.tokens") or []
    types = file.get("tokenizer.ggml.token_type") or []  # the format does not demand them
    known = tokenizer.added_tokens_decoder
    missing = [
        AddedToken(word, special=kind == CONTROL, normalized=False)
        for number, (word, kind) in enumerate(zip(words, types, strict=bool(types)))
        if kind in (CONTROL, USER_DEFINED) and number not in known
    ]
    if not missing:
        return []
    tokenizer.backend_tokenizer.add_tokens([token for token in missing if not token.special])
    tokenizer.backend_tokenizer.add_special_tokens([token for token in missing if token.special])
    names = ", ".join(str(token.content) for token in missing[:4])
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return [f"{names}{more} are whole tokens; transformers' conversion cuts them into pieces"]


def correct_special_tokens(tokenizer: Any, file: GGUFFile) -> tuple[list[int], list[str]]:
    """Set the special tokens of `tokenizer`. Return the ids of the tokens that end a response, and what was changed.

    The end of a response is the token that the chat template puts behind an answer. The file's own end token ends a
    response too, if it is a different one. Raise UserError if there is no end token."""
    changes: list[str] = []
    named = {
        kind: _token(tokenizer, file.get(f"tokenizer.ggml.{key}_token_id"))
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    turn_end = end_of_answer(tokenizer)
    if turn_end is None and named["eos"] is None:
        raise UserError(
            f"{file.path} names no token that ends a response",
            why="neither its key tokenizer.ggml.eos_token_id nor its chat template has one",
            fix="use the original model's folder, from which the GGUF file was made",
        )
    if turn_end and named["eos"] and turn_end != named["eos"]:
        changes.append(
            f"a response ends with {turn_end}, as in the chat template, or with {named['eos']}, as in the metadata"
        )
    tokens = named | {"eos": turn_end or named["eos"]}
    tokens["pad"] = tokens["pad"] or tokens["eos"]
    sources = {
        "eos": "the chat template's" if turn_end else "the metadata's",
        "pad": "the metadata's" if named["pad"] else "the end token, because the file names none",
    }
    for kind, token in tokens.items():
        attribute = f"{kind}_token"
        before = getattr(tokenizer, attribute)
        if token is None or token == before:
            continue
        setattr(tokenizer, attribute, token)
        source = sources.get(kind, "the metadata's")
        changes.append(
            f"{attribute} is {token} ({source}); transformers' conversion has {before or 'none'}"
        )
    ends = [tokens["eos"], *([named["eos"]] if named["eos"] else [])]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(ends)]
    return ids, changes


def end_of_answer(tokenizer: Any) -> str | None:
    """Return the special token that the chat template puts behind an answer.

    Return None if there is no template or token, or if the template refuses a question with an answer."""
    if not tokenizer.chat_template:
        return None
    messages = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # templates raise their own errors
        return None
    _, answer, rest = text.rpartition(_ANSWER)
    if not answer:
        return None
    rest = rest.strip()
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends = [token for token in special if rest.startswith(token)]
    return max(ends, key=len, default=None)


def _token(tokenizer: Any, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.convert_ids_to_tokens(int(token_id))
