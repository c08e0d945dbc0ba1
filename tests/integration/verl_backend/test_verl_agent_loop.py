"""QaRL's agent loop compares the tokens that it returns with those that the engine sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from qarl.errors import UserError

pytest.importorskip("verl")

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from qarl.verl.agent_loop_and_reward import PlainSingleTurnAgentLoop
from qarl.verl.task_runner import start_agent_loop


class Client:
    """A client of a rollout server that samples 1, 2, 3."""

    address = "here"

    async def generate(self, **_: Any) -> Any:
        return SimpleNamespace(token_ids=[1, 2, 3])


def run(monkeypatch: pytest.MonkeyPatch, response: list[int], mask: list[int]) -> Any:
    """The loop's output if verl's loop returns these tokens and this mask."""

    async def verls(self: Any, sampling_params: Any, priority: int = 0, **kwargs: Any) -> Any:
        await self.server_manager.generate(prompt_ids=[5])
        assert self.server_manager.address == "here"
        return SimpleNamespace(response_ids=response, response_mask=mask)

    monkeypatch.setattr(SingleTurnAgentLoop, "run", verls)
    loop = object.__new__(PlainSingleTurnAgentLoop)
    loop.server_manager = client = Client()
    try:
        return asyncio.run(loop.run({}))
    finally:
        assert loop.server_manager is client


@pytest.mark.parametrize(
    ("response", "mask"),
    [([1, 2, 3], [1, 1, 1]), ([1, 2], [1, 1]), ([1, 2, 3, 9], [1, 1, 1, 0]), ([1, 8, 2], [1, 0, 1]), ([], [])],
)
def test_sampled_tokens_and_tokens_that_are_not_trained_on(monkeypatch, response, mask):
    assert run(monkeypatch, response, mask).response_ids == response


@pytest.mark.parametrize(("response", "mask"), [([1, 2, 9], [1, 1, 1]), ([1, 2, 3, 9], [1] * 4), ([2, 3], [1, 1])])
def test_changed_tokens_are_refused(monkeypatch, response, mask):
    with pytest.raises(UserError, match="not what was sampled"):
        run(monkeypatch, response, mask)


class Manager:
    """A user's `agent_loop_manager_class`."""

    create = staticmethod(dict)


def test_a_users_manager_gets_what_verl_gives_it() -> None:
    """verl's call is `create(config=..., llm_client=..., teacher_client=..., reward_loop_worker_handles=...)`."""
    agent = {"agent_loop_manager_class": f"{__name__}.Manager"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": agent}}})
    clients = {"llm_client": 1, "teacher_client": None, "reward_loop_worker_handles": [2]}
    assert start_agent_loop(config)(**clients) == {"config": config, **clients}


def test_the_reward_of_verl_has_the_limit_and_the_checks(tmp_path: Path) -> None:
    from qarl.verl.agent_loop_and_reward import score

    def in_a_thread(call: Callable[[], Any]) -> Any:
        """The result of `call`, or its error. verl calls rewards in threads, where no signal can end one."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            return future.exception() or future.result()

    file = tmp_path / "rewards.py"
    file.write_text(
        "import sys\n"
        "def ends(data_source, solution_str, ground_truth, extra_info): sys.exit(0)\n"
        "def nan(data_source, solution_str, ground_truth, extra_info): return float('nan')\n"
        "def loops(data_source, solution_str, ground_truth, extra_info):\n    while True: pass\n"
        "def good(data_source, solution_str, ground_truth, extra_info): return {'score': 1, 'length': 3}\n"
        "def plain(data_source, solution_str, ground_truth, extra_info): return 1\n"
    )
    arguments = {"data_source": "sums", "solution_str": "x", "ground_truth": "1", "extra_info": {}}
    cases = (("ends", "raised SystemExit", 60), ("nan", "returned nan", 60), ("loops", "timeout_s=0.3", 0.3))
    for name, problem, limit in cases:
        judged = arguments | {"function": f"{file}:{name}", "timeout_s": limit}
        error = in_a_thread(lambda judged=judged: score(**judged))
        assert isinstance(error, UserError) and problem in str(error) and "'sums'" in str(error)
    assert score(**arguments, function=f"{file}:good", timeout_s=None) == {"score": 1.0, "length": 3}
    assert score(**arguments, function=f"{file}:plain", timeout_s=60) == 1.0
    assert in_a_thread(lambda: score(**arguments, function="arithmetic", timeout_s=1e-9)) == 0.0
