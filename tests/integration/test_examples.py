"""Each example runs as its docstring says: data and reward without an engine, loop and task with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

from qarl.config import Config, load_config
from qarl.data.rewards import call_reward, get_reward_fn

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A program, from the repository, on one thread."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that examples/own_task.py wrote."""
    folder = tmp_path_factory.mktemp("task")
    done = run("examples/own_task.py", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"qarl train config={folder}/subtraction.yaml" in done.stdout
    return folder


def task_config(folder: Path, *overrides: str) -> Config:
    return load_config([f"config={folder}/subtraction.yaml", f"output_dir={folder}", *overrides])


def test_the_reward() -> None:
    """As a config names it; right and short, right and long, wrong."""
    reward = get_reward_fn(str(ROOT / "examples/own_reward.py:short_and_right"))

    def score(response: str) -> float:
        row = {"data_source": "", "solution_str": response, "ground_truth": "12", "extra_info": None}
        return float(call_reward(reward, row, timeout_s=None))

    assert score("5+7=12") == 1 and score("5+7=13") == 0
    assert score(" " * 64 + "5+7=12") == pytest.approx(0.9)
    assert score(" " * 500 + "5+7=12") == pytest.approx(0.5)


def test_the_task_has_rows_in_verls_schema(task: Path) -> None:
    for split, count in (("train", 256), ("test", 64)):
        rows = [json.loads(line) for line in (task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(rows) == count
        for row in rows:
            large, small = map(int, row["prompt"][0]["content"].split("-"))
            assert row["reward_model"]["ground_truth"] == str(large - small) and large >= small
    assert yaml.safe_load((task / "subtraction.yaml").read_text(encoding="utf-8"))["name"] == "subtraction"


def test_the_task_passes_every_check_of_a_run(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every check that precedes the engine, data and reward included."""
    from qarl.checks.run import check_run

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("qarl.checks.machine.vllm_without_device", lambda: None)
    check_run(task_config(task))


@pytest.mark.vllm
@needs_w4a16_cpu
def test_the_loop_ends_without_a_word_about_leaks() -> None:
    """It does not close its engine. nanobind counts what is alive when the interpreter ends, and printed a page."""
    done = run("examples/own_loop.py", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and "mean |δ|" in steps[1]
    assert float(steps[1].split("mean |δ| ")[1].split(",")[0]) < 2e-3
    assert "leaked" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.slow
@needs_w4a16_cpu
def test_the_task_trains_with_the_reward_of_the_other_example(task: Path) -> None:
    reward = f"reward.function={ROOT}/examples/own_reward.py:short_and_right"
    short = ["trainer.total_training_steps=1", "trainer.val_max_prompts=4", "trainer.plots=false"]
    done = run("-m", "qarl.train", f"config={task}/subtraction.yaml", f"output_dir={task}", reward, *short)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((task / "subtraction/summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 1 and summary["mismatch_abs_mean"] < 2e-3
