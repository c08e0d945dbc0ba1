"""Tools under TRL: the same conversations, masks and rewards as TRL's own loop, from a script in the engine's place."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl_turns import CUT, TEMPLATES, Script, batch_of, chat_tokenizer, ours, save_chat_model, trls

from qarl.errors import UserError
from qarl.turns.conversation import spans_of
from qarl.turns.frame import ChatFrame


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: a number
        b: another one
    """
    return a + b


def fail(text: str) -> str:
    """Fail.

    Args:
        text: the words of the error
    """
    raise RuntimeError(text)


def repeat(text: str, times: int) -> str:
    """Repeat.

    Args:
        text: what to repeat
        times: how often
    """
    return text * times


async def later(text: str) -> str:
    """Answer later.

    Args:
        text: the answer
    """
    await asyncio.sleep(0.01)
    if text == "fail":
        raise ValueError("it failed later")
    return text.upper()


TOOLS = [add, fail, repeat, later]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call("add", '{"a": 2, "b": 3}')
SHAPES: Script = {
    "no call": ["It is 5."],
    "one call": [ADD, "5"],
    "text and a call": ["I add.\n" + ADD, "It is 5"],
    "two calls in a turn": [ADD + "\n" + call("add", '{"a": 5, "b": 6}'), "5 and 11"],
    "three turns": [ADD, call("add", '{"a": 5, "b": 6}'), "11"],
    "an unknown tool": [call("divide", '{"a": 1, "b": 0}'), "none"],
    "wrong arguments": [call("add", '{"a": 1}'), "none"],
    "arguments that are a list": [call("add", "[1, 2]")],
    "no JSON": ['<tool_call>\n{"name": add}\n</tool_call>'],
    "no end of the call": ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}'],
    "it raises": [call("fail", '{"text": "bad tool"}'), "sorry"],
    "later": [call("later", '{"text": "done"}') + "\n" + ADD, "DONE and 5"],
    "later it fails": [call("later", '{"text": "fail"}'), "sorry"],
    "too long an answer": [call("repeat", '{"text": "x", "times": 1000}'), "never said"],
    "too long an answer later": [ADD, call("repeat", '{"text": "x", "times": 300}'), "never said"],
    "cut behind a call": [ADD + "y" * 500 + CUT],
    "a last turn that is cut": [ADD, "z" * 500 + CUT],
    "an empty answer": [call("repeat", '{"text": "", "times": 3}'), "nothing"],
    "marks in an answer": [call("repeat", '{"text": "<|im_end|>\\u00e9", "times": 2}'), "odd"],
    "thoughts": ["<think>\nWell\n</think>\n\n" + ADD, "<think>\nSo\n</think>\n\n5"],
}
"""Conversations as a model may hold them, odd ones included."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


class Rewards:
    """A reward function that keeps what it got."""

    __name__ = "letters"

    def __init__(self) -> None:
        self.completions: Any = None

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        self.completions = [list(messages) for messages in completions]
        return [float(len(str(messages))) for messages in completions]


def compared(batch: dict[str, Any]) -> dict[str, Any]:
    names = ("prompt_ids", "completion_ids", "completion_mask", "tool_mask")
    return {name: batch[name].tolist() for name in names}


@pytest.mark.parametrize("most", [None, 1], ids=["any number of calls", "one round of calls"])
def test_conversations_are_those_of_trls_own_loop(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    seen, given = Rewards(), Rewards()
    how = {"tools": TOOLS, "max_tool_calling_iterations": most}
    own = ours(model, tmp_path, monkeypatch, SHAPES, reward_funcs=seen, **how)
    other = trls(model, tmp_path, SHAPES, reward_funcs=given, **how)
    mine, theirs = batch_of(own, SHAPES), batch_of(other, SHAPES)
    assert seen.completions == given.completions
    assert compared(mine) == compared(theirs)
    assert torch.equal(mine["sampling_per_token_logps"], theirs["sampling_per_token_logps"])
    assert torch.allclose(mine["advantages"], theirs["advantages"], atol=1e-3)
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
        assert own._metrics["train"][name] == other._metrics["train"][name], name
    assert own._metrics["train"]["turns/max"] == [2.0 if most else 3.0]


def test_the_models_tokens_are_those_of_the_script(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TRL: each span of the mask is a turn of the script, and what is between is the tools'."""
    own = ours(model, tmp_path, monkeypatch, SHAPES, reward_funcs=Rewards(), tools=TOOLS)
    batch = batch_of(own, SHAPES)
    decode = own.processing_class.decode
    for place, (question, turns) in enumerate(SHAPES.items()):
        ids, mask = batch["completion_ids"][2 * place], batch["tool_mask"][2 * place]
        mask = mask * batch["completion_mask"][2 * place]
        spans = spans_of(mask.tolist())
        said = [decode(ids[start:end]) for start, end in spans]
        shown = [turn.removesuffix(CUT) for turn in turns[: len(said)]]
        for text, turn in zip(said, shown, strict=True):
            assert turn.startswith(text.removesuffix("<|im_end|>")), question
        assert len(said) == len(turns) - ("never said" in turns), question


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_2", "lfm2_v2"])
def test_frames_are_trls(template: str) -> None:
    from types import SimpleNamespace

    from trl import GRPOTrainer
    from trl.chat_template_utils import (
        get_training_chat_template,
        is_chat_template_prefix_preserving,
    )

    tokenizer = chat_tokenizer(template)
    if template.startswith("llama"):
        tokenizer.add_special_tokens({"eos_token": "<|eot_id|>"})
    kept = is_chat_template_prefix_preserving(tokenizer)
    chosen = None if kept else get_training_chat_template(tokenizer)
    answers = [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "fail", "content": "{'error': 'a <b>\\n'}"},
    ]
    trainer: Any = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=chosen,
        chat_template_kwargs={},
    )
    end = tokenizer.eos_token_id
    frame = ChatFrame(tokenizer, [end], {"chat_template": chosen} if chosen else {})
    for messages in (answers[:1], answers):
        expected = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
        assert frame.token_ids(messages, after=end) == expected
    assert (TEMPLATES / f"{template}.jinja").is_file()


def hang(kind: str) -> str:
    """Hang.

    Args:
        kind: how
    """
    if kind == "sleep":
        time.sleep(600)
    if kind == "stubborn":
        while True:
            with contextlib.suppress(Exception):
                time.sleep(600)
    if kind == "regex":
        re.fullmatch("(a+)+b", "a" * 60)
    if kind == "exit":
        raise SystemExit(3)
    return "m" * 10**6


async def hang_later(kind: str) -> str:
    """Hang later.

    Args:
        kind: how
    """
    if kind == "block":
        time.sleep(5)
    await asyncio.sleep(600 if kind == "wait" else 0)
    if kind == "exit":
        raise SystemExit(3)
    return "awake"


WORSE: Script = {
    name: [call(tool, f'{{"kind": "{kind}"}}'), "on"]
    for name, tool, kind in (
        ("sleep", "hang", "sleep"),
        ("stubborn", "hang", "stubborn"),
        ("regex", "hang", "regex"),
        ("exit", "hang", "exit"),
        ("megabyte", "hang", "megabyte"),
        ("exit later", "hang_later", "exit"),
    )
}


def test_a_tool_that_hangs_or_ends_is_an_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = Rewards()
    how = {"tools": [hang, hang_later], "turn_timeout_s": 0.2, "reward_funcs": rewards}
    own = ours(model, tmp_path, monkeypatch, WORSE, **how)
    started = time.monotonic()
    batch_of(own, WORSE)
    assert time.monotonic() - started < 60
    told = [
        messages[1]["content"] if len(messages) > 1 else None for messages in rewards.completions
    ]
    late = "{'error': 'the call took longer than 0.2 seconds'}"
    assert told[::2] == [late, late, late, "{'error': '3'}", None, "{'error': '3'}"]
    assert own._metrics["train"]["tools/failure_frequency"] == [pytest.approx(5 / 6)]


@pytest.mark.parametrize("kind", ["wait", "block"])
def test_an_async_tool_that_hangs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A blocked event loop is given up, and the next call has a new one."""
    rewards = Rewards()
    script = {
        "first": [
            call("hang_later", f'{{"kind": "{kind}"}}'),
            call("hang_later", '{"kind": ""}'),
            "on",
        ]
    }
    how = {"tools": [hang_later], "turn_timeout_s": 0.3, "reward_funcs": rewards}
    batch_of(ours(model, tmp_path, monkeypatch, script, **how), script)
    (messages, _) = rewards.completions
    assert "took longer than 0.3 seconds" in messages[1]["content"]
    assert messages[3]["content"] == "awake"


class Counter:
    """Counts up to the number that the question asks for, and rewards it."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **row: Any) -> str:
        self.count = 0
        return f" of {len(row['prompt'])}"

    def up(self, by: int) -> int:
        """Count up.

        Args:
            by: how far
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


def test_environments_of_trl(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversation has an instance of its own, whose text stands in the prompt, and whose reward counts."""
    up = call("up", '{"by": 2}')
    script = {"two of 1": [up, up, "4"], "one of 1": [up, "2"]}
    how: dict[str, Any] = {"environment_factory": Counter}
    data = {"train_dataset": dataset(["two", "one"])}
    own = ours(model, tmp_path, monkeypatch, script, vllm_max_model_length=2400, **how, **data)
    other = trls(model, tmp_path, script, **how, **data)
    rows = [{"prompt": [{"role": "user", "content": name}]} for name in ("two", "one")]
    batches = []
    for built in (own, other):
        built.model.train()
        batches.append(
            built._generate_and_score_completions([row for row in rows for _ in range(2)])
        )
    assert compared(batches[0]) == compared(batches[1])
    assert own._metrics["train"]["rewards/Counter/mean"] == [3.0]
    assert own._metrics["train"]["reward"] == other._metrics["train"]["reward"]


def dataset(questions: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    )


def answer(messages: list[dict[str, Any]], ground_truth: Any, **_: Any) -> Any:
    """Ask again once, reward a turn that says 5, and fail as asked."""
    text = messages[-1]["content"]
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise ValueError("bad tool")
    if sum(message["role"] == "assistant" for message in messages) > 1:
        return {"reply": None, "reward": float("5" in text)}
    return {"reply": {"role": "user", "content": "again"}, "reward": 0.25}


async def answer_later(**arguments: Any) -> Any:
    await asyncio.sleep(0)
    return answer(**arguments)


@pytest.mark.parametrize("environment", [answer, answer_later], ids=["sync", "async"])
def test_an_environment_of_the_users(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Any
) -> None:
    """The reward of a conversation is the sum of what the environment gave, and functions get its columns."""
    script = {"a": ["4", "5"], "b": ["raise", "6"]}
    seen = Rewards()
    how = {"environment": environment, "reward_funcs": [seen, "environment"]}
    own = ours(model, tmp_path, monkeypatch, script, train_dataset=with_truths(script), **how)
    batch = batch_of_rows(own, with_truths(script))
    assert [[message["content"] for message in messages] for messages in seen.completions[::2]] == [
        ["4", "again", "5"],
        ["raise", "Error: ValueError: bad tool", "6"],
    ]
    assert own._metrics["train"]["rewards/environment/mean"] == [pytest.approx((1.25 + 0.0) / 2)]
    assert own._metrics["train"]["turns/failures"] == [0.25]
    mask = batch["tool_mask"] * batch["completion_mask"]
    spans = [spans_of(row) for row in mask.tolist()]
    assert [[end - start for start, end in row] for row in spans[::2]] == [[2, 2], [6, 2]]
    assert (
        own.processing_class.decode(batch["completion_ids"][0][slice(*spans[0][1])])
        == "5<|im_end|>"
    )


def with_truths(script: Script) -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": question}], "ground_truth": "5"}
            for question in script
        ]
    )


def batch_of_rows(built: Any, data: Any) -> dict[str, Any]:
    built.model.train()
    output: dict[str, Any] = built._generate_and_score_completions(
        [dict(row) for row in data for _ in range(2)]
    )
    return output


def test_rewards_that_nobody_reads_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {"a": ["4", "5"]}
    data = with_truths(script)
    how = {"environment": answer, "reward_funcs": "arithmetic", "train_dataset": data}
    own = ours(model, tmp_path, monkeypatch, script, **how)
    with pytest.raises(UserError, match="the environment gives rewards, and arithmetic"):
        batch_of_rows(own, data)
