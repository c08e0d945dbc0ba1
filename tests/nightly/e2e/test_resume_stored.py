"""Runs of an earlier version (tests/data/formats.tar.gz) resume in this one, and refuse other inputs from then on.

Whole runs by the command, with vLLM, and for backend=verl with Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_runs import edit_model_config
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from fresh_vllm import greedy_in_a_fresh_vllm
from stored_formats import RUNS, unpack

from qarl.metrics.tracker import read_metrics
from qarl.trainer.input_changes import NOT_RECORDED

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""


def train(folder: Path, run: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "qarl.train",
        "config=run.yaml",
        f"name={run}",
        *RUNS[run],
        *overrides,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550
    )


def interrupted(folder: Path, run: str) -> None:
    """Make the run one that has not reached its end."""
    (folder / "runs" / run / "summary.json").unlink()


def change_extra_info(path: Path) -> None:
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["extra_info"]["index"] = 77
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.verl] if run == "verl" else []) for run in RUNS]
)
def test_a_stored_run_resumes_and_compares_its_inputs_from_then_on(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = train(tmp_path, run, "trainer.total_training_steps=3", "trainer.save_freq=1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert NOT_RECORDED in done.stderr and "after step 2 of 3" in done.stderr
    (step,) = [entry for entry in read_metrics(tmp_path / "runs" / run) if entry["step"] == 3]
    assert step["mismatch/abs_max"] == 0
    if run != "verl":
        assert step["resume/published_equal"] == 1
    interrupted(tmp_path, run)

    edit_model_config(rms_norm_eps=1e-2)
    change_extra_info(tmp_path / "train.jsonl")
    before = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    refused = train(tmp_path, run, "trainer.total_training_steps=4")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    for words in (
        "rms_norm_eps of the model's config.json was 1e-06, now 0.01",
        "extra_info in data.train_files",
    ):
        assert words in refused.stderr
    assert sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file()) == before

    unpack_inputs_again(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "model").rename(tmp_path / "moved")
    last = train(tmp_path, run, "trainer.total_training_steps=4", "model.path=moved")
    assert last.returncode == 0, last.stdout[-3000:] + last.stderr[-3000:]
    for words in (
        "the source of the reward function changed",
        "model.path was",
        "after step 3 of 4",
    ):
        assert words in last.stderr


def unpack_inputs_again(folder: Path) -> None:
    """Restore the model and the data, but not the runs."""
    fresh = folder / "fresh"
    unpack(fresh)
    for name in ("model/config.json", "train.jsonl"):
        (fresh / name).replace(folder / name)


@pytest.mark.parametrize("run", RUNS)
def test_vllm_loads_a_stored_export(tmp_path: Path, run: str) -> None:
    unpack(tmp_path)
    export = tmp_path / "runs" / run / "export"
    adapter = export / "adapter" if "adapter" in run else None
    tokens, _ = greedy_in_a_fresh_vllm(
        export, [[3, 4], [3, 5]], max_tokens=4, max_model_len=32, adapter=adapter
    )
    assert len(tokens) == 2
