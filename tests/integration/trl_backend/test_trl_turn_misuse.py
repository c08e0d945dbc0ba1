"""Misuses of tools and environments under TRL: each gives one clear error, and no engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from random_models import save_random_model
from trl_turns import save_chat_model

from qarl.errors import UserError
from qarl.trl import QaRLConfig, QaRLTrainer, trainer


class EngineStarted(Exception):
    pass


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template has no tools."""
    return save_random_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise EngineStarted

    monkeypatch.setattr(trainer, "RolloutEngine", start)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: two
    """
    return a + b


def undescribed(a):  # type: ignore[no-untyped-def]  # a tool without types is the misuse
    return a


def answer(messages: Any, **_: Any) -> None:
    return None


class Game:
    def reset(self, **_: Any) -> None:
        return None

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        return str(number)


class NoReset:
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        return str(number)


def same_name() -> Any:
    def add(text: str) -> str:
        """Add.

        Args:
            text: words
        """
        return text

    return add


def chats(*questions: str, **columns: Any) -> Dataset:
    prompts = [[{"role": "user", "content": question}] for question in questions]
    return Dataset.from_dict({"prompt": prompts, **columns})


DATA = chats("t3 t4", "t5 t6")


def reward(completions: Any, **_: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


def build(
    model: Any,
    folder: Path,
    data: Any = DATA,
    rewards: Any = reward,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    base = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 16,
        "quant_group_size": 32,
        "vllm_cpu_kvcache_space_gib": 0.25,
        "save_strategy": "no",
    }
    return QaRLTrainer(
        model=model if isinstance(model, torch.nn.Module) else str(model),
        reward_funcs=rewards,
        args=QaRLConfig(**base | settings),
        train_dataset=data,
        **(arguments or {}),
    )


def wrong_type(messages: Any, **_: Any) -> int:
    return 42


def raises(messages: Any, **_: Any) -> None:
    raise ValueError("no text")


MISUSES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    (
        "both",
        {"tools": [add], "environment": answer},
        {},
        ["tools and environment", "leave one out"],
    ),
    (
        "factory and environment",
        {"environment_factory": Game, "environment": answer},
        {},
        ["environment_factory and environment"],
    ),
    ("no list", {"tools": add}, {}, ["tools is", "tools=[f, g]"]),
    ("no function", {"tools": ["add"]}, {}, ["which is no function"]),
    ("a class", {"tools": [Game]}, {}, ["a class is an environment_factory"]),
    ("no docstring", {"tools": [undescribed]}, {}, ["'undescribed'", "type hint"]),
    ("two of a name", {"tools": [add, same_name()]}, {}, ["2 tools have the name 'add'"]),
    ("no reset", {"environment_factory": NoReset}, {}, ["NoReset has no method reset"]),
    ("unknown lengths", {"environment_factory": Game}, {}, ["vllm_max_model_length"]),
    ("no factory", {"environment_factory": Game()}, {}, ["cannot be called"]),
    (
        "a row without a route",
        {"environment_factory": {"game": Game}},
        {"vllm_max_model_length": 2000},
        ["column environment", "'game'"],
    ),
    ("no environment", {"environment": 3}, {}, ["environment is 3, which is no function"]),
    ("a class as environment", {"environment": Game}, {}, ["an environment_factory"]),
    ("arguments", {"environment": lambda turn: None}, {}, ["cannot be called", "messages"]),
    ("no such file", {"environment": "none.py:answer"}, {}, ["none.py"]),
    ("no name", {"environment": "answer"}, {}, ["environment", "module:function"]),
    ("it fails", {"environment": raises}, {}, ["fails on an empty turn", "no text"]),
    ("no reply", {"environment": wrong_type}, {}, ["returned 42"]),
    ("cut answers of tools", {"tools": [add]}, {"max_tool_response_length": 9}, ["has no effect"]),
    ("workers of tools", {"tools": [add]}, {"environment_workers": 3}, ["has no effect"]),
    ("limits without turns", {}, {"max_turn_length": 3}, ["max_turn_length", "environment"]),
    ("rounds without turns", {}, {"max_tool_calling_iterations": 3}, ["has no effect"]),
    ("negative rounds", {"tools": [add]}, {"max_tool_calling_iterations": -1}, ["0 or more"]),
    ("too long a turn", {"environment": answer}, {"max_turn_length": 99}, ["max_turn_length"]),
]


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [row[1:] for row in MISUSES],
    ids=[row[0] for row in MISUSES],
)
def test_one_clear_error(
    chat: Path,
    tmp_path: Path,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    words: list[str],
) -> None:
    with pytest.raises(UserError) as caught:
        build(chat, tmp_path, arguments=arguments, **settings)
    for word in words:
        assert word in str(caught.value)
    assert "multi_turn." not in str(caught.value)


def test_prompts_are_messages(chat: Path, tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["t3 t4", "t5"]})
    for arguments in ({"tools": [add]}, {"environment": answer}):
        with pytest.raises(UserError, match="the prompt of row 0 is text"):
            build(chat, tmp_path, data, arguments=arguments)


def test_rewards_of_an_environment_need_one(chat: Path, tmp_path: Path) -> None:
    for arguments in ({"tools": [add]}, {}):
        with pytest.raises(UserError, match="which was not given"):
            build(chat, tmp_path, rewards="environment", arguments=arguments)


def test_a_template_without_tools(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the chat template has no tools") as caught:
        build(plain, tmp_path, arguments={"tools": [add]})
    assert "environment=" in str(caught.value)


def test_a_template_whose_calls_trl_cannot_read(chat: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template += "\n{# another family #}"
    with pytest.raises(UserError, match="TRL cannot read the calls") as caught:
        build(chat, tmp_path, arguments={"tools": [add], "processing_class": tokenizer})
    assert "response_schema" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"tools": [add]}, {}),
        ({"environment_factory": Game}, {"vllm_max_model_length": 2000}),
        ({"environment_factory": {"game": Game}}, {"vllm_max_model_length": 2000}),
        ({"environment": answer}, {"max_turn_length": 8, "max_tool_response_length": 9}),
        ({"environment": "qarl.demo.calculator:answer"}, {"environment_workers": 1}),
    ],
    ids=["tools", "a factory", "factories", "an environment", "a name"],
)
def test_what_is_served(
    chat: Path, tmp_path: Path, arguments: dict[str, Any], settings: dict[str, Any]
) -> None:
    data = chats("t3", "t4", environment=["game", "game"], ground_truth=["3", "4"])
    with pytest.raises(EngineStarted):
        build(chat, tmp_path, data, arguments=arguments, **settings)
