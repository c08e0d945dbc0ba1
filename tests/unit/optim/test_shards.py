"""Sharded updates on up to four gloo ranks, against one process with plain tensors."""

from __future__ import annotations

from typing import Any

import optim_ranks
import pytest
import torch
from ranks import run_ranks
from same_bytes import same_bytes
from torch.distributed.tensor import Shard

from qarl.optim import muon

MESHES = ["1", "2", "3", "4", "2 x 2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("ranks") / "states.pt"
    run_ranks("optim_ranks.py", optim_ranks.RANKS, output)
    return torch.load(output, weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("case", optim_ranks.CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_updates_on_shards_are_those_of_one_device(results: Any, case: str, mesh: str) -> None:
    """Bit for bit, states too. On three ranks the optimizer is resumed from its saved state before the last update."""
    dtype, settings = optim_ranks.CASES[case]
    torch.set_num_threads(1)
    expected = optim_ranks.train(dtype, settings, None, resume=False)
    tensors = results[case, mesh]
    assert tensors.keys() == expected.keys()
    assert any(name.endswith("momentum_buffer") for name in expected) == ("muon" in case)
    for name, tensor in expected.items():
        assert same_bytes(tensors[name], tensor), name
        assert tensor.dtype == (dtype if name in optim_ranks.SHAPES else torch.float32)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_bounds_are_torchs(length: int, parts: int) -> None:
    whole = torch.arange(length)
    shards = [whole[start:stop].tolist() for start, stop in muon.bounds(length, parts)]
    split, _ = Shard(0)._split_tensor(whole, parts, with_padding=False)
    assert shards == [part.tolist() for part in split]
