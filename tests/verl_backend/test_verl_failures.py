"""Processes that die while a verl run generates or publishes: what is asked, and what is said."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from verl_runs import KWARGS

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import transfer_queue as tq
import zmq

from qarl.errors import UserError
from qarl.verl import failure
from qarl.verl.failure import as_user_error
from qarl.verl.plugin import replay
from qarl.verl.plugin.alive import Watch
from qarl.verl.plugin.replay import PromptReplayBuffer

ANSWERS = {"vllm_server_0_0": None, "agent_loop_worker_0_ab": None, "reward_loop_worker_0": None, "other": None}


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

        self.collective_rpc = self.__ray_ready__ = SimpleNamespace(remote=remote)


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
    assert actors[1] == ["vllm_server_0_0 check_health", "agent_loop_worker_0_ab", "reward_loop_worker_0"]
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
    assert len([one for one in asked if one.startswith("vllm")]) == 2


def test_a_good_answer_from_before_says_nothing_of_now(actors):
    """The sampler looks every five seconds, and an engine may answer and die in between."""
    answers, _ = actors
    watch = Watch()
    watch.ask()
    answers["vllm_server_0_0"] = RuntimeError("EngineCore encountered an issue")
    watch.ask()
    assert watch.dead(1.0) == {"vllm_server_0_0": "RuntimeError: EngineCore encountered an issue"}
    answers["agent_loop_worker_0_ab"] = RuntimeError("gone")
    watch.ask()
    answers["agent_loop_worker_0_ab"] = None
    watch.ask()
    assert watch.dead(1.0)["agent_loop_worker_0_ab"] == "RuntimeError: gone"  # a bad one is kept until it is read


def test_one_that_is_busy_is_asked_once_and_not_called_dead(actors):
    answers, asked = actors
    answers["agent_loop_worker_0_ab"] = ...
    watch = Watch()
    for _ in range(3):
        watch.ask()
        assert watch.dead(0.01) == {}
    assert asked.count("agent_loop_worker_0_ab") == 1 and asked.count("reward_loop_worker_0") == 3


def prompts(**statuses: str) -> dict[str, dict[str, dict]]:
    found = {uid: {"is_prompt": True, "global_steps": 1, "status": status} for uid, status in statuses.items()}
    return {"train": found | {f"{uid}_0_0": {"status": "success"} for uid in statuses}}


@pytest.fixture
def sampler(monkeypatch, actors):
    state = {"train": {}}
    monkeypatch.setattr(tq, "kv_list", lambda: state)
    monkeypatch.setattr(tq, "kv_clear", lambda **kwargs: None)
    monkeypatch.setattr(replay, "ANSWER_SECONDS", 0.05)
    return PromptReplayBuffer(**KWARGS), state


def test_whole_groups_are_sampled(sampler):
    buffer, state = sampler
    state |= prompts(a="finished", b="finished")
    batch, _ = buffer.sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "b_0_0"]


@pytest.mark.parametrize("others", [{"b": "finished"}, {"b": "running"}, {}])
@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_failed_group_is_an_error_although_it_has_responses(sampler, others, partition):
    """verl takes it for a whole one."""
    buffer, state = sampler
    state[partition] = prompts(a="failure", **others)["train"]
    with pytest.raises(UserError, match="responses to 1 of the prompts could not be generated") as caught:
        buffer.sample(1, partition, 1 + len(others))
    assert caught.value.where == "a"


def test_the_engine_that_died_is_named(sampler, actors):
    buffer, state = sampler
    actors[0]["vllm_server_0_0"] = RuntimeError("EngineCore encountered an issue")
    state |= prompts(a="failure", b="running")
    with pytest.raises(UserError, match="has stopped, and 1 prompts lack responses") as caught:
        buffer.sample(1, "train", 2)
    assert "vllm_server_0_0: RuntimeError: EngineCore" in caught.value.where


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
    monkeypatch.setattr(replay, "WATCH_SECONDS", 0.1)
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
        ({"sampler_kwargs": {"sync_refill_failed_groups": True}}, "trainer.v1.sampler.sync_refill_failed_groups=True"),
    ],
)
def test_what_the_sampler_would_ignore_is_refused_by_name(changes, key):
    with pytest.raises(UserError) as caught:
        PromptReplayBuffer(**KWARGS | changes)
    assert key in caught.value.what and "custom_sampler.path=null" in caught.value.fix


def task_error(cause: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands an error from a task."""
    return ray.exceptions.RayTaskError("run", "Traceback: of the task", cause).as_instanceof_cause()


def test_a_workers_error_comes_out_as_it_was_raised(tmp_path):
    raised = UserError("no room", where="there", fix="make some")
    found = as_user_error(task_error(raised), tmp_path)
    assert type(found) is UserError
    assert (found.what, found.where, found.fix) == ("no room", "there", "make some")


@pytest.mark.parametrize(
    ("raised", "what", "fix"),
    [
        (zmq.Again(), "stopped answering", failure.RESUME),
        (UserError("a reward failed", fix=f"fix the cause and {failure.RESUME}"), "a reward failed", "fix the cause"),
    ],
)
def test_advice_to_run_again_says_what_that_does(tmp_path, monkeypatch, raised, what, fix):
    found = as_user_error(task_error(raised), tmp_path)
    assert what in found.what and fix in found.fix
    assert "starts fresh, because there is no checkpoint" in found.fix and "resumes" not in found.fix
    monkeypatch.setattr(failure, "whole_and_torn", lambda folder: ({4: folder, 12: folder}, {16: "torn"}))
    assert "it resumes after step 12" in as_user_error(task_error(raised), tmp_path).fix


def test_a_dead_process_is_named(tmp_path):
    died = ray.exceptions.ActorDiedError()
    died.error_msg = "The actor died.\n\tclass_name: WorkerDict\n\tpid: 42\nand more"
    for error in (died, task_error(died)):
        found = as_user_error(error, tmp_path)
        assert found.what == "a process of the verl run died" and "pid: 42" in found.where


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("NaN"), KeyboardInterrupt()])
def test_bugs_stay_what_they_are(tmp_path, error):
    assert as_user_error(error, tmp_path) is None
    if isinstance(error, Exception):
        assert as_user_error(task_error(error), tmp_path) is None
