"""Environments in worker processes: replies, failures that the model is told, and results that end the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qarl.data.environments import Environment
from qarl.data.prompts import Prompt
from qarl.errors import UserError
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.loop import Failure
from qarl.turns.reply import Reply

FILE = Path(__file__).parents[2] / "support" / "turn_environments.py"
PROMPT = Prompt(7, "sums", [{"role": "user", "content": "1+1"}], [1], "2")


def conversation(*turns: str) -> Conversation:
    started = Conversation([1], [*PROMPT.messages])
    for text in turns:
        started.add_turn(Sampled([5], [-1.0], "stop"), text)
    return started


@pytest.fixture(scope="module")
def worse() -> Iterator[Environment]:
    environment = Environment(f"{FILE}:worse", workers=2, timeout_s=5.0)
    environment.load()
    yield environment
    environment.stop()


def test_replies_keep_the_order_of_the_conversations() -> None:
    environment = Environment(f"{FILE}:three_sums", workers=2, timeout_s=60.0)
    held = [conversation("1"), conversation("2", "3", "4"), conversation("2", "1")]
    replies = environment.respond([(PROMPT, each) for each in held])
    assert replies == [
        Reply([{"role": "user", "content": "1011+4001"}], 1.0),
        Reply([], 0.0),
        Reply([{"role": "user", "content": "2011+4002"}], 1.0),
    ]
    environment.stop()


def test_an_async_environment() -> None:
    environment = Environment(f"{FILE}:later", workers=1, timeout_s=60.0)
    replies = environment.respond([(PROMPT, conversation("x")), (PROMPT, conversation("x", "y"))])
    assert replies == [Reply([{"role": "user", "content": "2"}]), Reply([])]
    environment.stop()


def test_what_fails_is_told_to_the_model(worse: Environment) -> None:
    replies = worse.respond(
        [(PROMPT, conversation(text)) for text in ("raise", "exit", "", "raise")]
    )
    raised, ended, fine, again = replies
    assert isinstance(raised, Failure) and isinstance(ended, Failure) and again == raised
    assert raised.told == "Error: ValueError: bad tool"
    assert "raised ValueError: bad tool (at " in raised.why and "turn_environments.py" in raised.why
    assert ended.told == "Error: the call ended its process"
    assert "exit code 3" in ended.why
    assert fine == Reply([])


def test_what_hangs_is_told_to_the_model_and_its_process_replaced() -> None:
    environment = Environment(f"{FILE}:worse", workers=1, timeout_s=0.5)
    hung, fine = environment.respond([(PROMPT, conversation(text)) for text in ("hang", "")])
    environment.stop()
    assert isinstance(hung, Failure)
    assert hung.told == "Error: the call took longer than multi_turn.timeout_s=0.5 seconds"
    assert fine == Reply([])


def test_a_megabyte_comes_back(worse: Environment) -> None:
    (reply,) = worse.respond([(PROMPT, conversation("megabyte"))])
    assert isinstance(reply, Reply) and len(reply.messages[0]["content"]) == 10**6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("number", "returned 42.*int is no message.*return None to end"),
        ("nan", "returned.*a reward is a finite number"),
    ],
)
def test_what_is_no_reply_ends_the_run(worse: Environment, text: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)the environment worse {words}") as error:
        worse.respond([(PROMPT, conversation(text))])
    assert "row 7, data_source 'sums'" in str(error.value)


def test_functions_that_are_not_there_or_take_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def few(messages): return None\n")
    with pytest.raises(UserError, match=r"(?s)has no function 'many'.*its functions: few"):
        Environment(f"{tmp_path}/mine.py:many", workers=1, timeout_s=None).load()
    with pytest.raises(UserError, match=r"(?s)rollout\.environment.*cannot|cannot load"):
        Environment(f"{tmp_path}/none.py:many", workers=1, timeout_s=None).load()
    environment = Environment(f"{tmp_path}/mine.py:few", workers=1, timeout_s=None)
    with pytest.raises(
        UserError, match=r"(?s)raised TypeError.*give it the parameters messages, data_"
    ):
        environment.respond([(PROMPT, conversation("x"))])
