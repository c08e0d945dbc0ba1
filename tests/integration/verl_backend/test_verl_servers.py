"""Processes of a verl run: which are dead, which tensors the engines have, how often they preempted a response."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from verl_runs import KWARGS

from qarl.errors import UserError
from qarl.verl.failures import as_user_error

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from qarl.verl import failures, first_error, reward
from qarl.verl import sampler as sampler_module
from qarl.verl.ask_servers import RESUME, Watch, preemptions_in, servers_have_base
from qarl.verl.sampler import PromptReplayBuffer

ANSWERS = {
    "vllm_server_0_0": None,
    "agent_loop_worker_0_ab": None,
    "reward_loop_worker_0": None,
    "other": None,
}


class Actor:
    """Answers as `answers` says: None is well, an exception is one, and `...` is no answer yet."""

    def __init__(self, name: str, answers: dict, asked: list[str]) -> None:
        def remote(*arguments: str) -> SimpleNamespace:
            asked.append(" ".join((name, *arguments)))
            future: Future = Future()
            if isinstance(answers[name], Exception):
                future.set_exception(answers[name])
            elif answers[name] is None:
                future.set_result(None)
            return SimpleNamespace(future=lambda: future)

        def call(function: Callable[[Any], Any]) -> SimpleNamespace:
            future: Future = Future()
            future.set_result(function(self))
            return SimpleNamespace(future=lambda: future)

        self.collective_rpc = self.__ray_ready__ = SimpleNamespace(remote=remote)
        self.__ray_call__ = SimpleNamespace(remote=call)


@pytest.fixture
def actors(monkeypatch):
    """The named actors of a run; what they were asked."""
    answers, asked = dict(ANSWERS), []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: list(answers))
    monkeypatch.setattr(ray, "get_actor", lambda name: Actor(name, answers, asked))
    return answers, asked


def test_those_that_generate_are_asked_and_no_others(actors):
    watch = Watch()
    watch.ask()
    assert watch.dead() == {}
    assert actors[1] == [
        "vllm_server_0_0 check_health",
        "agent_loop_worker_0_ab",
        "reward_loop_worker_0",
    ]
    actors[1].clear()
    watch = Watch(only_servers=True)
    watch.ask()
    assert watch.dead(1.0) == {} and actors[1] == ["vllm_server_0_0 check_health"]


def test_one_that_died_is_named_though_its_name_is_gone(actors):
    answers, asked = actors
    watch = Watch()
    watch.ask()
    assert watch.dead() == {}
    answers["vllm_server_0_0"] = RuntimeError("the actor died\nat night")
    listed = [name for name in answers if name != "vllm_server_0_0"]
    ray.util.list_named_actors = lambda: listed
    watch.ask()
    assert watch.dead() == {"vllm_server_0_0": "RuntimeError: the actor died"}
    assert len([name for name in asked if name.startswith("vllm")]) == 2


def test_a_good_answer_from_before_says_nothing_of_now(actors):
    """The sampler looks every five seconds, and an engine may answer and die in between."""
    answers, _ = actors
    watch = Watch()
    watch.ask()
    answers["vllm_server_0_0"] = RuntimeError("EngineCore encountered an issue")
    watch.ask()
    assert watch.dead(1.0) == {"vllm_server_0_0": "RuntimeError: EngineCore encountered an issue"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"vllm_server_0_0": True, "vllm_server_1_0": True, "vllm_server_1_1": None}, True),
        ({"vllm_server_0_0": True, "vllm_server_1_0": False}, False),
        (
            {
                "vllm_server_0_0": True,
                "vllm_server_reward_0_0": None,
                "vllm_server_teacher_0_0": None,
            },
            True,
        ),
        ({"vllm_server_0_0": TimeoutError("no answer")}, "TimeoutError: no answer"),
        ({}, False),
    ],
)
def test_every_rank_knows_whether_the_actors_servers_have_the_base(monkeypatch, answers, expected):
    """verl's own servers, which are None here, do not have the method."""

    def get(asked: list, timeout: float) -> list:
        if errors := [answer for answer in asked if isinstance(answer, Exception)]:
            raise errors[0]
        return asked

    def server(name: str) -> SimpleNamespace:
        known = SimpleNamespace(qarl_has_base=SimpleNamespace(remote=lambda: answers[name]))
        return SimpleNamespace() if answers[name] is None else known

    for name, value in {"is_initialized": lambda: True, "get_actor": server, "get": get}.items():
        monkeypatch.setattr(ray, name, value)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: list(answers))
    wire: list = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for is_first in (True, False):

        def broadcast(answer: list, src: int, is_first: bool = is_first) -> None:
            wire[:], answer[:] = (answer, answer) if is_first else (wire, wire)

        monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                servers_have_base(is_first=is_first, seconds=1.0)
        else:
            assert servers_have_base(is_first=is_first, seconds=1.0) is expected


def prompts(**statuses: str) -> dict[str, dict[str, dict]]:
    prompt_tags = {
        uid: {"is_prompt": True, "global_steps": 1, "status": status}
        for uid, status in statuses.items()
    }
    return {"train": prompt_tags | {f"{uid}_0_0": {"status": "success"} for uid in statuses}}


@pytest.fixture
def sampler(monkeypatch, actors):
    state = {"train": {}}
    monkeypatch.setattr(tq, "kv_list", lambda: state)
    monkeypatch.setattr(tq, "kv_clear", lambda **kwargs: None)
    monkeypatch.setattr(sampler_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(first_error, "_errors", [])
    return PromptReplayBuffer(**KWARGS), state


def test_the_line_of_progress_counts_whole_prompts_and_all_ended_responses(sampler, monkeypatch):
    """One prompt has both responses, of 3 and 4 tokens, and one the first of its two, of 5."""
    buffer, state = sampler
    state["train"] = prompts(a="finished", b="running", c="pending")["train"]
    for key, tokens in {"a_0_0": 3, "a_1_0": 4, "b_0_0": 5}.items():
        state["train"][key] = {"status": "success", "response_len": tokens}
    monkeypatch.setattr(sampler_module, "COUNT_SECONDS", -1.0)
    buffer._sync_metadata_from_transfer_queue()
    counted = buffer._sampled
    assert (counted.done, counted.tokens, counted.tokens_of_done) == (1, 12, 7)


@pytest.mark.parametrize("others", [{"b": "finished"}, {"b": "running"}, {}])
@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_failed_group_is_an_error_although_it_has_responses(sampler, others, partition):
    """verl takes it for a whole one."""
    buffer, state = sampler
    state[partition] = prompts(a="failure", **others)["train"]
    with pytest.raises(
        UserError, match="responses to 1 of the prompts could not be generated"
    ) as caught:
        buffer.sample(1, partition, 1 + len(others))
    assert caught.value.where == "a"


def test_a_reward_that_failed_is_named_with_its_row_and_exception(sampler, tmp_path):
    """The stub of Ray's reward worker calls in this process, where the reward has failed."""
    (tmp_path / "rewards.py").write_text("def score(**_): return {}['key']")
    keys = {"function": "rewards.py:score", "timeout_s": 60, "workers": 1, "folder": str(tmp_path)}
    arguments = {
        "data_source": "sums",
        "solution_str": "x=3",
        "ground_truth": "3",
        "extra_info": {"index": 12},
    }
    with pytest.raises(UserError) as raised:
        asyncio.run(reward.score(**keys, **arguments))
    reward.find("rewards.py:score", 1, str(tmp_path)).stop()
    buffer, state = sampler
    state |= prompts(a="failure")
    with pytest.raises(UserError) as caught:
        buffer.sample(1, "train", 1)
    assert caught.value.what == raised.value.what and RESUME in caught.value.fix
    for part in (
        "score raised KeyError",
        "row with index 12",
        "'sums'",
        "'key'",
        "rewards.py, line 1",
        "x=3",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("before", [None, ...])
def test_the_engine_that_died_is_named_whatever_it_was_asked_before(sampler, actors, before):
    """An answer of a moment ago, or none because the engine took the question with it."""
    buffer, state = sampler
    actors[0]["vllm_server_0_0"] = before
    buffer._watch.ask()
    actors[0]["vllm_server_0_0"] = RuntimeError("EngineCore encountered an issue")
    state |= prompts(a="failure")
    with pytest.raises(UserError, match="has stopped, and 1 prompts lack responses"):
        buffer.sample(1, "train", 1)


def test_a_process_that_dies_with_its_requests_is_noticed(sampler, actors, monkeypatch):
    """An agent loop's worker takes the requests with it: their prompts are `running` for ever."""
    monkeypatch.setattr(sampler_module, "WATCH_SECONDS", 0.1)
    buffer, state = sampler
    state |= prompts(a="running")
    actors[0]["agent_loop_worker_0_ab"] = RuntimeError("gone")
    with pytest.raises(UserError, match="while the sampler waited for its responses") as caught:
        buffer.sample(1, "train", 1)
    assert "agent_loop_worker_0_ab: RuntimeError: gone" in caught.value.where


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer_mode": "colocate_async"}, "trainer.v1.trainer_mode=colocate_async"),
        ({"sampler_kwargs": {"filter_groups": True}}, "algorithm.filter_groups.enable=True"),
        (
            {"sampler_kwargs": {"sync_refill_failed_groups": True}},
            "trainer.v1.sampler.sync_refill_failed_groups=True",
        ),
    ],
)
def test_what_the_sampler_would_ignore_is_refused_by_name(changes, key):
    with pytest.raises(UserError) as caught:
        PromptReplayBuffer(**KWARGS | changes)
    assert key in caught.value.what and "custom_sampler.path" in caught.value.fix


def task_error(cause: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands an error from a task."""
    return ray.exceptions.RayTaskError("run", "Traceback: of the task", cause).as_instanceof_cause()


def test_a_workers_error_comes_out_as_it_was_raised(tmp_path):
    raised = UserError("no room", where="there", fix="make some")
    user_error = as_user_error(task_error(raised), tmp_path)
    assert type(user_error) is UserError
    assert (user_error.what, user_error.where, user_error.fix) == ("no room", "there", "make some")


@pytest.mark.parametrize(
    ("raised", "what", "fix"),
    [
        (zmq.Again(), "stopped answering", RESUME),
        (
            UserError("a reward failed", fix=f"fix the cause and {RESUME}"),
            "a reward failed",
            "fix the cause",
        ),
    ],
)
def test_advice_to_run_again_says_what_that_does(tmp_path, monkeypatch, raised, what, fix):
    user_error = as_user_error(task_error(raised), tmp_path)
    assert what in user_error.what and fix in user_error.fix
    assert (
        "starts fresh, because there is no checkpoint" in user_error.fix
        and "resumes" not in user_error.fix
    )
    monkeypatch.setattr(
        failures, "whole_and_torn", lambda folder: ({4: folder, 12: folder}, {16: "torn"})
    )
    assert "it resumes after step 12" in as_user_error(task_error(raised), tmp_path).fix
    keys = "with trainer.resume_mode=auto "
    assert (
        f"{keys}it resumes after step 12" in as_user_error(task_error(raised), tmp_path, keys).fix
    )


def test_a_dead_process_is_named(tmp_path):
    died = ray.exceptions.ActorDiedError()
    died.error_msg = "The actor died.\n\tclass_name: WorkerDict\n\tpid: 42\nand more"
    for error in (died, task_error(died)):
        user_error = as_user_error(error, tmp_path)
        assert user_error.what == "a process of the verl run died" and "pid: 42" in user_error.where


OTHERS = """# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def counters(*values: float) -> str:
    lines = [
        f'vllm:num_preemptions_total{{engine="{i}",model_name="m {{x}}"}} {value}'
        for i, value in enumerate(values)
    ]
    return OTHERS + "\n".join(lines) + "\n"


@pytest.fixture
def servers(monkeypatch):
    """What each of two servers of a run answers at /metrics. Ray knows them and others."""
    answers = {"text": counters(0.0, 0.0)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers["text"] if self.path == "/metrics" else ""
            self.send_response(200 if text else 500)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    actor = SimpleNamespace(
        get_server_address=SimpleNamespace(remote=lambda: server.server_address)
    )
    named = ["vllm_server_0_0", "vllm_server_1_0", "vllm_server_0_1", "agent_loop_worker_0"]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: named)
    monkeypatch.setattr(ray, "get_actor", lambda name: actor)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    yield answers
    server.shutdown()
    server.server_close()


@pytest.fixture
def counter(monkeypatch, servers):
    monkeypatch.setattr(ReplayBuffer, "sample", lambda self, *args: ("batch", {"verls": 1.0}))
    return PromptReplayBuffer(**KWARGS)


def test_a_step_logs_the_preemptions_of_its_generation(counter, servers, caplog):
    assert counter.sample(1, "train", 4) == ("batch", {"verls": 1.0, "rollout/preemptions": 0.0})
    assert "KV cache" not in caplog.text
    servers["text"] = counters(1.0, 2.0)
    with caplog.at_level(logging.WARNING):
        assert counter.sample(2, "train", 4)[1]["rollout/preemptions"] == 6.0
    assert (
        "6 times vLLM interrupted a response and computed it again, because the KV cache is too small"
        in caplog.text
    )


@pytest.mark.parametrize("answer", [OTHERS, ""])
def test_a_server_that_does_not_say_is_a_warning_once(counter, servers, caplog, answer):
    """Without statistics a server publishes other metrics. A metric ends no run, and comes back with the answers."""
    good, servers["text"] = servers["text"], answer
    for _ in range(2):
        assert counter.sample(1, "train", 4)[1] == {"verls": 1.0}
    (record,) = caplog.records
    assert "disable_log_stats=False" in record.getMessage()
    servers["text"] = good
    assert counter.sample(1, "train", 4)[1]["rollout/preemptions"] == 0.0


def test_the_counter_is_that_of_vllm():
    pytest.importorskip("vllm")
    from vllm.v1.metrics import loggers

    assert 'name="vllm:num_preemptions",' in Path(loggers.__file__).read_text()
    assert preemptions_in(counters(3.0, 3.0)) == 6  # as Prometheus writes it
