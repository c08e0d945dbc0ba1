"""Sharded updates on up to four gloo ranks, against one process with plain tensors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import optim_ranks
import pytest
import torch
from checkout import ROOT
from same_bytes import same_bytes
from torch.distributed.tensor import Shard

from qarl.optim import muon

MESHES = ["1", "2", "3", "4", "2 x 2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("ranks") / "found.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(Path(optim_ranks.__file__))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, str(output)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(optim_ranks.RANKS)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said[0][-4000:]
    return torch.load(output, weights_only=False)


@pytest.mark.parametrize("case", optim_ranks.CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_updates_on_shards_are_those_of_one_device(results: Any, case: str, mesh: str) -> None:
    """Bit for bit, states too. On three ranks the optimizer is resumed from its saved state before the last update."""
    dtype, settings = optim_ranks.CASES[case]
    torch.set_num_threads(1)
    expected = optim_ranks.train(dtype, settings, None, resume=False)
    found = results[case, mesh]
    assert found.keys() == expected.keys()
    assert any(name.endswith("momentum_buffer") for name in expected) == ("muon" in case)
    for name, tensor in expected.items():
        assert same_bytes(found[name], tensor), name
        assert tensor.dtype == (dtype if name in optim_ranks.SHAPES else torch.float32)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_bounds_are_torchs(length: int, parts: int) -> None:
    whole = torch.arange(length)
    found = [whole[start:stop].tolist() for start, stop in muon.bounds(length, parts)]
    split, _ = Shard(0)._split_tensor(whole, parts, with_padding=False)
    assert found == [part.tolist() for part in split]
