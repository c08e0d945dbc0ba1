"""Whole verl runs that a test ends from outside, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from checkout import ROOT

SETTINGS = {
    "data.train_batch_size": 4,
    "data.max_response_length": 48,
    "rollout.n": 4,
    "rollout.cpu_kvcache_space_gib": 0.25,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "actor.log_prob_micro_batch_size_per_gpu": 8,
    "trainer.total_training_steps": 6,
    "trainer.save_freq": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": "false",
    "trainer.logger": "[console]",
}
"""The quickstart in verl with steps of a second, each of which is saved."""
WAIT_SECONDS = 600
"""As long a run may take to its next sign of life. It starts ten processes, which a busy machine takes minutes for."""
GRACE_SECONDS = 120
"""The processes of a run may take as long to end after it. After SIGKILL of the command all of them end at once but
Ray's two agents, which end about 70 s later (measured)."""
ENGINE = "VLLM::EngineCore"
RANK = "WorkerDict"
SENDER = "CheckpointEngineWorker"
"""The process beside an engine of its own that passes publishes on to it."""


class KilledRun:
    """`qarl train` with a shipped config of verl, in a process group of its own, as a shell would start it.

    `printed`: its output. `seen`: every process that it has started."""

    def __init__(self, folder: Path, *overrides: str, config: str = "quickstart_verl") -> None:
        self.run_dir = folder / config
        changes = dict(override.split("=", 1) for override in overrides)
        given = {"output_dir": folder, **SETTINGS, **changes}
        # A shell lets the jobs in its background ignore Ctrl-C, and nohup SIGHUP, and the tests may be one.
        command = ["env", "--default-signal=INT,HUP"]
        command += [sys.executable, "-m", "qarl.train", f"config={config}.yaml"]
        command += [f"{key}={value}" for key, value in given.items()]
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "printed.txt"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log, process_group=0
            )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> KilledRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self.look()
        for process in self.seen.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.kill()
        self.process.wait()

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """The lines of its output that begin an error."""
        return [line for line in self.printed.splitlines() if line.startswith("error: ")]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def wait_for(
        self, condition: str | Callable[[], object], seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait for a text in the output, or until `condition` is true."""
        end = time.monotonic() + seconds
        while not (condition in self.printed if isinstance(condition, str) else condition()):
            self.look()
            assert self.process.poll() is None, self.printed[-3000:]
            assert time.monotonic() < end, self.printed[-3000:]
            time.sleep(0.02)

    def wait_for_step(self) -> None:
        """Wait until it has logged a training step, so that it is in the next one."""
        self.wait_for(lambda: re.search(r"^step [1-9]\d*/", self.printed, re.MULTILINE))

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Return the exit code."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < end, self.printed[-3000:]
            time.sleep(0.1)
        return self.process.returncode

    def look(self) -> None:
        """Remember the processes that it has now."""
        for process in self._running():
            self.seen.setdefault(process.pid, process)

    def _running(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def named(self, title: str) -> list[psutil.Process]:
        """The running processes with this in their titles, such as `ENGINE`."""
        found = []
        for process in self._running():
            try:
                if title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def interrupt(self) -> None:
        """Ctrl-C at a terminal, which reaches the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """A terminal that is closed, which reaches the whole foreground group, and often comes twice."""
        for _ in range(2):
            os.killpg(self.process.pid, signal.SIGHUP)

    def orphans(self) -> list[str]:
        """What still runs `GRACE_SECONDS` after its end."""
        _, alive = psutil.wait_procs(self.seen.values(), timeout=GRACE_SECONDS)
        return [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in alive]


def kill(title: str) -> Callable[[KilledRun], None]:
    """Kill one of the processes with this title while the run makes its steps."""

    def act(run: KilledRun) -> None:
        run.wait_for_step()
        run.named(title)[-1].kill()

    return act


def kill_the_command(run: KilledRun) -> None:
    run.wait_for_step()
    run.look()
    run.process.kill()
