"""A command in a terminal of its own, which is closed while the command works."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from qarl import console
from qarl.hangup import interrupted_code
from qarl.trainer.stop import Stop

def work(arguments):
    with Stop() as stop:
        stop.work = {work!r}
        Path("here").touch()
        deadline = time.monotonic() + 20
        while not stop and time.monotonic() < deadline:
            time.sleep(0.01)
        print("a metric", flush=True)
        console.say("a note")
    Path("written").touch()
    print("the summary")
    return interrupted_code()

main, _ = console.entry(work, "")
sys.exit(main())
"""


@pytest.mark.parametrize("output", ["terminal", "file"])
@pytest.mark.parametrize("work", ["stopping after step 3", None])
def test_a_command_whose_terminal_is_closed_writes_its_files_and_ends_with_129(
    tmp_path: Path, work: str | None, output: str
) -> None:
    terminal, inner = pty.openpty()
    log = tmp_path / "log"
    take_terminal = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    with log.open("w") as file:
        shown = inner if output == "terminal" else file
        process = subprocess.Popen(
            [sys.executable, "-c", take_terminal + PROGRAM.format(work=work)],
            cwd=tmp_path,
            stdin=inner,
            stdout=shown,
            stderr=shown,
            start_new_session=True,
        )
    os.close(inner)
    try:
        while not (tmp_path / "here").exists() and process.poll() is None:
            time.sleep(0.01)
        os.close(terminal)
        assert process.wait(timeout=30) == 129
    finally:
        process.kill()
    assert (tmp_path / "written").exists() is (work is not None)
    words = f"the terminal was closed (SIGHUP): {work}" if work else "interrupted"
    assert output == "terminal" or words in log.read_text()
