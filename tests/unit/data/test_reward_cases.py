"""One reward, one answer: each function of `reward_cases` has the same score or refusal in every backend."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reward_cases import CASES, EXTRA_INFO, GROUND_TRUTH, RESPONSES, limit_of, write_case

from qarl.config.reward import RewardConfig
from qarl.data.prompts import Prompt
from qarl.data.scoring import find_reward
from qarl.errors import UserError
from qarl.eval import evaluate
from qarl.trainer.local import LocalTrainer
from qarl.trl.rewards import named_reward
from qarl.verl.reward import find, score

ROWS = [Prompt(7, "sums", [], [1], GROUND_TRUTH, EXTRA_INFO)] * len(RESPONSES)


def in_local(spec: str, keys: RewardConfig) -> list[float]:
    """As a step scores its responses, whose tokens are here their indices."""
    texts = SimpleNamespace(batch_decode=lambda ids, **_: [RESPONSES[i] for i in ids])
    reward = find_reward(spec, keys.workers)
    run: Any = SimpleNamespace(
        texts=lambda responses: LocalTrainer.texts(run, responses),
        tokenizer=texts,
        parts=SimpleNamespace(reward_fn=reward),
        config=SimpleNamespace(reward=keys),
    )
    tokens: Any = SimpleNamespace(response_token_ids=range(len(RESPONSES)), conversations=None)
    outcomes = LocalTrainer.rewards(run, ROWS, tokens)
    return [outcome.score for outcome in outcomes]


def in_eval(spec: str, keys: RewardConfig) -> list[float]:
    reward = evaluate.reward_of(keys)
    reward.load()
    outcomes = evaluate.scored_responses(reward, ROWS, RESPONSES, timeout_s=keys.timeout_s)
    return [outcome.score for outcome in outcomes]


def in_trl(spec: str, keys: RewardConfig) -> list[float]:
    columns = {
        "data_source": ["sums"] * 2,
        "ground_truth": [GROUND_TRUTH] * 2,
        "extra_info": [EXTRA_INFO] * 2,
    }
    function = named_reward(spec, workers=keys.workers, timeout_s=keys.timeout_s)
    return function(
        ["?"] * 2, [[{"role": "assistant", "content": text}] for text in RESPONSES], **columns
    )


def in_verl(spec: str, keys: RewardConfig) -> list[float]:
    """As an actor of Ray does: in an event loop that does not run in the main thread."""
    settings = {
        "function": spec,
        "timeout_s": keys.timeout_s,
        "workers": keys.workers,
        "folder": os.getcwd(),
    }

    async def both() -> list[float]:
        results = []
        for text in RESPONSES:
            arguments = {
                "data_source": "sums",
                "ground_truth": GROUND_TRUTH,
                "extra_info": EXTRA_INFO,
            }
            results.append(await score(**settings, **arguments, solution_str=text))
        return [result["score"] if isinstance(result, dict) else result for result in results]

    try:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(lambda: asyncio.run(both())).result()
    finally:
        find(spec, keys.workers, os.getcwd()).stop()


BACKENDS: dict[str, Callable[[str, RewardConfig], list[float]]] = {
    "local": in_local,
    "verl": in_verl,
    "trl": in_trl,
    "eval": in_eval,
}


IN_VERL = (
    "plain", "dict", "changes its arguments", "chdir", "prints", "multiprocessing", "raises", "os._exit", "NaN",
    "async", "syntax error", "loop that catches all", "lock",
)  # fmt: skip
"""Each kind of case once. Each case starts processes of its own."""


def fast_and_slow() -> Iterator[Any]:
    """Every case with every backend; for a look after every change the local backend has all, and verl has a few."""
    for name in CASES:
        for backend in BACKENDS:
            fast = backend == "local" or (backend == "verl" and name in IN_VERL)
            yield pytest.param(name, backend, marks=() if fast else pytest.mark.slow)


OF_A_BATCH = (
    "def score(solution_strs, ground_truths, **others): return [*map(len, solution_strs)]\n"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_all_responses(tmp_path: Path, backend: str) -> None:
    """verl scores each response by itself, so there it is refused."""
    file = tmp_path / "own.py"
    file.write_text(OF_A_BATCH)
    keys = RewardConfig(function=f"{file}:score", workers=1)
    if backend == "verl":
        with pytest.raises(UserError, match="takes all responses of a batch at once"):
            BACKENDS[backend](keys.function, keys)
    else:
        assert BACKENDS[backend](keys.function, keys) == [*map(len, RESPONSES)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "backend"), fast_and_slow())
def test_the_same_score_or_the_same_refusal(tmp_path: Path, name: str, backend: str) -> None:
    spec, expected = write_case(tmp_path, name), CASES[name][1]
    keys = RewardConfig(function=spec, timeout_s=limit_of(name), workers=1)
    before = os.getcwd(), dict(os.environ)
    if isinstance(expected, list):
        assert BACKENDS[backend](spec, keys) == expected
    else:
        with pytest.raises(UserError) as error:
            BACKENDS[backend](spec, keys)
        assert re.search(expected, str(error.value))
    assert (os.getcwd(), dict(os.environ)) == before


def test_a_conversation_beside_a_single_answer_is_scored_whole() -> None:
    """In TRL, as in the other backends: its first turn has the number, and its last one has none."""
    first = [("assistant", "4"), ("user", "sure?"), ("assistant", "yes")]
    second = [("assistant", "5")]
    texts = ["4 sure? yes", "5"]
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: [texts[i] for (i,) in ids])
    function = named_reward("arithmetic", workers=1, timeout_s=None, tokenizer=tokenizer)
    for order in ([0, 1], [1, 0], [0, 0], [1, 1]):
        chats = [(first, second)[i] for i in order]
        completions = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
        truths = [("4", "5")[i] for i in order]
        ids = [[i] for i in order]
        assert function(["?"] * 2, completions, completion_ids=ids, ground_truth=truths) == [1, 1]
