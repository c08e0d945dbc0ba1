"""A small run of either backend that was interrupted after a checkpoint, and what a resume says of what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_runs import CONFIG, row, write_rows
from checkpoint_state import interrupted_run, reseal

from qarl.checkpoint.storage import write_json
from qarl.checks.check import RunInputs
from qarl.checks.inputs_record import RECORD_FILE, Record
from qarl.config import Config, load_config, write_resolved
from qarl.trainer.resume import find_start
from qarl.verl.resume import find_verl_start

BACKENDS = ("local", "verl")
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


def write_inputs(model: Path) -> None:
    """Write run.yaml and all that it reads, with a copy of `model`, into the current folder."""
    shutil.copytree(model, "model")
    text = CONFIG.replace("total_training_steps: 1", "total_training_steps: 9")
    Path("run.yaml").write_text(f"{text}reward: {{function: 'reward.py:score'}}\n")
    Path("reward.py").write_text(REWARD)
    write_rows("train.jsonl", rows())
    write_rows("val.jsonl", [row("t9 t10")])


def rows(**first: Any) -> list[dict[str, Any]]:
    """The rows of the training file. `first`: changes of the first."""
    usual = [row(f"t3 t{i}") | {"extra_info": {"index": i, "level": "easy"}} for i in range(8)]
    return [usual[0] | first, *usual[1:]]


def run_config(backend: str, *overrides: str) -> Config:
    return load_config(["config=run.yaml", f"backend={backend}", *overrides])


def record(config: Config) -> Record:
    return RunInputs(config).record


def interrupted(config: Config, saved: Record | None) -> None:
    """Write an interrupted run of `config` whose checkpoint has the record `saved`."""
    if config.backend == "local":
        run = interrupted_run(config, 2)
        reseal(run / "checkpoints" / "step_2", inputs=... if saved is None else saved)
        return
    folder = config.run_dir / "checkpoints" / "global_step_2"
    (folder / "actor").mkdir(parents=True)
    for name in ("data.pt", "actor/model_world_size_1_rank_0.pt"):
        torch.save({}, folder / name)
    write_resolved(config, config.run_dir / "config.yaml")
    if saved is not None:
        write_json(config.run_dir / RECORD_FILE, saved)


def resumed(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    """The notes of a resume."""
    now = record(config)
    if config.backend == "local":
        return "\n".join(find_start(config, now).notes)
    capsys.readouterr()
    find_verl_start(config, now)
    return capsys.readouterr().err


def template(text: str) -> None:
    Path("model/chat_template.jinja").write_text(text)
