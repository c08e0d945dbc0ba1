"""End the rollout server and the engine of verl runs at chosen moments: how long until a clear error, and whether the
same command then resumes.

    python scripts/verl_kill_check.py --output benchmarks/results/verl_kills_cpu.json

One run folder with a checkpoint after every step. Each start is ended once, by SIGKILL to one process that it started
(vLLM's engine, or Ray's actor with the server around it), in its second step:

    before   when the step before it is logged: no response is there yet
    early    at the first response that is rewarded
    late     when three of four are: the rest fails, and an update would be made of the survivors. From the first reward
             on the engine runs in slices of some milliseconds, because rewards come later than responses
    after    when all are: the trainer computes, saves, and would wait in the publish

The next start resumes and is ended in turn; the last one runs to its end. Checked each time: exit code 2 with one
message that names the process and says to start again; no traceback as the last word; no step logged from a part of a
batch; the checkpoint that the next start resumes from, by checksum. The result is JSON, written after every start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from qarl.checkpoint.json_file import write_json
from qarl.checkpoint.run_folder import METRICS_FILE
from qarl.metrics.tracker import read_metrics

NAME = "verl_kill_check"
VICTIMS = {"engine": "EngineCore", "server": "vLLMHttpServer"}
MOMENTS = ("before", "early", "late", "after")
PROMPTS, SAMPLES = 12, 8
SLICE, SETTLE = 0.02, 0.4
"""Seconds that the engine runs before a late end, and that rewards of what it has sent may take."""
LIMIT = 400.0
"""Seconds after which a start that has not ended is called hung, and ended."""

REWARD = """
import os

from qarl.data.rewards import arithmetic


def counted(*args, **kwargs):
    reward = arithmetic(*args, **kwargs)
    if "RAY_JOB_ID" in os.environ:  # not in the program's own check of the function
        with open({path!r}, "ab") as file:
            file.write(b".")
    return reward
"""


class Run:
    """One start of the run; `root` holds its folder and the file that counts rewards."""

    def __init__(self, root: Path, steps: int, overrides: list[str], log: Path) -> None:
        self.root, self.log, self.counter = root, log, root / "rewards.count"
        self.counter.write_bytes(b"")
        reward = root / "counted_reward.py"
        reward.write_text(REWARD.format(path=str(self.counter)))
        settings = {
            "name": NAME,
            "output_dir": root,
            "data.train_batch_size": PROMPTS,
            "rollout.n": SAMPLES,
            "reward.function": f"{reward}:counted",
            "trainer.total_training_steps": steps,
            "trainer.save_freq": 1,
            "trainer.val_before_train": "false",
            "trainer.test_freq": -1,
            "trainer.save_final": "false",
            "trainer.plots": "false",
            "trainer.logger": "[console]",
        }
        given = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "qarl.train", "config=quickstart_verl.yaml", *given, *overrides]
        self.output = log.open("wb")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def steps(self) -> list[int]:
        run_dir = self.root / NAME
        entries = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
        return sorted(int(entry["step"]) for entry in entries if "timing_s/step" in entry)

    @property
    def rewards(self) -> int:
        return self.counter.stat().st_size

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, or the end of the process."""
        while self.process.poll() is None and not condition():
            time.sleep(0.005)

    def victim(self, text: str) -> psutil.Process:
        """The one descendant whose command line has `text` in it."""
        found = [one for one in psutil.Process(self.process.pid).children(recursive=True) if text in _title(one)]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} processes are called {text}: {[_title(one) for one in found]}")
        return found[0]

    def creep(self, engine: psutil.Process, rewards: int) -> None:
        """Let the engine run in slices until so many rewards are there; it is left stopped."""
        while self.process.poll() is None:
            engine.suspend()
            time.sleep(SETTLE)
            if self.rewards >= rewards:
                return
            engine.resume()
            time.sleep(SLICE)

    def end(self) -> tuple[int | None, float]:
        """Exit code and seconds until the process ended by itself; None if it had to be ended."""
        start = time.monotonic()
        try:
            code: int | None = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            self.kill_all()
        self.output.close()
        return code, time.monotonic() - start

    def kill_all(self) -> None:
        """End the program and everything that it has started, by process id."""
        for one in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def reached(run: Run, moment: str, known: list[int]) -> Callable[[], bool]:
    """Whether the second step of this start is at `moment`, or at the first reward before it; `known`: steps that were
    logged before it."""
    batch = PROMPTS * SAMPLES
    wanted = {"early": batch + 1, "late": batch + 1, "after": 2 * batch}
    if moment == "before":
        return lambda: run.steps != known
    return lambda: run.rewards >= wanted[moment]


def kill(root: Path, victim: str, moment: str, args: argparse.Namespace) -> dict[str, Any]:
    run = Run(root, args.steps, args.overrides, root / f"{victim}_{moment}.log")
    try:
        return kill_in(run, victim, moment)
    finally:
        if run.process.poll() is None:
            run.kill_all()


def kill_in(run: Run, victim: str, moment: str) -> dict[str, Any]:
    known, begin = run.steps, time.monotonic()
    run.wait_for(lambda: run.rewards > 0)
    if run.process.poll() is not None:
        raise SystemExit(f"the run ended by itself with {run.process.returncode}, see {run.log}")
    process, engine = run.victim(VICTIMS[victim]), run.victim(VICTIMS["engine"])
    run.wait_for(reached(run, moment, known))
    if moment == "late":
        run.creep(engine, PROMPTS * SAMPLES * 7 // 4)
    os.kill(process.pid, signal.SIGKILL)
    rewards, started = run.rewards, time.monotonic() - begin
    if moment == "late" and victim != "engine":
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray may have ended it with its server
            engine.resume()
    code, seconds = run.end()
    text = run.log.read_text(encoding="utf-8", errors="replace")
    message = text[text.rfind("\nerror: ") + 1 :] if "\nerror: " in text else text[-600:]
    logged = [step for step in run.steps if step not in known]
    clear = code == 2 and "vllm_server_0_0" in message and "it resumes after step" in message
    return {
        "victim": victim,
        "moment": moment,
        "killed_after_s": round(started, 1),
        "rewards_of_the_step": rewards - PROMPTS * SAMPLES,
        "seconds_to_the_error": round(seconds, 1),
        "exit_code": code,
        "message": message.strip().splitlines()[:6],
        "resumed": checked_resume(text),
        "steps_logged": logged,
        "ok": clear and in_time(moment, rewards) and len(logged) == 1,
    }


def in_time(moment: str, rewards: int) -> bool:
    """Whether a part of the batch was missing, where it should have been."""
    return moment not in ("early", "late") or rewards < 2 * PROMPTS * SAMPLES


def checked_resume(text: str) -> bool:
    """Whether this start compared a checkpoint that it loaded with its record."""
    return "resumed state equals the saved one by checksum" in text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--moments", nargs="+", default=list(MOMENTS), choices=MOMENTS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--root", type=Path, default=Path("runs/verl_kill_check"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"kills": []}

    def write() -> None:
        print(json.dumps(report["kills"][-1], ensure_ascii=False), flush=True)
        if args.output:
            write_json(args.output, report)

    for moment in args.moments:
        for victim in args.victims:
            report["kills"].append(kill(args.root, victim, moment, args))
            write()
    last = Run(args.root, args.steps, args.overrides, args.root / "last.log")
    code, seconds = last.end()
    text = last.log.read_text(encoding="utf-8", errors="replace")
    report["last"] = {
        "exit_code": code,
        "seconds": round(seconds, 1),
        "resumed": checked_resume(text),
        "steps": last.steps[-1] if last.steps else 0,
    }
    resumed = all(one["resumed"] for one in report["kills"][1:]) and report["last"]["resumed"]
    report["ok"] = resumed and code == 0 and all(one["ok"] for one in report["kills"])
    if args.output:
        write_json(args.output, report)
    print(json.dumps(report["last"]), "ok" if report["ok"] else "NOT OK")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
