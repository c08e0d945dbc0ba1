"""The variables that a run gives its chat template, `data.apply_chat_template_kwargs`, as `enable_thinking: false`.

Each place that renders the template gets the same ones: the prompts of training, evaluation and verl, and the frame
between two turns. transformers passes names that a template does not have without a word, so a misspelt one would
leave the model thinking. Here it is an error.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from qarl.errors import UserError, alternatives

KEY = "data.apply_chat_template_kwargs"
_WORD = re.compile(r"\w+")


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Raise UserError if the tokenizer's chat template does not have one of `variables`, or if QaRL sets it itself.

    `qarl.config.hints` warns of a text that may stand for true or false."""
    template = getattr(tokenizer, "chat_template", None)
    if not variables or template is None:
        return
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    if own := sorted({"messages", *taken} & set(variables)):
        raise UserError(
            f"{', '.join(own)} cannot be set for the chat template",
            where=KEY,
            why="QaRL sets it, or the row of the data does",
            fix="give only variables of the template itself, for example enable_thinking",
        )
    words = _words(template)
    if unknown := sorted(set(variables) - words):
        near = sorted(word for word in words if word.startswith(("enable_", "add_", "reasoning")))
        advice = f"; it names {alternatives(near)}" if near else ""
        raise UserError(
            f"the chat template does not use {', '.join(unknown)}",
            where=KEY,
            why="the variable would have no effect",
            fix=f"leave it out, or take a name from the chat template of model.path{advice}",
        )


def _words(template: str | Mapping[str, str]) -> set[str]:
    """Return the words in the code of a template, or of several templates by name."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    code = (part for text in texts for part in re.findall(r"{[{%].*?[}%]}", text, re.DOTALL))
    return {word for part in code for word in _WORD.findall(part)}
