"""Every metric of the two backends on one recorded batch, against the table of docs/lookup/verl.md."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metrics_table import kind_of, misplaced, rows
from ranks import RAYS, run_ranks

pytestmark = pytest.mark.verl
Logs = dict[str, dict[str, Any]]


def logged(folder: Path, *kind: str) -> Logs:
    """Backend -> the metrics of its step on the recorded batch of a kind."""
    run_ranks("verl_same_batch.py", 1, folder / "files", folder / "metrics.json", *kind, **RAYS)
    read: Logs = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    return logged(tmp_path_factory.mktemp("same_batch"))


@pytest.fixture(scope="module")
def logs_of_turns(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    return logged(tmp_path_factory.mktemp("turns"), "turns")


@pytest.mark.parametrize("backend", ["local", "verl"])
def test_the_table_has_every_metric(logs: Logs, backend: str) -> None:
    assert len(logs[backend]) > 100
    assert misplaced(logs[backend], backend) == []


def test_what_the_table_calls_equal_is_equal(logs: Logs) -> None:
    assert_equal_where_the_table_says_so(logs)


def test_conversations_have_the_same_metrics(logs: Logs, logs_of_turns: Logs) -> None:
    """Contexts are outside of all that both backends measure and train on."""
    assert_equal_where_the_table_says_so(logs_of_turns)
    for log in (logs_of_turns["local"], logs_of_turns["verl"]):
        assert log["turns/mean"] == 2 and log["turns/context_tokens"] == 2
        assert log["turns/failures"] == 0.5
        assert log["response_length/mean"] == logs["local"]["response_length/mean"] - 2
        assert log["mismatch/abs_max"] < 3  # the contexts' own would be 4.2


def test_contexts_in_the_mask_by_mistake_are_noticed(tmp_path: Path) -> None:
    """A context was not sampled, so its log-prob in the rollout is 0, and the trainer's is not."""
    (error,) = logged(tmp_path, "unmasked").values()
    assert "mismatch_limit" in error["what"]


def assert_equal_where_the_table_says_so(logs: Logs) -> None:
    """K3 of a micro-batch differs in its last bit, because verl's micro-batch is as wide as its longest response."""
    logged = (logs["local"], logs["verl"])
    local, verl = (
        {name: value for name, value in log.items() if kind_of(name) == "equal"} for log in logged
    )
    assert len(local) > 80
    assert local.keys() == verl.keys()
    assert {
        name: value
        for name, value in local.items()
        if value != verl[name] and not name.endswith("k3")
    } == {}
    assert verl == pytest.approx(local, rel=1e-14)


def test_the_clip_ratio_counts_what_was_cut_off(logs: Logs) -> None:
    """Two of eight responses have the length of the limit. One of them ends with EOS."""
    for backend in ("local", "verl"):
        assert logs[backend]["response_length/clip_ratio"] == 1 / 8
    assert logs["verl"]["response_length_non_aborted/clip_ratio"] == 1 / 8
    assert (
        logs["verl"]["prompt_length/clip_ratio"] == 0.0
    )  # the limit is 6, the longest prompt has 5


def test_updates_without_a_finite_gradient_are_counted(logs: Logs) -> None:
    assert logs["verl"]["actor/skipped_steps"] == 0
    assert logs["verl_without_updates"]["actor/skipped_steps"] == 2  # mini-batches


def test_no_row_is_left_over() -> None:
    """Each pattern is the first that matches some name: itself, with a part in the place of `*`."""
    hidden = [
        pattern for pattern, kind in rows().items() if kind_of(pattern.replace("*", "x")) != kind
    ]
    assert hidden == []


def test_a_loop_says_why_its_conversations_ended() -> None:
    """The limit has 4 tokens, and 1 is EOS. Two short ones had no room for a context, and a long one had no turn left;
    of the other two no loop has said anything."""
    import torch

    from qarl.verl.response_ends import corrected_metrics

    told = {(5, 1): "length", (6, 1): "length", (5, 6, 7, 8): "max_turns"}
    rows = [*told, (7, 1), (5, 6, 7, 9)]
    responses = [torch.tensor(row) for row in rows]
    metrics = corrected_metrics(
        [1.0] * 5,
        responses,
        [torch.ones_like(row) for row in responses],
        [3] * 5,
        SimpleNamespace(max_response_length=4, max_prompt_length=8),
        {1},
        [told.get(row) for row in rows],
    )
    assert metrics["response_length/clip_ratio"] == 3 / 5
    assert metrics["response_length_non_aborted/clip_ratio"] == 3 / 5


@pytest.mark.vllm
def test_a_response_is_cut_off_where_vllm_says_so() -> None:
    """Against vLLM's own check of a request after each token."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import RequestStatus

    from qarl.verl.response_ends import finish_reasons

    class Request:
        pooling_params, use_structured_output, stop_reason = None, False, None
        max_tokens, num_tokens = 4, 0

        def __init__(self, tokens: list[int]) -> None:
            self.output_token_ids, self.num_output_tokens = tokens, len(tokens)
            self.sampling_params = SamplingParams(max_tokens=4, stop_token_ids=[7])
            self.sampling_params._eos_token_id = 1
            self.status = RequestStatus.RUNNING

    for tokens in ([5, 6, 8, 9], [5, 6, 8, 1], [5, 6, 8, 7], [5, 1], [7], [5, 7, 1, 2]):
        request: Any = Request(tokens)
        assert check_stop(request, 100)
        cut_off = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert finish_reasons([torch.tensor(tokens)], 4, {1, 7}) == [
            "length" if cut_off else "stop"
        ]
