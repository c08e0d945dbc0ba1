"""An adapter that arrives in several buckets is kept, although each bucket overwrites the memory of the last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from qarl.rollout.remote.adapters import AdapterTarget


def test_tensors_of_a_bucket_outlive_it() -> None:
    published: list[Any] = []
    adapter: Any = SimpleNamespace(
        expected=None,
        mark_stale=lambda _: None,
        publish=lambda adapter, version: published.append((adapter, version)),
    )
    base: Any = SimpleNamespace(stale=False)
    target = AdapterTarget(adapter, base)
    target.begin({"adapter": {"r": 8, "alpha": 16, "targets": ("q_proj",), "base": "x"}})
    memory = torch.zeros(4)
    for value, name in ((1.0, "a"), (2.0, "b")):
        memory.fill_(value)
        target.write([(name, memory[:2])])
    memory.fill_(9.0)
    target.commit({"version": 3}, {})
    ((sent, version),) = published
    assert version == 3
    assert {name: tensor.tolist() for name, tensor in sent.tensors.items()} == {
        "a": [1.0, 1.0],
        "b": [2.0, 2.0],
    }
