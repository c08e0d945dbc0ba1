"""When a trainer ends, in any way, so do its reward workers and what they have started. Nothing of its `__main__` runs
in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from qarl.data.prompts import Prompt
from qarl.data.scoring import find_reward, score_responses

HANGS = """
import os, re, subprocess
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info=None):
    child = subprocess.Popen(["sleep", "300"])
    Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    re.match("(a+)+$", "a" * 60 + "b")

def length(solution_str, **_):
    return len(solution_str)

def process(**_):
    return os.getpid()
"""
TRAINER = """
from qarl.data.prompts import Prompt
from qarl.data.scoring import find_reward, score_responses
print("__main__ runs", flush=True)
print(score_responses(find_reward("rewards.py:{function}"), [Prompt(0, "", [], [1], "")] * 4, ["abcd"] * 4))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(HANGS)
    return path


@pytest.fixture
def trainer(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer whose reward hangs inside a C function, with a child of its own."""
    program = [sys.executable, "-c", TRAINER.format(function="score")]
    with subprocess.Popen(
        program, cwd=file.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True
    ) as process:
        yield process
        process.kill()


def started_by(file: Path) -> list[psutil.Process]:
    pids = file.with_name("pids")
    deadline = time.monotonic() + 60
    while not (pids.is_file() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker, child = (psutil.Process(int(pid)) for pid in pids.read_text().split())
    return [worker, child, psutil.Process(worker.ppid())]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_no_worker_outlives_its_trainer(
    trainer: subprocess.Popen[str], file: Path, number: signal.Signals
) -> None:
    others = started_by(file)
    assert trainer.pid in [process.ppid() for process in others]
    trainer.send_signal(number)
    assert trainer.wait(30) != 0
    _, alive = psutil.wait_procs(others, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
def test_ctrl_c_ends_a_function_that_never_loads(file: Path) -> None:
    file.write_text(
        "import os\nfrom pathlib import Path\n"
        "Path(__file__).with_name('loading').write_text(str(os.getpid()))\nwhile True: pass\n"
    )
    source = 'from qarl.data.scoring import find_reward\nfind_reward("rewards.py:score").load()'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", source], cwd=file.parent, env=environment
    ) as process:
        loading, deadline = file.with_name("loading"), time.monotonic() + 60
        while not (loading.is_file() and loading.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker = psutil.Process(int(loading.read_text()))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    worker.wait(30)


@pytest.mark.parametrize("how", ["a script", "standard input"])
def test_the_main_program_runs_once(file: Path, how: str) -> None:
    """Without `if __name__ == "__main__"`, and with a program that has no file."""
    source = TRAINER.format(function="length")
    script = file.with_name("script.py")
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script) if how == "a script" else "-"],
        input=None if how == "a script" else source,
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["__main__ runs", "[4.0, 4.0, 4.0, 4.0]"], done.stderr


def test_a_worker_lives_as_long_as_its_reward(file: Path) -> None:
    reward = find_reward(f"{file}:process", workers=1)
    pids: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        pids += thread.submit(score_responses, reward, [row()], [""]).result()
    pids += score_responses(reward, [row()] * 3, [""] * 3)
    assert len(set(pids)) == 1, "the end of the thread that asked first ends no worker"
    worker = psutil.Process(int(pids[0]))
    del reward
    worker.wait(30)


def test_a_worker_that_died_between_two_calls_is_replaced(file: Path) -> None:
    reward = find_reward(f"{file}:process", workers=1)
    first = psutil.Process(int(score_responses(reward, [row()], [""])[0]))
    first.kill()
    psutil.wait_procs([first], timeout=30)
    assert score_responses(reward, [row()], [""]) != [first.pid]


def row() -> Prompt:
    return Prompt(0, "", [], [1], "")
