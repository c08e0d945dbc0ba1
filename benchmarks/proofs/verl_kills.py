"""Processes of verl runs that are ended: a clear error, and the same command goes on from the state that was saved."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.proofs.harness import QUIET, Record, Row, Run, timed
from benchmarks.proofs.verl_runs import CONFIG, FOLDER

SAVE_FREQ = 2
LAST = 8
_VERIFIED = re.compile(
    r"rank (\d+): resumed state equals the saved one by checksum: (\d+) parts, (\w+)"
)


def verl_resume(
    record: Record,
    *,
    kills: int = 5,
    ranks: int = 1,
    seed: int = 0,
    seconds: float = 30.0,
    signals: str = "SIGKILL",
    lora_r: int = 0,
) -> None:
    """End runs by a signal at random moments, resume them, and compare state by checksum and prompts by step.

    The state is compared on every rank, by verl's load and the record of the save. By SIGINT and SIGTERM the exit code
    must be 130 within a minute, with the answer that says what the repeated command does, and no process left.
    """
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job ignores it, and so would its runs
    chance = random.Random(seed)
    for number in range(kills):
        delay = chance.uniform(0.0, seconds)
        adapters = f" | r={lora_r}" if lora_r else ""
        if record.wants(name := f"{signals} | {ranks} ranks{adapters} | {seed}.{number}"):
            run = f"{signals}{ranks}_{lora_r}_{seed}_{number}"
            row = resumed(run, FOLDER / "verl_resume", ranks, signals, delay, lora_r)
            record.add(name, row, ok=row.pop("as_it_should"))


def resumed(name: str, root: Path, ranks: int, signals: str, delay: float, lora_r: int) -> Row:
    """One kill and one resume: what was compared, and whether it was equal."""
    settings = QUIET | {
        "trainer.save_final": True,
        "trainer.total_training_steps": LAST,
        "trainer.save_freq": SAVE_FREQ,
        "trainer.n_gpus_per_node": ranks,
        "lora.r": lora_r,
    }
    killed = root / f"{name}.killed"
    again = root / f"{name}.resumed"
    Run.clear(name, root)
    run = Run.start(name, root, CONFIG, settings | {"verl.trainer.rollout_data_dir": killed})
    ended = end_run(run, signals, delay)
    stopped = run.step
    checkpoint = last_checkpoint(run.folder)
    run = Run.start(name, root, CONFIG, settings | {"verl.trainer.rollout_data_dir": again})
    verified = (
        {int(rank): int(parts) for rank, parts, _ in _VERIFIED.findall(run.text)}
        if run.code == 0
        else {}
    )
    asked = [
        step for step in range(checkpoint + 1, stopped + 1) if (killed / f"{step}.jsonl").is_file()
    ]
    same = all(prompts_of_step(killed, step) == prompts_of_step(again, step) for step in asked)
    # verl's own thread writes them: that of the last step may not be there yet.
    dumped = all((killed / f"{step}.jsonl").is_file() for step in range(1, stopped))
    ranks_verified = sorted(verified) == list(range(ranks if checkpoint else 0))
    whole = run.step == last_checkpoint(run.folder) == LAST
    return {
        "killed_s_after_step_1": round(delay, 2),
        "killed_after_step": stopped,
        **ended,
        "resumed_from": checkpoint,
        "exit_code": run.code,
        "ranks_verified": sorted(verified),
        "parts": [verified[rank] for rank in sorted(verified)],
        "steps_with_equal_prompts": asked if same else [],
        "last_step": run.step,
        "as_it_should": run.code == 0
        and ended.get("ended", True)
        and ranks_verified
        and dumped
        and same
        and whole,
    }


def end_run(run: Run, signals: str, delay: float) -> Row:
    """Send the signal `delay` seconds after step 1, or once the last but one is logged; return how the run ended."""
    end = None
    while (step := run.step) < LAST - 1 and (end is None or time.monotonic() < end):
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended by itself with {run.code}, see {run.log}")
        end = time.monotonic() + delay if step and end is None else end
        time.sleep(0.05)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    spent: Row = {}
    os.kill(run.process.pid, signal.Signals[signals])
    with timed(spent):
        run.process.wait()
    if signals == "SIGKILL":
        return {}
    left = len(psutil.wait_procs(processes, timeout=10)[1])
    answered = "stopping verl now" in run.text and "if you repeat the command" in run.text
    ok = run.code == 130 and spent["seconds"] < 60 and answered and not left
    return {
        "exit_code_at_signal": run.code,
        "end_seconds": spent["seconds"],
        "processes_left": left,
        "ended": ok,
    }


def prompts_of_step(folder: Path, step: int) -> list[str]:
    file = folder / f"{step}.jsonl"
    return (
        sorted(json.loads(line)["input"] for line in file.open(encoding="utf-8"))
        if file.is_file()
        else []
    )


def last_checkpoint(run_dir: Path) -> int:
    """Return the step that verl would go on from; 0 if there is no checkpoint."""
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


VICTIMS = {"engine": "EngineCore", "server": "vLLMHttpServer"}
PROMPTS = 12
SAMPLES = 8
BATCH = PROMPTS * SAMPLES
SLICE, SETTLE = 0.02, 0.4
"""Seconds that the engine runs before a late end, and that rewards of what it has sent may take."""
LIMIT = 400.0
"""Seconds after which a start that has not ended is called hung, and ended."""
REWARD = """
import os
from qarl.data.rewards import arithmetic

def counted(*args, **kwargs):
    if "RAY_JOB_ID" in os.environ:  # not in the program's own check of the function
        with open({path!r}, "ab") as file:
            file.write(b".")
    return arithmetic(*args, **kwargs)
"""


def verl_kills(
    record: Record,
    *,
    moments: tuple[str, ...] = ("late", "early", "before", "after"),
    victims: tuple[str, ...] = ("engine", "server"),
    steps: int = 24,
) -> None:
    """Kill the engine or the server in the second step of a start: a clear error, and the same command resumes.

    before   when the step before it is logged: no response is there yet
    early    at the first response that is rewarded
    late     when three of four are: the rest fails, and an update would be made of the survivors
    after    when all are: the trainer computes, saves, and would wait in the publish
    """
    root = FOLDER / "verl_kills"
    root.mkdir(parents=True, exist_ok=True)
    counter = root / "rewards.count"
    reward = root / "counted_reward.py"
    reward.write_text(REWARD.format(path=str(counter)))
    settings = QUIET | {
        "data.train_batch_size": PROMPTS,
        "rollout.n": SAMPLES,
        "reward.function": f"{reward}:counted",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 1,
    }
    for number, (moment, victim) in enumerate(
        [*((m, v) for m in moments for v in victims), ("", "")]
    ):
        if not record.wants(name := f"{victim} | {moment}" if victim else "last"):
            continue
        counter.write_bytes(b"")
        (root / "run.log").unlink(missing_ok=True)
        if number == 0:
            Run.clear("run", root)
        run = Run.start("run", root, CONFIG, settings)
        row: Row = {}
        try:
            if victim:
                row, ok = _killed(run, victim, moment, counter)
            code = _ended(run, row)
        finally:
            _end_all(run.process.pid)
        row |= {
            "exit_code": code,
            "resumed": "resumed state equals the saved one by checksum" in run.text,
        }
        if not victim:
            record.add(name, row | {"last_step": run.step}, ok=code == 0 and row["resumed"])
            continue
        message = (
            run.text[run.text.rfind("\nerror: ") + 1 :]
            if "\nerror: " in run.text
            else run.text[-600:]
        )
        clear = code == 2 and "vllm_server_0_0" in message and "it resumes after step" in message
        logged = run.step - row.pop("known")
        row |= {"message": message.strip().splitlines()[:6], "new_steps": logged}
        record.add(name, row, ok=clear and ok and logged == 1 and (row["resumed"] or number == 0))


def _killed(run: Run, victim: str, moment: str, counter: Path) -> tuple[Row, bool]:
    """Kill at `moment` of the second step. Return the row, and whether a part of a batch was missing as it should."""
    known = run.step

    def rewards() -> int:
        return counter.stat().st_size

    _wait(run, lambda: rewards() > 0)
    if run.process.poll() is not None:
        raise SystemExit(f"the run ended by itself with {run.code}, see {run.log}")
    process, engine = (_child(run, VICTIMS[name]) for name in (victim, "engine"))
    least = {"early": BATCH + 1, "late": BATCH + 1, "after": 2 * BATCH}
    _wait(
        run,
        (lambda: run.step != known) if moment == "before" else lambda: rewards() >= least[moment],
    )
    while (
        moment == "late" and run.process.poll() is None
    ):  # rewards come later than responses: run in slices
        engine.suspend()
        time.sleep(SETTLE)
        if rewards() >= BATCH * 7 // 4:
            break
        engine.resume()
        time.sleep(SLICE)
    os.kill(process.pid, signal.SIGKILL)
    rewarded = rewards()
    if moment == "late" and victim != "engine":
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray may have ended it with its server
            engine.resume()
    row = {
        "victim": victim,
        "moment": moment,
        "known": known,
        "rewards_of_the_step": rewarded - BATCH,
    }
    return row, moment not in ("early", "late") or rewarded < 2 * BATCH


def _wait(run: Run, condition: Callable[[], bool]) -> None:
    while run.process.poll() is None and not condition():
        time.sleep(0.005)


def _ended(run: Run, row: Row) -> int | None:
    """Return the exit code of a run that ends by itself, or None."""
    with timed(row, "end_seconds"):
        try:
            return run.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None


def _child(run: Run, text: str) -> psutil.Process:
    """Return the one descendant whose command line has `text` in it."""
    children = []
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            children += [process] if text in " ".join(process.cmdline()) else []
    if len(children) != 1:
        raise SystemExit(f"{len(children)} processes are called {text}")
    return children[0]


def _end_all(pid: int) -> None:
    """End a run that is still there and everything that it has started, by process id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
