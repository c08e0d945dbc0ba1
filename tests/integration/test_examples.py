"""Each example runs as its docstring says: the reward without an engine, the loop with one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

from qarl.data.ground_truths import judge
from qarl.data.prompts import Prompt
from qarl.data.reward_workers import InProcessReward
from qarl.data.rewards import get_reward_fn


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


def test_the_reward() -> None:
    """As a config names it; right and short, right and long, wrong."""
    reward = get_reward_fn(str(ROOT / "examples/own_reward.py:short_and_right"))

    def score(response: str) -> float:
        row = {
            "data_source": "",
            "solution_str": response,
            "ground_truth": "12",
            "extra_info": None,
        }
        return float(reward(**row))

    assert score("5+7=12") == 1 and score("5+7=13") == 0
    assert score(" " * 64 + "5+7=12") == pytest.approx(0.9)
    assert score(" " * 500 + "5+7=12") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("function", "truth"), [("own_reward.py:short_and_right", "12"), ("own_task.py:reward", "0123")]
)
def test_ground_truths_are_right_answers(function: str, truth: str) -> None:
    name = str(ROOT / "examples" / function)
    prompts = [Prompt(0, "", [], [1], truth)] * 2
    judged = judge(InProcessReward(name, get_reward_fn(name)), prompts, timeout_s=None)
    assert (judged.count, judged.wrong) == (2, [])


def test_the_loop_without_a_model_asks_no_hub() -> None:
    done = run("examples/own_loop.py", "1", "models/no-such-model")
    assert done.returncode == 1
    assert "there is no model folder 'models/no-such-model'" in done.stderr
    assert "huggingface_hub" not in done.stderr


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
