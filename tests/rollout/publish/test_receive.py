"""The engine's side of a publish, without vLLM: what is not complete, not in order or not of one version is refused."""

from __future__ import annotations

import pytest
import torch
from publish_streams import engine_model, receiver, weights

from qarl.rollout.publish.send import encode_publish
from qarl.rollout.publish.wire import COMMIT, TransferFailed


def published(version: int = 1):
    """A receiver with a complete publish."""
    found = receiver(engine_model("llama"))
    found.feed(encode_publish(weights("llama"), version=version))
    assert found.version == version and not found.stale
    return found


def test_a_publish_that_lacks_a_tensor_is_not_committed():
    found, tensors = published(), weights("llama")
    lacking = [(name, tensor) for name, tensor in tensors if name != "model.norm.weight"]
    with pytest.raises(TransferFailed, match=r"version 2 is not complete[\s\S]*missing: model\.norm\.weight"):
        found.feed(encode_publish(lacking, version=2))
    assert found.stale and "version 2 did not complete" in found.stale_because


def test_the_end_of_one_publish_does_not_complete_another():
    found = published()
    mine, other = (list(encode_publish(weights("llama"), version=version)) for version in (2, 3))
    assert mine[-1][0] == other[-1][0] == COMMIT
    with pytest.raises(TransferFailed, match=r"version 2 is not complete[\s\S]*last record has version 3"):
        found.feed([*mine[:-1], other[-1]])
    assert found.stale


def test_what_fails_before_its_first_record_leaves_a_stale_engine_with_a_reason():
    found = published()
    with pytest.raises(TransferFailed, match="outside of a publish"):
        found.feed([("model.norm.weight", torch.zeros(4))])
    assert found.stale and found.stale_because.startswith("a publish did not complete: at model.norm.weight")
