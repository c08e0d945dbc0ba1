"""A refused command leaves the run folder as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_state import interrupted_run
from engine_helpers import config

from qarl.train import main
from qarl.trainer.run_lock import lock_run

REFUSALS = {
    "training file": ("data.train_files=[nope.parquet]", "no such data file"),
    "evaluation file": ("data.val_files=[nope.parquet]", "no such data file"),
    "kind of file": ("data.train_files=[README.md]", "unknown kind of data file"),
    "model folder": ("model.path=./nowhere", "nowhere"),
    "reward function": ("reward.function=nowhere.py:score", "nowhere.py"),
    "length": ("data.max_prompt_length=1", "max_prompt_length"),
}


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and bytes of every file. The lock names the last process that has worked in the folder."""
    paths = [folder, *(path for path in folder.rglob("*") if path.name != ".lock")]
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in paths
    }


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_command_leaves_the_unfinished_run_as_it_is(tmp_path, capsys, refusal, backend):
    settings = config(tmp_path)
    interrupted_run(settings)
    with lock_run(settings.run_dir):
        pass
    before = content(tmp_path)
    override, message = REFUSALS[refusal]
    arguments = [
        f"output_dir={settings.output_dir}",
        f"name={settings.name}",
        f"backend={backend}",
        override,
    ]
    assert main(["config=configs/quickstart.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert content(tmp_path) == before
