"""verl unpickles its checkpoints: what could run code in one is refused by name before verl, or Ray, sees it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_state import Malicious
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

pytest.importorskip("verl")

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from qarl.checkpoint.read_weights import load_part
from qarl.errors import UserError
from qarl.verl.config_classes import QuantFSDPEngineConfig
from qarl.verl.fsdp_engine import FSDPEngineWithLMHead, QaRLFSDPEngine

FILES = (
    "data.pt",
    "actor/model_world_size_1_rank_0.pt",
    "actor/optim_world_size_1_rank_0.pt",
    "actor/extra_state_world_size_1_rank_0.pt",
)


@pytest.fixture(scope="module")
def sharded() -> torch.Tensor:
    """As FSDP2 leaves a parameter; its file is read if there is no process group."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    tensor = DTensor.from_local(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])
    yield tensor
    torch.distributed.destroy_process_group()


@pytest.fixture
def saved(opened, sharded) -> Path:
    """A checkpoint with what verl's files hold."""
    folder = opened.run / "checkpoints" / "global_step_4"
    (folder / "actor").mkdir(parents=True)
    generator = {"samples_yielded": 4, "generator": torch.Generator().get_state()}
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    assert rng.keys() <= FSDPCheckpointManager.get_rng_state().keys()
    contents = {
        "data.pt": {"_sampler_iter_state": generator, "_num_yielded": 4, "fetcher_state": None},
        "actor/model_world_size_1_rank_0.pt": {"a": sharded, "b": sharded.to_local()},
        "actor/optim_world_size_1_rank_0.pt": {
            "state": {0: {"exp_avg": sharded}},
            "param_groups": [{"lr": 0.1}],
        },
        "actor/extra_state_world_size_1_rank_0.pt": {
            "lr_scheduler": {"last_epoch": 4, "_last_lr": [0.1]},
            "rng": rng,
        },
    }
    for name, content in contents.items():
        torch.save(content, folder / name)
    opened.tracker.write_text("4")
    return folder


def hide(file: Path, marker: Path) -> None:
    """Put something that runs when it is unpickled into a file."""
    content = torch.load(file, weights_only=False)
    content[next(iter(content))] = {"deep": [(1, Malicious(marker))]}
    torch.save(content, file)


def test_verls_own_files_are_read(opened, saved):
    assert opened() == 4
    state = load_part(saved / FILES[3])["rng"]["numpy"]
    assert state[0] == "MT19937" and np.array_equal(state[1], np.random.get_state()[1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_file_that_could_run_code_is_refused_by_name(opened, saved, tmp_path, name, mode):
    hide(saved / name, tmp_path / "ran")
    changes = (
        {}
        if mode == "auto"
        else {"trainer.resume_mode": mode, "trainer.resume_from_path": str(saved)}
    )
    with pytest.raises(UserError, match="could run any code") as caught:
        opened(**changes)
    assert caught.value.where == str(saved / name)
    assert not (tmp_path / "ran").exists()
    assert saved.is_dir() and json.loads(opened.tracker.read_text()) == 4


@pytest.mark.parametrize("name", FILES[1:])
def test_the_engine_refuses_it_too(saved, tmp_path, monkeypatch, name):
    """From verl's own command line no set-up of ours comes before it."""
    monkeypatch.setattr(
        FSDPEngineWithLMHead, "load_checkpoint", lambda *args, **kwargs: pytest.fail("loaded")
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 1)
    hide(saved / name, tmp_path / "ran")
    engine = object.__new__(QaRLFSDPEngine)
    engine.quant, engine.rank = QuantFSDPEngineConfig(strategy="fsdp2").quant, 0
    with pytest.raises(UserError, match="could run any code"):
        engine.load_checkpoint(str(saved / "actor"))
    assert not (tmp_path / "ran").exists()
