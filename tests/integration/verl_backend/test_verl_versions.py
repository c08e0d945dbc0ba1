"""The version of each token: what the client of interrupted answers, the agent loops and a step's metrics say of it."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from qarl.errors import UserError
from qarl.rollout.remote.records import TransferFailed
from qarl.verl import versioned_client
from qarl.verl.agent_loop import Recorder
from qarl.verl.publish import refuse_other_version
from qarl.verl.versions import (
    VERSIONS,
    VersionStatistics,
    expanded,
    padded,
    placed,
    run_lengths,
)

LIMIT = 6


class Server:
    """A vLLM server that answers one token at a time, and is interrupted after each number of tokens in `parts`. Every
    interruption is a publish."""

    def __init__(self, *parts: int, version: int | None = 3) -> None:
        self.parts = list(parts)
        self.version = version
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        self.prompts.append(prompt_ids)
        count = self.parts.pop(0)
        steps = self.version
        if self.version is not None and self.parts:
            self.version += 1
        tokens = list(range(100 + len(prompt_ids), 100 + len(prompt_ids) + count))
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * count,
            stop_reason="aborted" if self.parts else "completed",
            extra_fields={"global_steps": steps},
        )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the client of a server. It does not wait before it asks again."""

    async def at_once(seconds: float) -> None: ...

    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)

    def make(server: Server) -> Any:
        rollout = SimpleNamespace(name="vllm", response_length=LIMIT)
        config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        versioned = versioned_client.VersionedClient(config)

        async def acquired(request_id: str, **_: Any) -> Any:
            return "server", SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

        versioned._acquire_server = acquired
        versioned._release_server = lambda *_, **__: None
        return versioned

    return make


def answer(client: Any) -> Any:
    return asyncio.run(client.generate("id", prompt_ids=[1, 2], sampling_params={}))


def test_every_part_of_an_answer_has_its_version(client: Any) -> None:
    """The second part is interrupted before its first token."""
    server = Server(2, 0, 3, version=3)
    output = answer(client(server))
    assert output.extra_fields[VERSIONS] == [(3, 2), (5, 3)]
    assert len(output.token_ids) == 5 == len(output.log_probs)
    assert server.prompts == [[1, 2], [1, 2, 102, 103], [1, 2, 102, 103]]
    bounds = (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"])
    assert bounds == (3, 5)


def test_answers_at_the_same_time_do_not_mix(client: Any) -> None:
    async def both() -> list[Any]:
        servers = Server(1, 2, version=1), Server(3, version=9)
        return await asyncio.gather(
            *(client(s).generate("id", prompt_ids=[1], sampling_params={}) for s in servers)
        )

    first, second = asyncio.run(both())
    assert first.extra_fields[VERSIONS] == [(1, 1), (2, 2)]
    assert second.extra_fields[VERSIONS] == [(9, 3)]


def test_an_answer_of_no_version_is_refused(client: Any) -> None:
    with pytest.raises(UserError, match="before it had any weights"):
        answer(client(Server(2, version=None)))


def test_verls_client_looks_for_the_next_generate_in_ours() -> None:
    """It calls `super().generate` once for each part."""
    order = versioned_client.VersionedClient.__mro__
    position = order.index(FullyAsyncLLMServerClient)
    assert order[position + 1 : position + 3] == (versioned_client._Parts, LLMServerClient)


def test_an_agent_loop_keeps_the_versions_of_all_turns() -> None:
    answers = [(3, 2)], [(4, 1), (5, 1)]
    outputs = [
        SimpleNamespace(token_ids=[7, 8], extra_fields={VERSIONS: runs, "global_steps": 5})
        for runs in answers
    ]

    async def generate() -> Any:
        return outputs.pop(0)

    recorder: Any = Recorder(SimpleNamespace(generate=generate))
    for _ in range(2):
        asyncio.run(recorder.generate())
    assert recorder.versions == [3, 3, 4, 5]
    # a tool's two tokens between the turns, and the last token cut off
    assert placed(recorder.versions, [1, 1, 0, 0, 1]) == [(3, 2), (-1, 2), (4, 1)]


def test_runs_and_tokens_are_the_same() -> None:
    tokens = [2, 2, 3, -1, -1, 3]
    assert run_lengths(tokens) == [(2, 2), (3, 1), (-1, 2), (3, 1)]
    assert expanded(run_lengths(tokens)) == tokens
    # JSON and TransferQueue return lists
    assert padded([[[2, 2]], [[3, 1], [4, 3]]], 3).tolist() == [[2, 2, -1], [3, 4, 4]]


def test_the_metrics_of_a_step() -> None:
    """Ages, mixed answers, and the two parts of the mismatch against their definitions in FP64."""
    seen = VersionStatistics()
    seen.add_rows([[(4, 3)], [(3, 1), (-1, 2), (5, 1)]], current=5)
    own, old, rollout = (torch.tensor(row) for row in ([-1.0, -2.0], [-1.25, -1.5], [-1.0, -2.125]))
    seen.add_checked(own, old, rollout)
    ratio = [-0.25, 0.5]
    assert seen.metrics() == pytest.approx(
        {
            "staleness/age_mean": (3 * 1 + 2 + 0) / 5,
            "staleness/age_max": 2.0,
            "staleness/mixed_frac": 0.5,
            "staleness/checked_frac": 2 / 5,
            "mismatch/of_version_abs_mean": 0.125 / 2,
            "mismatch/of_version_abs_max": 0.125,
            "staleness/ratio_abs_mean": 0.375,
            "staleness/ratio_k3": sum(math.exp(r) - 1 - r for r in ratio) / 2,
        }
    )
    assert seen.mean_delta == 0.0625 and seen.mean_length == 2.5
    assert VersionStatistics().metrics() == {}


def test_a_publish_of_another_version_is_refused() -> None:
    refuse_other_version({"version": 4}, 4)
    refuse_other_version({"version": 4}, None)
    with pytest.raises(TransferFailed, match=r"version 4 .* expects version 2"):
        refuse_other_version({"version": 4}, 2)
