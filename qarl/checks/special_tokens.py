"""Warns of special tokens that a reward waits for, but never sees, because they are removed from a response's text.

Tags such as `<answer>` are often added to a tokenizer as special tokens. A reward that looks for them then scores 0 for
ever. They are seen with `reward.keep_special_tokens=true`.
"""

from __future__ import annotations

import re
from typing import Any

from qarl.checks.check import Findings, warning
from qarl.config import Config
from qarl.data.digests import read_reward_source
from qarl.data.prompts import PromptDataset
from qarl.data.rewards import BUILTIN, TAGS_READ

_TAG = re.compile(r"^</?\w+>$")


def special_tokens_unseen(config: Config, tokenizer: Any, train_prompts: PromptDataset) -> Findings:
    """Warn if the reward's source or the chat template names special tokens that the reward does not see."""
    if config.reward.keep_special_tokens:
        return
    tokens = special_tokens(tokenizer)
    names = config.reward.names
    own = (read_reward_source(name) or b"" for name in names)
    source = " ".join(text.decode("utf-8", errors="replace") for text in own)
    source += " ".join(tag for name in names for tag in TAGS_READ.get(name, ()))
    in_reward = [token for token in tokens if token in source and not token.isalnum()]
    in_template = (
        []
        if all(name in BUILTIN for name in names)
        else tags_of_answers(tokenizer, tokens, train_prompts)
    )
    for unseen, source in (
        (in_reward, f"the source of {config.reward.key}"),
        (in_template, "the chat template"),
    ):
        if unseen:
            yield warning(
                f"{source} names {', '.join(unseen)}, which the reward does not see (reward.keep_special_tokens)",
                where=f"{config.reward.key}={', '.join(names)}",
                why="they are special tokens of the tokenizer, and these are removed from a response's text",
                fix="set reward.keep_special_tokens=true, or make them ordinary tokens of the tokenizer",
            )
            return


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of all tokens that decoding without special tokens removes."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return sorted(
        {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    )


def tags_of_answers(tokenizer: Any, tokens: list[str], prompts: PromptDataset) -> list[str]:
    """Return the special tokens in the chat template that look like tags of an answer, such as `<think>`.

    Tokens that a template puts around messages, such as `<|im_start|>` and `<start_of_turn>`, are in every prompt, and
    rewards do not wait for them."""
    template = tokenizer.chat_template
    text = "".join(template.values()) if isinstance(template, dict) else template or ""
    named = {
        getattr(tokenizer, f"{kind}_token", None)
        for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    }
    prompt = tokenizer.decode(prompts[0].prompt_token_ids)
    waited_for = [
        token for token in tokens if _TAG.match(token) and token in text and token not in named
    ]
    return [token for token in waited_for if token not in prompt]
