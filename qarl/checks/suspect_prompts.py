"""Warns of training prompts that are read without an error and yet are probably a mistake in the data.

Neither backend refuses them: an empty prompt is sampled from like any other, a chat template may write a role that the
model has never seen, equal prompts count as different ones, and verl replaces the values of columns with its own names.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from qarl.checks.check import Check, Findings, warning
from qarl.config import Config
from qarl.data.prompts import PromptDataset

MOST_REPEATED = 0.2
"""Largest share of prompts that equal an earlier one without a warning. Data sets of the field have a few percent."""
USUAL_ROLES = ("system", "user", "assistant")
OF_VERL = ("raw_prompt", "dummy_tensor", "index", "uid", "tools_kwargs", "interaction_kwargs")
"""Columns that verl 0.9.1 fills for its own use (`RLHFDataset.__getitem__`, the v1 trainer)."""
SAMPLES = "__rollout_n__"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Variables of a chat template that hold special tokens. One token may have several roles."""


def empty_prompts(train_prompts: PromptDataset) -> Findings:
    empty = [
        prompt.index
        for prompt in train_prompts
        if not any(text["content"].strip() for text in prompt.messages if text["role"] != "system")
    ]
    if empty:
        yield warning(
            f"{len(empty)} of {len(train_prompts)} training prompts have no text, the first in row {empty[0]}",
            where="data.train_files",
            why="the model would answer a question that nobody asked",
            fix="give these rows a text, or leave them out",
        )


def unknown_roles(tokenizer: Any, train_prompts: PromptDataset) -> Findings:
    text = _template(tokenizer)
    first = {
        message["role"]: prompt.index
        for prompt in reversed(train_prompts)
        for message in prompt.messages
    }
    unknown = [role for role in first if role not in USUAL_ROLES and role not in text]
    for role in unknown:
        yield warning(
            f"the chat template does not name the role {role!r}, which row {first[role]} has",
            where="data.train_files",
            why="the template writes it unseen or leaves the message out, so the model gets a prompt that it never met",
            fix="use the template's own roles, usually system, user and assistant",
        )


def lost_text(tokenizer: Any, train_prompts: PromptDataset) -> Findings:
    """Warn of text that the vocabulary cannot write. SmolLM2's lacks 21 bytes, and writes `<|endoftext|>` for them."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return
    lost = [
        prompt.index
        for prompt in train_prompts
        if unknown in prompt.prompt_token_ids
        and not any(tokenizer.unk_token in message["content"] for message in prompt.messages)
    ]
    template = _template(tokenizer)
    roles = [role for role in _ROLES if getattr(tokenizer, role) == tokenizer.unk_token]
    if not lost or any(word in template for word in (tokenizer.unk_token, *roles)):
        return
    yield warning(
        f"the tokenizer cannot write {len(lost)} of {len(train_prompts)} training prompts, the first in row {lost[0]}",
        where="data.train_files",
        why=f"its vocabulary lacks a character or byte of them, and the model sees {tokenizer.unk_token} instead",
        fix="replace such characters in the data, often control characters or rare scripts",
    )


def repeated_prompts(train_prompts: PromptDataset) -> Findings:
    counts = Counter(tuple(prompt.prompt_token_ids) for prompt in train_prompts)
    repeated = len(train_prompts) - len(counts)
    if repeated > MOST_REPEATED * len(train_prompts):
        most = max(counts.values())
        yield warning(
            f"only {len(counts)} of {len(train_prompts)} training prompts differ; the commonest stands {most} times",
            where="data.train_files",
            why="a batch would have equal prompts, and an epoch fewer problems than it seems",
            fix="remove the repeated rows; more epochs repeat all prompts evenly",
        )


def taken_columns(config: Config, train_prompts: PromptDataset) -> Findings:
    columns = train_prompts.columns
    if SAMPLES in columns:
        effect = "sets the size of each group instead of rollout.n"
        why = (
            f"in training data it {effect}"
            if config.backend == "verl"
            else "only evaluations read it"
        )
        yield warning(
            f"the training data have a column {SAMPLES}",
            where="data.train_files",
            why=why,
            fix="remove the column, and set rollout.n",
        )
    taken = [name for name in OF_VERL if name in columns and config.backend == "verl"]
    if taken:
        yield warning(
            f"verl replaces the values of the column{'s' if len(taken) > 1 else ''} {', '.join(taken)}",
            where="data.train_files",
            why="it fills columns of these names itself, so a reward would not see the file's values",
            fix="rename the column, or put the values into extra_info",
        )


def _template(tokenizer: Any) -> str:
    """Return the text of the chat template, or of all templates."""
    template = tokenizer.chat_template
    return "".join(template.values()) if isinstance(template, dict) else template or ""


CHECKS = (
    Check("data", "all prompts have text", empty_prompts),
    Check("data", "the tokenizer can write all prompts", lost_text),
    Check("data", "the chat template names all roles", unknown_roles),
    Check("data", "most prompts differ", repeated_prompts),
    Check("data", "no column has a name that verl or QaRL reads", taken_columns),
)
