"""Which versions a publish may have, at every door of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from publish_streams import engine_model, engine_weights, receiver, weights, write_all

from qarl.errors import UserError
from qarl.rollout.engine import RolloutEngine
from qarl.rollout.publish.adapters import EngineAdapter
from qarl.rollout.publish.version import checked_version
from qarl.rollout.remote.records import BEGIN, record
from qarl.rollout.remote.wire import encode_publish

TENSORS = weights("llama")
NONE = {
    "-1": -1,
    "text": "a",
    "text of a number": "3",
    "none": None,
    "fraction": 1.5,
    "truth": True,
    "list": [1],
}


def engine(**parts: Any) -> Any:
    """An engine whose receiver is of a model without vLLM, and which cannot generate."""
    made: Any = object.__new__(RolloutEngine)
    made.weights, made.adapter, made._asleep = engine_weights(engine_model("llama")), None, False
    made.expected = made.weights.expected
    made.reset_prefix_cache = lambda: True
    vars(made).update(parts)
    return made


def publish_to_engine(version: Any) -> None:
    engine().publish(TENSORS, version=version)


def publish_adapter(version: Any) -> None:
    made = engine(adapter=SimpleNamespace(proved=True))
    write_all(made.weights, TENSORS, version=0)
    made.publish_adapter(SimpleNamespace(tensors={}, nbytes=0), version=version)


def publish_adapter_in_a_worker(version: Any) -> None:
    adapter: Any = object.__new__(EngineAdapter)
    adapter.version = None
    adapter.publish(SimpleNamespace(tensors={}), version=version)


def write(version: Any) -> None:
    write_all(engine_weights(engine_model("llama")), TENSORS, version=version)


def send(version: Any) -> None:
    list(encode_publish(TENSORS, version=version))


def receive(version: Any) -> None:
    begin = record(BEGIN, {"version": version})
    receiver(engine_model("llama")).feed([begin, *list(encode_publish(TENSORS, version=1))[1:]])


DOORS = (publish_to_engine, publish_adapter, publish_adapter_in_a_worker, write, send, receive)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.parametrize("case", NONE)
def test_a_version_that_is_none_is_refused_at_every_door(door, case):
    with pytest.raises(UserError, match="a publish cannot have the version") as caught:
        door(NONE[case])
    assert "whole number from 0" in str(caught.value) and "fix: " in str(caught.value)


def test_a_refused_version_leaves_the_engine_as_it_was():
    made = engine()
    made.publish(TENSORS, version=4)
    with pytest.raises(UserError, match="version"):
        made.publish(TENSORS, version=-1)
    assert made.weight_version == 4 and not made.stale


def test_whole_numbers_of_other_types_are_taken():
    taken = [checked_version(version) for version in (0, 7, np.int64(7), torch.tensor(7))]
    assert taken == [0, 7, 7, 7] and all(type(version) is int for version in taken)
    json.dumps(taken)


def test_an_older_version_is_taken_and_said(capsys):
    receiving = receiver(engine_model("llama"))
    for version in (9, 9, 10):
        write_all(receiving.weights, TENSORS, version=version)
    assert "had version" not in capsys.readouterr().err
    write_all(receiving.weights, TENSORS, version=3)
    assert receiving.weights.version == 3
    assert "the rollout engine had version 10 and gets version 3" in capsys.readouterr().err
    receiving.mark_stale("a test")
    receiving.feed(encode_publish(TENSORS, version=1))
    assert receiving.weights.version == 1 and capsys.readouterr().err == ""
