"""The keys rollout.stop, stop_token_ids and min_tokens: what each backend gets, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qarl.checks.generation import check_sessions, check_stops, ends_of_turns
from qarl.config import ConfigError, load_config
from qarl.errors import UserError
from qarl.eval.arguments import EvalRequest
from qarl.rollout.engine_config import SamplingConfig
from qarl.trainer.resume import changed_keys

QUICKSTART = "config=quickstart.yaml"


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("rollout.stop=</answer>", {"stop": ("</answer>",)}),
        ('rollout.stop=["a", "b\\n"]', {"stop": ("a", "b\n")}),
        ("rollout.stop_token_ids=[3,5]", {"stop_token_ids": (3, 5)}),
        ("rollout.min_tokens=7", {"min_tokens": 7}),
        (None, {}),
    ],
)
def test_training_and_evaluations_have_them(key: str | None, fields: dict[str, Any]) -> None:
    config = load_config([QUICKSTART, *([key] if key else [])])
    off = {"stop": (), "stop_token_ids": (), "min_tokens": 0}
    for sampling in (SamplingConfig.of_run(config), SamplingConfig.of_evaluation(config)):
        assert {name: getattr(sampling, name) for name in off} == off | fields
    before = load_config([QUICKSTART]).model_dump(mode="json")
    assert [*changed_keys(before, config)] == [f"rollout.{name}" for name in fields]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["rollout.min_tokens=80"], "none could end by itself"),
        (["rollout.min_tokens=-1"], "greater than or equal to 0"),
        (["rollout.min_tokens=4", "backend=verl"], "verl's trainer are over the whole vocabulary"),
        (["rollout.stop=['']"], "at least 1 character"),
        (["rollout.stop=[3]"], "valid string"),
        (["rollout.stop_token_ids=[-3]"], "greater than or equal to 0"),
        (["rollout.stop_token_ids=3"], "valid list"),
    ],
)
def test_refused_in_the_config(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config([QUICKSTART, *keys])


class Tokenizer:
    eos_token_id = 1

    def __len__(self) -> int:
        return 40


class Token(str):
    special = True


def test_refused_before_the_engine_starts() -> None:
    tokenizer: Any = Tokenizer()
    tokenizer.added_tokens_decoder = {1: Token("<|end|>"), 2: Token("<x>")}
    config = load_config([QUICKSTART, "rollout.stop_token_ids=[40]"])
    with pytest.raises(UserError, match="token 40 does not exist"):
        check_stops(config.rollout, tokenizer)
    config = load_config([QUICKSTART, "rollout.stop=['so <x>']"])
    with pytest.raises(UserError, match=r"rollout.stop_token_ids=\[2\] instead"):
        check_stops(config.rollout, tokenizer)
    with pytest.raises(UserError, match=r"set stop_token_ids=\[2\] instead") as caught:
        check_stops(config.rollout, tokenizer, section="")
    assert caught.value.where == "stop"
    check_stops(load_config([QUICKSTART, "rollout.stop=x"]).rollout, tokenizer)


def test_sessions_know_no_turns() -> None:
    plain = load_config([QUICKSTART, "rollout.stop_token_ids=[3]"])
    check_sessions(plain, 4)
    stops = load_config([QUICKSTART, "rollout.stop=x", "rollout.min_tokens=2"])
    check_sessions(stops, None)
    with pytest.raises(UserError, match=r"rollout\.stop and rollout\.min_tokens cannot be"):
        check_sessions(stops, 4)


def test_the_ends_of_a_turn() -> None:
    config = load_config([QUICKSTART, "rollout.stop_token_ids=[3]", "model.path=nowhere"])
    ends = ends_of_turns(config, Tokenizer(), SimpleNamespace(eos_token_id=[1, 7]))
    assert ends == (1, 3, 7)


def test_arguments_of_an_evaluation() -> None:
    request = EvalRequest(model="runs/x", stop='["a\\n", "b"]', stop_token_ids="[3]", min_tokens=2)  # type: ignore[arg-type]  # texts, as typed
    assert (request.stop, request.stop_token_ids, request.min_tokens) == (["a\n", "b"], [3], 2)
    assert EvalRequest(model="runs/x", stop="</a>").stop == ["</a>"]  # type: ignore[arg-type]  # as typed
