"""Each example runs as its docstring says: data and reward without an engine, loop and task with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

from qarl.config import load_config
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


def test_the_reward() -> None:
    """As a config names it; right and short, right and long, wrong."""
    reward = get_reward_fn(str(ROOT / "examples/own_reward.py:short_and_right"))

    def score(response: str) -> float:
        row = {"data_source": "", "solution_str": response, "ground_truth": "12", "extra_info": None}
        return float(call_reward(reward, row, timeout_s=None))

    assert score("5+7=12") == 1 and score("5+7=13") == 0
    assert score(" " * 64 + "5+7=12") == pytest.approx(0.9)
    assert score(" " * 500 + "5+7=12") == pytest.approx(0.5)


def test_the_task_passes_every_check_of_a_run(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every check that precedes the engine, data and reward included."""
    from qarl.checks.registry import check_run

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("qarl.checks.machine.vllm_unusable", lambda: None)
    check_run(load_config([f"config={task}/subtraction.yaml", f"output_dir={task}"]))


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
