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
from muon import SingleDeviceMuonWithAuxAdam
from same_bytes import same_bytes
from torch.distributed.tensor import Shard

from qarl.errors import UserError
from qarl.optim import muon
from qarl.optim.muon import use_muon
from qarl.optim.rounding import Region

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


def test_one_process_is_the_package() -> None:
    dtype, settings = optim_ranks.CASES["muon, fp32"]
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in optim_ranks.values(-1, dtype).items()}
    hidden = [p for name, p in parameters.items() if use_muon(name, p)]
    others = [p for name, p in parameters.items() if not use_muon(name, p)]
    muon = {"lr": settings["muon_lr"], "momentum": settings["muon_momentum"], "weight_decay": settings["weight_decay"]}
    adam = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    package = SingleDeviceMuonWithAuxAdam(
        [{"params": hidden, "use_muon": True, **muon}, {"params": others, "use_muon": False, **adam}]
    )
    for step in range(optim_ranks.STEPS):
        for name, gradient in optim_ranks.values(step, torch.float32).items():
            parameters[name].grad = gradient
        package.step()
    found = optim_ranks.train(dtype, settings, None, resume=False)
    assert len(hidden) == 8
    for name, parameter in parameters.items():
        assert torch.equal(found[name], parameter), name


def test_matrices_of_one_size_share_a_round() -> None:
    sizes = [(4, 4), (8, 8), (4, 4), (8, 8), (2, 2)]
    found = muon.rounds([torch.nn.Parameter(torch.zeros(size)) for size in sizes], 2)
    assert [[tuple(p.shape) for p in one] for one in found] == [[(8, 8), (8, 8)], [(4, 4), (4, 4)], [(2, 2)]]


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_bounds_are_torchs(length: int, parts: int) -> None:
    whole = torch.arange(length)
    found = [whole[start:stop].tolist() for start, stop in muon.bounds(length, parts)]
    split, _ = Shard(0)._split_tensor(whole, parts, with_padding=False)
    assert found == [part.tolist() for part in split]


def test_columns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "region", lambda tensor: Region(tuple(tensor.shape), 1, 0, 2))
    with pytest.raises(UserError, match="sharded along dimension 1"):
        list(muon.updates([torch.nn.Parameter(torch.zeros(4, 4))], lambda parameter: parameter))
