"""Several reward functions, async ones, ones of a whole batch, and a judge behind a local server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from qarl.checks.registry import CHECKS
from qarl.config import ConfigError, load_config
from qarl.config.reward import RewardConfig, WeightedFunction
from qarl.data.digests import reward_source, reward_sources
from qarl.data.prompts import Prompt
from qarl.data.reward_outcomes import call_all
from qarl.data.reward_workers import Reward
from qarl.data.rewards import load_module
from qarl.data.scoring import (
    compares_answers,
    find_reward,
    refuse_batches,
    reward_of,
    score_responses,
    scored_responses,
)
from qarl.data.weighted_reward import part_means
from qarl.errors import UserError

FILE = """
import asyncio

CALLS = []

def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "note": solution_str.upper()}

def accurate(**_):
    return {"score": 0.25, "acc": True, "pred": "7"}

async def slowly(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    global LOOP
    loop = asyncio.get_running_loop()
    LOOP = globals().get("LOOP", loop)
    assert LOOP is loop, "a client would be bound to another loop"
    return 1.5

def ranks(data_sources, solution_strs, ground_truths, extra_infos):
    CALLS.append(len(solution_strs))
    order = sorted(solution_strs)
    return [order.index(text) + 100 * len(CALLS) for text in solution_strs]

async def async_ranks(solution_strs, **others):
    await asyncio.sleep(0.01)
    assert sorted(others) == ["data_sources", "extra_infos", "ground_truths"]
    return (len(text) for text in solution_strs)

def too_few(solution_strs, **others):
    return [1.0]

def no_list(solution_strs, **others):
    return 1.0

def one_bad(solution_strs, **others):
    return [1.0] * (len(solution_strs) - 1) + [None]

def fails(solution_strs, **others):
    raise LookupError("no verdict")

async def fails_alone(data_source, solution_str, ground_truth, extra_info=None):
    raise LookupError("no verdict")

def hangs(solution_strs, **others):
    while True:
        pass
"""
ANSWERS = ["b", "aaa", "cc"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def stopped() -> Iterator[list[Reward]]:
    used: list[Reward] = []
    yield used
    for reward in used:
        reward.stop()


def prompts(count: int = 3) -> list[Prompt]:
    return [Prompt(i, "source", [], [1], "3") for i in range(count)]


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("length", [1, 3, 2]),
        ("slowly", [1.5] * 3),
        ("ranks", [101, 100, 102]),
        ("async_ranks", [1, 3, 2]),
    ],
)
def test_scores(file: Path, stopped: list[Reward], name: str, scores: list[float]) -> None:
    reward = find_reward(f"{file}:{name}")
    stopped.append(reward)
    assert score_responses(reward, prompts(), ANSWERS, timeout_s=30) == scores
    assert score_responses(reward, [], []) == []
    assert reward.scores_all is ("ranks" in name)


def test_a_batch_is_one_call_and_one_answer_is_a_batch_of_one(
    file: Path, stopped: list[Reward]
) -> None:
    reward = find_reward(f"{file}:ranks", workers=3)
    stopped.append(reward)
    score_responses(reward, prompts(), ANSWERS)
    row = {
        "data_source": "",
        "solution_str": "x",
        "ground_truth": "",
        "extra_info": None,
    }
    outcome: Any = reward.submit(row, None).result()
    assert outcome.score == 200.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_few", "returned 1 scores for 3 responses"),
        ("no_list", "returned 1.0 for 3 responses"),
        ("one_bad", "row 2, .*returned None"),
        ("fails", "a batch of 3 responses [^(]*raised LookupError"),
        ("fails_alone", "raised LookupError"),
        ("hangs", "took longer than reward.timeout_s=0.2 seconds for each of 3 responses"),
    ],
)
def test_refusals(file: Path, stopped: list[Reward], name: str, words: str) -> None:
    reward = find_reward(f"{file}:{name}")
    stopped.append(reward)
    with pytest.raises(UserError) as caught:
        score_responses(reward, prompts(), ANSWERS, timeout_s=0.2)
    assert re.search(words, f"{caught.value.where} {caught.value}")
    assert f"the reward function {name}" in str(caught.value)


def test_call_all_needs_the_plural_parameters() -> None:
    outcome: Any = call_all(
        lambda solution_strs: [1.0], {"solution_strs": ["x"], "data_sources": []}
    )
    assert outcome.what == "raised TypeError" and "**kwargs" in outcome.fix


def several(file: Path, *weights: float) -> RewardConfig:
    functions: list[Any] = [
        {"function": f"{file}:length", "weight": weights[0]},
        {"function": "arithmetic", "weight": weights[1], "name": "right"},
        {"function": f"{file}:ranks", "weight": weights[2]},
    ]
    return RewardConfig(functions=functions)


def test_the_weighted_sum_with_each_score(file: Path, stopped: list[Reward]) -> None:
    keys = several(file, 0.5, 2.0, 0.0)
    reward = reward_of(keys)
    stopped.append(reward)
    outcomes = scored_responses(reward, prompts(), ["3", "x 3", "no"])
    assert [outcome.score for outcome in outcomes] == [2.5, 3.5, 1.0]
    assert outcomes[1].more == {
        "score": 3.5,
        "note": "X 3",
        "rewards/length": 3.0,
        "rewards/right": 1.0,
        "rewards/ranks": 102.0,
    }
    assert part_means(outcomes, keys.labels) == {
        "rewards/length/mean": 2.0,
        "rewards/right/mean": pytest.approx(2 / 3),
        "rewards/ranks/mean": 101.0,
    }
    assert part_means([], keys.labels) == {}
    assert reward.scores_all
    compared = compares_answers(keys, reward)
    assert compared is not None and compared[0] == "arithmetic"


def test_a_list_of_one_function_has_its_metric_and_the_single_key_has_none() -> None:
    listed = RewardConfig(functions=[WeightedFunction(function="arithmetic", weight=2.0)])
    outcomes = scored_responses(reward_of(listed), prompts(2), ["3", "4"])
    assert part_means(outcomes, listed.labels) == {"rewards/arithmetic/mean": 0.5}
    alone = RewardConfig(function="arithmetic")
    outcomes = scored_responses(reward_of(alone), prompts(2), ["3", "4"])
    assert part_means(outcomes, alone.labels) == {}


def test_verl_evaluates_the_sum_and_no_accuracy_of_a_part(
    file: Path, stopped: list[Reward]
) -> None:
    """verl's evaluation prefers `acc` to the reward."""
    functions: list[Any] = [
        {"function": "arithmetic"},
        {"function": f"{file}:accurate", "weight": 0},
    ]
    reward = reward_of(RewardConfig(functions=functions))
    stopped.append(reward)
    (outcome,) = scored_responses(reward, prompts(1), ["4"])
    assert outcome.more == {
        "score": 0.0,
        "pred": "7",
        "rewards/arithmetic": 0.0,
        "rewards/accurate": 0.25,
    }


def test_errors_name_the_list(file: Path, stopped: list[Reward]) -> None:
    functions = [WeightedFunction(function=name) for name in ("arithmetic", f"{file}:ranks")]
    reward = reward_of(RewardConfig(functions=functions))
    stopped.append(reward)
    reward.load()
    with pytest.raises(UserError, match="the reward function ranks takes all") as caught:
        refuse_batches(reward)
    assert caught.value.where == "reward.functions"
    missing = [WeightedFunction(function=f"{file}:nothing")]
    with pytest.raises(UserError, match="has no function 'nothing'") as caught:
        reward_of(RewardConfig(functions=missing)).load()
    assert caught.value.where == f"reward.functions={file}:nothing"
    with pytest.raises(UserError) as caught:
        find_reward(f"{file}:nothing").load()
    assert caught.value.where == f"reward.function={file}:nothing"


def test_a_function_of_a_batch_is_refused_for_verl_before_the_run(
    file: Path, stopped: list[Reward]
) -> None:
    reward = find_reward(f"{file}:ranks")
    stopped.append(reward)
    reward.load()
    names = [check.name for check in CHECKS]
    (check,) = (check for check in CHECKS if check.name == "verl scores each response by itself")
    assert check.backend == "verl"
    assert names.index(check.name) > names.index("the reward function scores a row")
    with pytest.raises(UserError, match="takes all responses of a batch at once"):
        check.make(reward)


def test_a_failing_part_is_named(file: Path, stopped: list[Reward]) -> None:
    functions: list[Any] = [{"function": "arithmetic"}, {"function": f"{file}:fails_alone"}]
    reward = reward_of(RewardConfig(functions=functions))
    stopped.append(reward)
    with pytest.raises(UserError, match="the reward function fails_alone raised LookupError"):
        score_responses(reward, prompts(), ANSWERS)
    reward = reward_of(RewardConfig(functions=[functions[0] | {"weight": 1e6}] * 1))
    assert score_responses(reward, prompts(1), ["3"]) == [1e6]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[{function: arithmetic}, {function: arithmetic}]", "two functions are called arithmetic"),
        ("[{function: arithmetic, weight: 0}]", "all weights are 0"),
        ("[{function: nowhere}]", "neither a built-in reward nor a function"),
        ("[{function: arithmetic, weight: .nan}]", "finite"),
        ("[{function: arithmetic, name: 'a b'}]", "pattern"),
        ("[{weight: 1}]", "required"),
        ("[{function: environment}]", "environment is the sum of the rewards"),
    ],
)
def test_refused_in_the_config(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["config=quickstart.yaml", f"reward.functions={value}"])


def test_the_single_key_has_no_effect_beside_the_list() -> None:
    keys = ["reward.functions=[{function: arithmetic}]", "reward.function=math_verify"]
    with pytest.raises(ConfigError, match=r"it has no effect with reward\.functions"):
        load_config(["config=quickstart.yaml", *keys])


def test_digests(file: Path) -> None:
    one = f"{file}:length"
    assert reward_sources([one]) == reward_source(one)
    assert reward_sources(["arithmetic"]) is None
    assert reward_sources(["arithmetic", one]) not in (None, reward_source(one))


class Judge(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []  # noqa: RUF012  the test empties it
    replies: dict[str, list[str]] = {}  # noqa: RUF012  the test fills it
    together = threading.Barrier(1)
    """Requests that must have come before any is answered."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        question = body["messages"][0]["content"]
        answer = question.split("student: ")[1].split("\n")[0]
        replies = self.replies[answer]
        self.together.wait()
        said = replies.pop(0) if len(replies) > 1 else replies[0]
        if said == "500":
            self.send_error(500)
            return
        content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Judge]]:
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 64)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("QARL_JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("QARL_JUDGE_KEY", "secret")
    Judge.asked.clear()
    yield Judge
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["judged", "judged_alone"])
def test_a_judge_behind_an_address(judge: type[Judge], stopped: list[Reward], name: str) -> None:
    judge.replies = {"b": ["7"], "aaa": ["500", " 10\n"], "cc": ["hm", "2.5"]}
    reward = find_reward(f"{ROOT}/examples/judge.py:{name}", workers=2)
    stopped.append(reward)
    assert score_responses(reward, prompts(), ANSWERS, timeout_s=30) == [0.7, 1.0, 0.25]
    assert len(judge.asked) == 5
    first = judge.asked[0]
    assert first["path"] == "/v1/chat/completions" and first["key"] == "Bearer secret"
    assert first["temperature"] == 0


def test_as_many_questions_at_a_time_as_the_judge_says(
    judge: type[Judge], stopped: list[Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer waits for 32 questions, however many cores the machine has."""
    monkeypatch.setattr(judge, "together", threading.Barrier(32, timeout=10))
    judge.replies = {"b": ["7"]}
    reward = find_reward(f"{ROOT}/examples/judge.py:judged")
    stopped.append(reward)
    assert score_responses(reward, prompts(64), ["b"] * 64, timeout_s=30) == [0.7] * 64


def test_all_tries_of_a_question_fit_into_the_usual_limit() -> None:
    examples = load_module(f"{ROOT}/examples/judge.py")
    limit = RewardConfig().timeout_s
    assert limit is not None and limit > examples.TRIES * examples.SECONDS


def test_a_judge_that_says_no_number_stops_the_run(
    judge: type[Judge], stopped: list[Reward]
) -> None:
    judge.replies = {"b": ["7"], "aaa": ["11"], "cc": ["2"]}
    reward = find_reward(f"{ROOT}/examples/judge.py:judged")
    stopped.append(reward)
    with pytest.raises(UserError, match="the judge said '11' instead of a number"):
        score_responses(reward, prompts(), ANSWERS, timeout_s=30)
