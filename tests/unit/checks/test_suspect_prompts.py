"""Warnings about training prompts that are read without an error: empty, equal, of an unknown role, taken columns."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.checks import suspect_prompts as checks
from qarl.checks.check import Finding
from qarl.checks.registry import CHECKS
from qarl.data.prompts import Prompt, PromptDataset

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
)
TOOL = "{% if m['role'] == 'tool' %}{% endif %}"


def data(*messages: tuple[str, str], columns: tuple[str, ...] = ()) -> PromptDataset:
    """A prompt of one message for each role and content. Its tokens are those of the content."""
    prompts = [
        Prompt(row, "s", [{"role": role, "content": text}], [*text.encode()], "1")
        for row, (role, text) in enumerate(messages)
    ]
    return PromptDataset(prompts, columns=columns)


def told(findings: Iterator[Finding]) -> list[str]:
    said = list(findings)
    assert all(
        finding.status == "warning" and finding.where and finding.why and finding.fix
        for finding in said
    )
    return [finding.what for finding in said]


def test_prompts_without_text() -> None:
    rows = data(("user", "7"), ("user", ""), ("user", " \n"), ("system", "be brief"))
    assert told(checks.empty_prompts(rows)) == [
        "3 of 4 training prompts have no text, the first in row 1"
    ]
    assert told(checks.empty_prompts(data(("user", "7")))) == []


def test_roles_that_the_template_does_not_name() -> None:
    rows = data(("user", "7"), ("human", "7"), ("human", "8"), ("tool", "9"), ("system", "s"))

    def roles(template: Any) -> list[str]:
        return told(checks.unknown_roles(SimpleNamespace(chat_template=template), rows))

    human = "the chat template does not name the role 'human', which row 1 has"
    tool = "the chat template does not name the role 'tool', which row 3 has"
    assert sorted(roles(CHAT)) == [human, tool]
    assert roles(CHAT + TOOL) == roles({"default": CHAT, "tool_use": TOOL}) == [human]


@pytest.mark.parametrize(("equal", "warned"), [(60, True), (13, False), (14, True)])
def test_equal_prompts(equal: int, warned: bool) -> None:
    rows = data(*[("user", "same")] * equal, *[("user", str(row)) for row in range(64 - equal)])
    what = f"only {65 - equal} of 64 training prompts differ; the commonest stands {equal} times"
    assert told(checks.repeated_prompts(rows)) == ([what] if warned else [])


def test_columns_with_a_meaning_of_their_own() -> None:
    rows = data(("user", "7"), columns=("prompt", "index", "uid", "__rollout_n__"))
    verl: Any = SimpleNamespace(backend="verl")
    local: Any = SimpleNamespace(backend="local")
    samples = "the training data have a column __rollout_n__"
    assert told(checks.taken_columns(verl, rows)) == [
        samples,
        "verl replaces the values of the columns index, uid",
    ]
    assert told(checks.taken_columns(local, rows)) == [samples]
    assert told(checks.taken_columns(verl, data(("user", "7"), columns=("prompt",)))) == []


def test_every_run_and_the_doctor_make_these_checks() -> None:
    assert set(checks.CHECKS) <= set(CHECKS)
