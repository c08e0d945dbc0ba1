"""QaRL from its wheel, in a folder without a checkout: a reader's first commands, and the examples."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

SMALL = [
    "trainer.total_training_steps=1",
    "trainer.val_max_prompts=8",
    "data.train_batch_size=6",
    "rollout.n=2",
]
SMALL += [f"actor.{key}_micro_batch_size_per_gpu=12" for key in ("ppo", "log_prob")] + [
    "actor.ppo_mini_batch_size=6"
]
MADE = ("models/tiny-qwen3", "data/column_addition")
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call Python in an empty folder, with the unpacked wheel instead of the checkout, and return what it prints.

    The wheel is built from a copy, because setuptools packs what an earlier build left in build/, too."""
    source, installed, folder = (tmp_path / name for name in ("source", "installed", "work"))
    for name in ("qarl", "configs", "examples", "requirements"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def call(*words: str, cwd: Path = folder) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    call(
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        cwd=source,
    )
    ZipFile(next(tmp_path.glob("*.whl"))).extractall(installed)
    for name in MADE:  # `qarl demo` takes minutes to make them
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(ROOT / name)
    return call


@needs_w4a16_cpu
def test_a_reader_of_the_wheel(run: Run, tmp_path: Path) -> None:
    qarl, folder = ("-m", "qarl"), tmp_path / "work"
    assert run("-c", "import qarl; print(qarl.__file__)").startswith(str(tmp_path / "installed"))
    assert "demo examples" in run(*qarl, "--help")
    install = run("-c", "from qarl.side_packages import install_command; print(install_command())")
    lock = Path(shlex.split(install)[-1])
    assert lock.is_relative_to(tmp_path / "installed") and "gguf==" in lock.read_text()
    run(*qarl, "demo", *SMALL)
    assert (folder / "runs/quickstart/export/config.json").is_file()
    (folder / "runs/quickstart/report.html").unlink()
    run(*qarl, "report", "runs/quickstart")
    assert (folder / "runs/quickstart/report.html").is_file()
    assert "| column_addition | 8 |" in run(*qarl, "eval", "runs/quickstart", "limit=8")

    shipped = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert run(*qarl, "demo", "examples").splitlines() == [
        f"examples/{name}: written" for name in shipped
    ]
    (folder / "examples/own_reward.py").write_text("mine")
    assert "examples/own_reward.py: there already" in run(*qarl, "demo", "examples")
    assert (folder / "examples/own_reward.py").read_text() == "mine"
    run(*qarl, "warm-start", "examples/own_task.py", "steps=2", "train_size=40", "test_size=8")
    run(*qarl, "train", "config=own_task.yaml", *SMALL)
    assert "step 1: " in run("examples/own_loop.py", "1")
