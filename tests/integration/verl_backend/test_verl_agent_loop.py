"""QaRL's agent loop compares the tokens that it returns with those that the engine sampled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from qarl.errors import UserError

pytest.importorskip("verl")

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from qarl.verl.agent_loop import PlainSingleTurnAgentLoop
from qarl.verl.response_ends import finish_reasons
from qarl.verl.sampled_text import refuse_other_tokens
from qarl.verl.stops import Stops
from qarl.verl.task_runner import start_agent_loop
from qarl.verl.trainer import QaRLTrainerSync


class Client:
    """A client of a rollout server that samples 1, 2, 3."""

    address = "here"

    async def generate(self, **_: Any) -> Any:
        return SimpleNamespace(token_ids=[1, 2, 3], extra_fields={})


ASKED: list[Any] = []
"""The sampling parameters that verl's loop was called with."""


def run(
    monkeypatch: pytest.MonkeyPatch,
    response: list[int],
    mask: list[int],
    custom: dict[str, Any] | None = None,
) -> Any:
    """The loop's output if verl's loop returns these tokens and this mask."""

    async def verls(self: Any, sampling_params: Any, priority: int = 0, **kwargs: Any) -> Any:
        ASKED.append(sampling_params)
        await self.server_manager.generate(prompt_ids=[5])
        assert self.server_manager.address == "here"
        return SimpleNamespace(response_ids=response, response_mask=mask, extra_fields={})

    monkeypatch.setattr(SingleTurnAgentLoop, "run", verls)
    loop = object.__new__(PlainSingleTurnAgentLoop)
    loop.rollout_config = OmegaConf.create({"custom": custom})
    loop.server_manager = client = Client()
    try:
        return asyncio.run(loop.run({"temperature": 0.5}))
    finally:
        assert loop.server_manager is client


@pytest.mark.parametrize(
    ("response", "mask"),
    [
        ([1, 2, 3], [1, 1, 1]),
        ([1, 2], [1, 1]),
        ([1, 2, 3, 9], [1, 1, 1, 0]),
        ([1, 8, 2], [1, 0, 1]),
        ([], []),
    ],
)
def test_sampled_tokens_and_tokens_that_are_not_trained_on(monkeypatch, response, mask):
    assert run(monkeypatch, response, mask).response_ids == response


@pytest.mark.parametrize(
    ("response", "mask"), [([1, 2, 9], [1, 1, 1]), ([1, 2, 3, 9], [1] * 4), ([2, 3], [1, 1])]
)
def test_changed_tokens_are_refused(monkeypatch, response, mask):
    with pytest.raises(UserError, match="not what was sampled"):
        run(monkeypatch, response, mask)


@pytest.mark.parametrize(
    "custom",
    [
        None,
        {},
        {"stop": ["x", "y"]},
        {"stop_token_ids": [3]},
        {"stop": ["x"], "stop_token_ids": [3]},
    ],
)
def test_stops_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, custom: dict[str, Any] | None
) -> None:
    run(monkeypatch, [1, 2, 3], [1, 1, 1], custom)
    assert ASKED[-1] == {"temperature": 0.5, **(custom or {})}


class Words:
    """A tokenizer whose tokens are letters; 0 is a special one."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join("abcdef"[token - 1] for token in tokens if token)


@pytest.mark.parametrize(
    ("texts", "tokens", "ended"),
    [
        ((), [1, 2, 3], False),
        (("bc",), [1, 2, 3], True),
        (("x", "c"), [1, 2, 3], True),
        (("b",), [1, 2, 3], False),
        (("bc",), [1, 2, 0, 3], True),
        (("bcd",), [1, 2, 3], False),
    ],
)
def test_a_text_that_the_last_token_completes(
    texts: tuple[str, ...], tokens: list[int], ended: bool
) -> None:
    assert Stops(texts).in_text(tokens, Words()) is ended


def test_a_response_of_the_limit_that_a_text_ended_is_not_cut_off() -> None:
    trainer: Any = object.__new__(QaRLTrainerSync)
    trainer.config = OmegaConf.create(
        {
            "data": {"max_response_length": 3},
            "actor_rollout_ref": {"rollout": {"custom": {"stop": ["bc"]}}},
        }
    )
    trainer.tokenizer = Words()
    rows = ([1, 2, 3], [3, 2, 1], [2, 3])
    reasons = [trainer._ended_by_text(torch.tensor(row)) for row in rows]
    assert reasons == ["stop", None, None]


def test_a_response_of_the_limit_that_an_id_of_the_run_ended_is_not_cut_off() -> None:
    """EOS is 1, the run adds 7, and the model's files cannot be read here."""
    trainer: Any = object.__new__(QaRLTrainerSync)
    rollout = {"custom": {"stop_token_ids": [7]}}
    root = {"model": {"path": "nowhere"}, "rollout": rollout}
    trainer.config = OmegaConf.create({"actor_rollout_ref": root})
    trainer.tokenizer = SimpleNamespace(eos_token_id=1)
    rows = [torch.tensor(row) for row in ([5, 6, 7], [5, 6, 1], [7, 6, 5], [5, 7])]
    assert finish_reasons(rows, 3, trainer._ends) == ["stop", "stop", "length", "stop"]


class Manager:
    """A user's `agent_loop_manager_class`."""

    create = staticmethod(dict)


def test_a_users_manager_gets_what_verl_gives_it() -> None:
    """verl's call is `create(config=..., llm_client=..., teacher_client=..., reward_loop_worker_handles=...)`."""
    agent = {"agent_loop_manager_class": f"{__name__}.Manager"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": agent}}})
    clients = {"llm_client": 1, "teacher_client": None, "reward_loop_worker_handles": [2]}
    assert start_agent_loop(config)(**clients) == {"config": config, **clients}


@pytest.mark.parametrize("trained", [[], [1, 2], [1, 2, 3]])
def test_a_response_may_be_cut_off_at_its_limit(trained: list[int]) -> None:
    refuse_other_tokens(trained, [1, 2, 3], "here")


@pytest.mark.parametrize(
    ("trained", "first"), [([1, 9, 3], 1), ([1, 2, 3, 4], 3), ([2, 3], 0), ([1, 3], 1)]
)
def test_other_tokens_are_refused(trained: list[int], first: int) -> None:
    with pytest.raises(
        UserError, match=f"here, from token {first} on \\(3 tokens sampled, {len(trained)} to be"
    ):
        refuse_other_tokens(trained, [1, 2, 3], "here")
