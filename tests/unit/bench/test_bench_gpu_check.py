"""scripts/gpu_check.py: verdicts, the limit on each part, what is kept if it is stopped, and a rehearsal on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check
from gpu_parts import Part
from gpu_verdicts import BOUNDS, Bound, verdicts


def entry(operation: str, m: int, name: str, seconds: float, copy: float = 0.5) -> dict[str, Any]:
    scheme, _, kernel = name.partition(" ")
    return {
        "operation": operation, "layer": "down", "n": 4096, "k": 12288, "m": m, "scheme": scheme, "kernel": kernel,
        "seconds": {"median": seconds}, "share_of_copy": copy, "share_of_bf16_product": 0.25,
    }  # fmt: skip


def verdict(results: list[dict[str, Any]], text: str) -> tuple[str, str]:
    ((_, _, figure, status),) = (line for line in verdicts(results) if line[0] == text)
    return status, figure


@pytest.mark.parametrize(
    "bound", [bound for bound in BOUNDS if bound.against], ids=lambda bound: bound.text
)
def test_speeds(bound: Bound) -> None:
    m = next(m for m in (16, 4096) if bound.serves(m))
    (kernel,), against, least = (
        bound.kernels,
        bound.against or "",
        float(bound.text.split(": ")[1].split("x")[0]),
    )
    mine = entry(bound.operation, m, kernel, 1.0)
    for ratio, expected in ((least + 0.011, "met"), (least - 0.011, "missed")):
        status, figure = verdict([mine, entry(bound.operation, m, against, ratio)], bound.text)
        assert status == expected and figure.startswith(f"{ratio:.2f}x")
        assert ("50% of a copy's bytes/s, 25% of the BF16 product's" in figure) == (
            expected == "missed"
        )
    assert verdict([mine], bound.text)[0] == "not measured"
    other = entry(bound.operation, m, against, 1.0)
    assert verdict([other], bound.text) == ("missed", f"{kernel} has no figure")
    assert verdict([entry("other", m, kernel, 1.0)], bound.text)[0] == "not measured"


def test_what_the_page_says_of_the_small_figures() -> None:
    """docs/lookup/results/gpu.md: how far the fastest small calls are from a copy, and the bounds without 12 us."""
    report = json.loads((ROOT / "benchmarks/results/gpu_check_2026-11-27.json").read_text())[
        "parts"
    ]["bench"]["report"]
    copy = report["ceilings"]["copy_bytes_per_s"]
    seconds: dict[tuple[str, int, str], float] = {}
    over: dict[tuple[str, int, str], float] = {}
    at_copy: dict[tuple[str, int, str], float] = {}
    for result in report["results"]:
        if result["operation"] != "input_gradient":
            key = (result["layer"], result["m"], f"{result['scheme']} {result['kernel']}")
            seconds[key] = result["seconds"]["median"] * 1e6
            at_copy[key] = result["share_of_copy"] * seconds[key]
            over[key] = seconds[key] - at_copy[key]
    layers = ("gate_up", "down")
    machete, bf16 = (
        [over[layer, m, name] for layer in layers for m in (1, 16)]
        for name in ("w4a16 vllm_machete", "bf16 bf16")
    )
    quantizers = [over[layer, 0, f"{name} triton"] for layer in layers for name in ("w8a8", "fp8")]
    assert [round(f(machete)) for f in (min, max)] == [16, 18]
    assert [round(f(bf16)) for f in (min, max)] == [13, 14]
    assert [round(f(quantizers)) for f in (min, max)] == [8, 16]
    assert round(12e-6 * copy / 1e6) == 51
    launched = [
        seconds[layer, 1, f"w8a8 {name}"]
        for name in ("vllm_cutlass_int8", "triton")
        for layer in layers
    ]
    assert [round(value, 1) for value in launched] == [74.5, 29.9, 283.7, 102.3]
    missed = [(layer, f"{name} triton") for layer, name in product(layers, ("w4a16", "w8a8", "fp8"))
              if at_copy[layer, 0, f"{name} triton"] / seconds[layer, 0, f"{name} triton"] < 0.7]  # fmt: skip
    net = [at_copy[layer, 0, name] / (seconds[layer, 0, name] - 12) for layer, name in missed]
    assert len(missed) == 4 and [f"{f(net):.0%}" for f in (min, max)] == ["88%", "90%"]
    own = "w4a16 triton"
    reach = [
        seconds[layer, m, "bf16 bf16"] / (at_copy[layer, m, own] + 12)
        for layer in layers
        for m in (1, 16)
    ]
    assert [round(f(reach), 1) for f in (min, max)] == [2.0, 2.1]
    against = {name: [round((seconds["down", m, name] - 12) / (seconds["down", m, own] - 12), 2) for m in (1, 16)]
               for name in ("bf16 bf16", "w4a16 vllm_marlin")}  # fmt: skip
    assert against == {"bf16 bf16": [1.76, 1.73], "w4a16 vllm_marlin": [0.76, 0.83]}


def run(command: list[str], seconds: float) -> tuple[str, int | None]:
    lines: list[str] = []
    code = gpu_check.run(command, dict(os.environ), seconds, lines.append)
    return "".join(f"{line}\n" for line in lines), code


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_nothing_that_a_part_started_outlives_its_limit(tmp_path: Path) -> None:
    """A process that a shell waits for, one that runs beside it, and one that it left behind."""

    def sleeps(name: str) -> str:
        return f"sh -c 'echo $$ > {tmp_path}/{name}; exec sleep 60'"

    assert run(["sh", "-c", f"{sleeps('left')} & exit 0"], 2.0) == ("", None)
    late = f"{sleeps('beside')} & echo started; {sleeps('waited_for')}; true"
    assert run(["sh", "-c", late], 2.0) == ("started\n", None)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    deadline = time.monotonic() + 20  # they sleep longer; a killed process may need a moment
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 3 and not any(map(is_alive, pids))
    assert run(["sh", "-c", "echo wrong; exit 3"], 9.0) == ("wrong\n", 3)


def python(code: str) -> str:
    return f"-c {json.dumps(code)}"


PARTS = {
    "one": Part("one", 20, "", python("print('one is done')")),
    "gpu": Part("gpu", 20, python("print(1)"), None),
    "lacks": Part("lacks", 20, "", python("print(1)"), ("no_such_package",)),
    "wrong": Part("wrong", 20, "", python("print('wrong'); raise SystemExit(4)")),
    "slow": Part("slow", 60, "", python("print('half', flush=True); import time; time.sleep(50)")),
    "after": Part("after", 20, "", python("print('after')")),
}


def driver(folder: Path, *names: str) -> list[str]:
    """The script on the made-up parts above."""
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"import sys; sys.path[:0] = {[str(ROOT / 'scripts'), str(ROOT), str(ROOT / 'tests' / 'support')]!r}\n"
        "import gpu_check\n"
        f"parts = {[tuple(part) for part in PARTS.values()]!r}\n"
        "gpu_check.PARTS = {part[0]: gpu_check.Part(*part) for part in parts}\n"
        f"sys.exit(gpu_check.main(['--cpu', '--output', {str(folder)!r}, '--parts', {','.join(names)!r}]))\n"
    )
    return [sys.executable, "-c", code]


def parts_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("cpu_check_*.json")
    parts: dict[str, Any] = json.loads(path.read_text())["parts"]
    return parts


def test_a_part_that_fails_or_is_skipped_says_why(tmp_path: Path) -> None:
    names = ("one", "gpu", "lacks", "wrong", "after")
    done = subprocess.run(driver(tmp_path, *names), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    parts = {name: (part["status"], part["why"]) for name, part in parts_of(tmp_path).items()}
    assert parts == {
        "one": ("passed", None),
        "gpu": ("skipped", "needs a GPU"),
        "lacks": ("skipped", "no_such_package not installed"),
        "wrong": ("failed", "exit code 4"),
        "after": ("passed", None),
    }
    page = next(tmp_path.glob("*.md")).read_text()
    assert "| wrong | failed |" in page and "one is done" in page
    again = subprocess.run(
        driver(tmp_path, "one", "after"), capture_output=True, text=True, timeout=120
    )
    assert (
        again.returncode == 0
        and "== one: passed before" in again.stdout
        and "one is done" not in again.stdout
    )


def test_a_part_for_which_time_runs_out_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part past its own limit has. One without time to begin has its earlier result."""
    session = gpu_check.Session(tmp_path, tmp_path, cpu=True)
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0)
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 0.3)
    assert session.run([PARTS["slow"], PARTS["one"]], again=False) == 0
    assert (
        parts_of(tmp_path).keys() == {"slow"} and parts_of(tmp_path)["slow"]["status"] == "skipped"
    )
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 100)
    assert session.run([PARTS["slow"]._replace(seconds=0.3)], again=False) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_script_that_is_stopped_keeps_what_it_printed_and_goes_on_later(
    tmp_path: Path, number: int
) -> None:
    process = subprocess.Popen(
        driver(tmp_path, "one", "slow", "after"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "half\n":
            break
    process.send_signal(number)
    rest = process.communicate(timeout=60)[0]
    parts = parts_of(tmp_path)
    assert {name: part["status"] for name, part in parts.items()} == {
        "one": "passed",
        "slow": "stopped",
    }
    log = next(tmp_path.glob("*.log")).read_text()
    assert "one is done\n" in log and log.count("half\n") == 1
    if number != signal.SIGKILL:
        assert (
            process.returncode == 130
            and "stopped in slow" in rest
            and parts["slow"]["output"] == ["half"]
        )
    later = subprocess.run(
        driver(tmp_path, "one", "after"), capture_output=True, text=True, timeout=120
    )
    assert later.returncode == 0 and "== one: passed before" in later.stdout
    assert {name: part["status"] for name, part in parts_of(tmp_path).items()}["after"] == "passed"


@pytest.mark.slow
def test_the_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    """Without the training run, which tests/e2e has, and the benchmarks' own tests."""
    names = (
        "environment,probe,tuning,second_engine,compile,operators,graphs,bench,steps,bench_experts"
    )
    command = ["scripts/gpu_check.sh", "--cpu", "--output", str(tmp_path), "--parts", names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=_environment(), timeout=1500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    parts = parts_of(tmp_path)
    skipped = {"graphs", "steps"}
    assert {name: part["status"] for name, part in parts.items()} == {
        name: "skipped" if name in skipped else "passed" for name in names.split(",")
    }
    assert "w4a16: " in "".join(parts["environment"]["report"]["linear_kernels"])
    shares = parts["probe"]["report"]["shares"]
    assert set(shares["cublas"]["small"]) == {"1", "2", "7", "16"} and shares["times"]
    document = json.loads(next(tmp_path.glob("cpu_check_*.json")).read_text())
    assert document["device"] and document["versions"]["torch"] and document["commit"]
    assert parts["bench"]["report"]["results"] and parts["bench_experts"]["report"]["results"]
    text = next(tmp_path.glob("*.md")).read_text()
    assert (
        "| bench | passed |" in text
        and "**experts, custom experts_layer, skewed [256, 256]**" in text
    )
    assert all(f"| {bound.text} |" in text for bound in BOUNDS)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable}
