"""Finds out whether a chat template writes today's date, so that the same messages are other prompts tomorrow.

transformers gives every template the function `strftime_now`, and Llama 3.2's template, for example, calls it. A value
that is passed to `apply_chat_template` replaces a function of the same name, so a template can be rendered as on a
fixed day. What matters is what a template writes: many only mention `strftime_now`, in a branch for tools.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from qarl.data.prompts import Prompt

_FUNCTION = "strftime_now"
_FIXED_DAY = datetime(2001, 2, 3, 4, 5, 6)
_LOOKED_AT = 256
"""Number of chats that are rendered to see whether a template that mentions the date writes it."""


def written_dates(
    tokenizer: Any, messages: Iterable[Sequence[Mapping[str, str]]], variables: Mapping[str, Any]
) -> dict[str, str]:
    """Return the dates that the template writes into the first of `messages` (each is one chat) now, by their format.
    `variables`: of `data.apply_chat_template_kwargs`.

    The result is like {"%d %b %Y": "29 Nov 2026"}. It is empty if the template writes none, and if it cannot be
    rendered."""
    if _FUNCTION not in _source(tokenizer):
        return {}
    for chat in itertools.islice(messages, _LOOKED_AT):
        asked: dict[str, str] = {}

        def today(form: str, asked: dict[str, str] = asked) -> str:
            return asked.setdefault(form, datetime.now().strftime(form))

        try:
            fixed = _rendered(tokenizer, chat, _FIXED_DAY.strftime, variables)
            if _rendered(tokenizer, chat, today, variables) != fixed:
                return asked
        except Exception:  # templates raise their own errors, which reading the prompts reports
            return {}
    return {}


def undated_digest(tokenizer: Any, prompts: Iterable[Prompt], variables: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the text of all prompts, rendered with `variables` as on a fixed day."""
    digest = hashlib.sha256()
    for prompt in prompts:
        text = _rendered(tokenizer, prompt.messages, _FIXED_DAY.strftime, variables)
        digest.update(text.encode(errors="surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def fixed_date(dates: Mapping[str, str]) -> str:
    """Return the advice that makes a template write `dates` (format -> text) on every day."""
    edits = [f'replace {_FUNCTION}("{form}") by "{text}"' for form, text in dates.items()]
    return f"{' and '.join(edits)} in the chat template of the model's folder"


def _source(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return "".join(template.values()) if isinstance(template, dict) else template or ""


def _rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    today: Callable[[str], str],
    variables: Mapping[str, Any],
) -> str:
    options = {**variables, "add_generation_prompt": True, "tokenize": False, _FUNCTION: today}
    return str(tokenizer.apply_chat_template([dict(message) for message in messages], **options))
