"""Whatever fails in a vLLM worker while weights arrive, verl's sender comes to its end and the worker raises it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from checkout import ROOT

from qarl.rollout.publish.send import encode_publish
from qarl.rollout.publish.wire import UNIT
from qarl.verl.plugin.transport import decode, encode

pytest.importorskip("verl")
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("receive") / "results.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "verl_receive.py"), str(output)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("case", "raised", "names"),
    [
        ("well", None, ["part0", "part1", "part2"]),
        ("not made", "ValueError('the engine quantizes other layers')", []),
        ("adapter", "lora_rank must be 0", []),
        # Its traceback must not keep views of the shared memory alive, which then could not be closed.
        ("on the way", "ValueError('no room for part0, 262144 elements')", ["part0"]),
        # The engine would generate with whatever it holds.
        ("stops", "RuntimeError", ["part0", "part1", "part2"]),
        ("nothing", "the publish ended before its first record", []),
    ],
)
def test_the_sender_ends_and_the_worker_raises(results, case, raised, names):
    found = results[case]
    assert found["sent"] and found["errors"] == []
    assert found["names"] == names
    assert found["raised"] is None if raised is None else raised in found["raised"]


def test_a_worker_refuses_a_vllm_that_cannot_publish(results):
    assert "QaRL does not support the installed vLLM" in results["another vllm"]


def test_a_worker_copies_what_lies_in_a_buffer_that_is_reused(results):
    assert results["reused"] == {"version": 1}


def test_changes_come_through_verls_buckets_and_a_lost_publish_is_noticed(results):
    """The trainer assumes nothing: the worker says what it holds, also after a publish that never came."""
    first, second, last = results["changes"]["publishes"]
    assert [one["raised"] for one in (first, second, last)] == [None] * 3
    assert all(one["equal"] for one in (first, second, last))
    assert [one["version"] for one in (first, second, last)] == [1, 2, 4]
    assert [one["publish/delta"] for one in (first, second, last)] == [0, 1, 0]
    assert second["publish/changed_words"] == 64 and second["publish/mbytes"] < 0.02 * first["publish/mbytes"]
    assert results["changes"]["answers"] == [False, True, True, False]


def test_every_record_survives_a_bucket_which_is_a_dict_by_name():
    tensors = [(f"model.layers.{i}.norm.weight", torch.full((4,), float(i))) for i in range(3)]
    bucket = dict(encode(tensors, version=7, run="host/1/01"))
    received = list(decode(bucket.items(), run="host/1/01"))
    sent = list(encode_publish(tensors, version=7, run="host/1/01"))
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert [name for name, _ in received].count(UNIT) == 3
    assert all(torch.equal(mine, other) for (_, mine), (_, other) in zip(received, sent, strict=True))
