"""Room for the export and one checkpoint, by free bytes and by the largest file that may be written, before any
weights are loaded."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_runs import CONFIG

from qarl.checkpoint.storage import StorageError
from qarl.checks import room
from qarl.checks.check import NotCheckedError
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.train import main

SIZE = ModelSize(layers=1, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=100)
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
MLP = 3 * 64 * 96
TABLES = 2 * 100 * 64  # embeddings and lm_head
NORMS = 3 * 64
MATRICES = ATTENTION + MLP
PARAMETERS = MATRICES + TABLES + NORMS
TEXT = 12
"""Bytes of the model folder's only small file."""
STEPS = 10
LOGS = 2 * 2**20 + STEPS * 8192
BF16 = ["quant.scheme=bf16", "quant.align=off", f"trainer.total_training_steps={STEPS}"]
ADAMW = ["optim.name=adamw", "optim.master_dtype=fp32", "optim.lr=1e-6"]
EXPORT = 2 * PARAMETERS + TEXT
OPTIMIZER = (4 + 8) * PARAMETERS
"""FP32 masters, and AdamW's two FP32 moments."""
CHECKPOINT = 2 * PARAMETERS + OPTIMIZER + TEXT
IN_VERL = OPTIMIZER + TEXT
NEVER = "trainer.save_minutes=-1"
CASES: dict[str, tuple[list[str], int, int]] = {
    "export and checkpoint": ([], EXPORT + CHECKPOINT, OPTIMIZER),
    "checkpoint": (["trainer.save_final=false"], CHECKPOINT, OPTIMIZER),
    "export": ([NEVER], EXPORT, 2 * PARAMETERS),
    "verl": (["backend=verl"], EXPORT + IN_VERL, 8 * PARAMETERS),
    "verl's export, from a checkpoint": (
        ["backend=verl", NEVER],
        EXPORT + IN_VERL,
        8 * PARAMETERS,
    ),
    "verl, two ranks": (
        ["backend=verl", "trainer.n_gpus_per_node=2"],
        EXPORT + IN_VERL,
        8 * PARAMETERS // 2,
    ),
}
"""Overrides -> bytes of export and checkpoint, and of the largest file."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function of overrides that gives the config of a run in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Path("model").mkdir()
    Path("model/config.json").write_text("x" * TEXT)
    Path("model/model.safetensors").write_text("weights are not counted twice")

    def config(*overrides: str) -> Config:
        return load_config(["config=run.yaml", *BF16, *ADAMW, *overrides])

    return config


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil.disk_usage(".")._replace(free=count)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.fixture
def limit_of_files() -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("case", CASES)
def test_bytes_needed_by_hand(run, monkeypatch, case):
    overrides, files, _ = CASES[case]
    needed = files + LOGS
    config = run(*overrides)
    free(monkeypatch, needed)
    room.check_run_room(config, SimpleNamespace(size=SIZE))
    free(monkeypatch, needed - 1)
    with pytest.raises(StorageError, match="no room for runs/bad") as caught:
        room.check_run_room(config, SimpleNamespace(size=SIZE))
    assert f"{needed:,} bytes" in str(caught.value) and f"{needed - 1:,} are free" in str(
        caught.value
    )


@pytest.mark.parametrize("case", CASES)
def test_the_largest_file_by_hand(run, limit_of_files, case):
    overrides, _, file = CASES[case]
    largest = file + room.HEADER_BYTES
    config = run(*overrides)
    limit_of_files(largest)
    room.check_run_room(config, SimpleNamespace(size=SIZE))
    limit_of_files(largest - 1)
    with pytest.raises(StorageError, match="no room for runs/bad") as caught:
        room.check_run_room(config, SimpleNamespace(size=SIZE))
    message = str(caught.value)
    assert f"{largest:,} bytes" in message and f"files of {largest - 1:,}" in message
    assert "ulimit -f unlimited" in message


def test_what_is_not_saved_or_not_known_needs_no_room(run, monkeypatch):
    free(monkeypatch, 0)
    nothing = ["trainer.save_final=false", NEVER]
    room.check_run_room(run(*nothing), SimpleNamespace(size=SIZE))
    room.check_run_room(run("backend=verl", *nothing), SimpleNamespace(size=SIZE))

    class Unknown:
        @property
        def size(self) -> ModelSize:
            raise NotCheckedError("the config lacks a number", "")

    room.check_run_room(run(), Unknown())


@pytest.mark.parametrize("short", ["disk", "ulimit -f"])
def test_a_run_without_room_is_refused_before_its_weights_are_loaded(
    startable_run, monkeypatch, capsys, limit_of_files, short
):
    size = ModelSize.from_config(json.loads(Path("model/config.json").read_text()))
    assert size.parameters > 10_000
    if short == "disk":
        free(monkeypatch, 6 * size.parameters)  # the export alone would fit
    else:
        limit_of_files(6 * size.parameters)
    assert main(["config=run.yaml"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1 and "there is no room for runs/bad" in printed, printed
    assert "loading the weights" not in printed and not Path("runs/bad/checkpoints").exists()
