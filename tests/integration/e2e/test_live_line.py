"""The live line of a real run on a pseudo-terminal: it is there, it is erased, and nothing else is torn."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
COLUMNS = 70
LIVE = re.compile(r"step 1/\d+, (sampling|update|log-probs) \(\d+ s\)")


def on_a_terminal(
    arguments: list[str], watch: Callable[[int, str], object] = lambda pid, text: None
) -> tuple[int, str]:
    """Run `qarl` with a terminal of its own. Return the exit code and what it wrote.

    `watch`: called with the process's id and all that was written until now. If it returns True, the terminal is
    closed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        for name in ("CI", "NO_COLOR", "QARL_PROGRESS"):
            os.environ.pop(name, None)
        os.environ |= {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "qarl", *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # the process has closed its end
            break
        if watch(pid, written.decode(errors="replace")) is True:
            break
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows. Only what is used here is known: \\r, \\n, and erasing to the end."""
    lines = [""]
    column = 0
    for part in re.split(r"(\r|\n|\x1b\[K)", written):
        line = lines[-1]
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = line[:column]
        else:
            lines[-1] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return lines


def test_the_screen() -> None:
    assert screen("one\r\nlong line\rshort\r\x1b[Kx") == ["one", "x"]
    assert screen("long line\rshort") == ["shortline"]


def arguments(folder: Path) -> list[str]:
    """A run with steps of some seconds."""
    return [
        "train", "config=quickstart.yaml", f"output_dir={folder}", "trainer.total_training_steps=2",
        "trainer.val_before_train=false", "trainer.val_max_prompts=8", "data.train_batch_size=96",
        "actor.ppo_mini_batch_size=48", "actor.ppo_micro_batch_size_per_gpu=16",
        "actor.log_prob_micro_batch_size_per_gpu=16", "trainer.plots=false", "trainer.report=false",
        "trainer.save_final=false", "trainer.logger=[console]",
    ]  # fmt: skip


def test_a_run_shows_a_live_line_and_leaves_only_whole_lines(tmp_path: Path) -> None:
    code, written = on_a_terminal(arguments(tmp_path))
    assert code == 0, written[-3000:]
    phases = set(LIVE.findall(written))
    assert phases >= {"sampling", "update"}
    assert re.search(r"sampling \(\d+ s\): \d+ of 768 responses, \d+ tokens/s", written)
    assert re.search(r"update \(\d+ s\): \d+ of 48 micro-batches", written)
    shown = screen(written)
    assert not [line for line in shown if LIVE.search(line)]
    steps = [line for line in shown if line.startswith(("step 1/2  ", "step 2/2  "))]
    assert len(steps) == 2
    assert all(re.fullmatch(r".*  inside band \d+%", line) for line in steps), steps


def test_ctrl_c_within_a_step_leaves_the_terminal_clean(tmp_path: Path) -> None:
    """The second one ends the step at once."""
    pressed: list[int] = []

    def press(pid: int, written: str) -> None:
        wanted = (LIVE.search(written), "press Ctrl-C again" in written)
        if len(pressed) < 2 and wanted[len(pressed)]:
            pressed.append(pid)
            os.kill(pid, signal.SIGINT)

    code, written = on_a_terminal(arguments(tmp_path), press)
    assert code == 130 and len(pressed) == 2, written[-3000:]
    shown = screen(written)
    assert not [line for line in shown if LIVE.search(line)]
    assert any(line.startswith("stopping after step 1") for line in shown)
    assert "Traceback" not in written


def test_a_terminal_that_is_closed_within_a_step_lets_it_end(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and nothing can be written to the terminal any more."""
    close = lambda pid, written: LIVE.search(written) is not None  # noqa: E731  one line of a condition
    code, written = on_a_terminal(arguments(tmp_path), close)
    assert code == 129, written[-3000:]
    run_dir = tmp_path / "quickstart"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["interrupted"] is True and summary["steps"] == 1
    assert summary["failed"] is None
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]
