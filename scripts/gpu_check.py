"""Everything that needs a GPU, checked and measured part by part, within nine minutes.

    environment    device, versions, and which kernel serves each scheme, with the reasons
    bench          `qarl.bench kernels` on a few shapes, and the verdicts on its bounds
    bench_experts  the same of experts, grouped and fused
    trainer        `qarl.bench trainer`: forward, backward, optimizer and quantization with the kernels chosen here
    end_to_end     two steps of the quickstart with vLLM, from a model that is hardly trained
    device_tests   pytest on tests/gpu and tests/kernels/triton_kernels

Each part is a process with a limit on its time: one that fails or hangs takes none of the others with it. Results go to
benchmarks/results/gpu_check_DATE.json and .md. Exit code: 0 all parts passed, or were left out for a reason that is
written down; 1 some failed. No network. A part that needs a package that is not installed is left out and says which.
A missed verdict is not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"environment": 60, "bench": 150, "bench_experts": 80, "trainer": 100, "end_to_end": 120, "device_tests": 250}
"""Seconds that each may take at most: the figures come first, since all of them together may take `TOTAL_SECONDS`."""
NEEDS = {
    "trainer": ("compressed_tensors", "pydantic", "transformers", "yaml"),
    "end_to_end": ("vllm",),
    "device_tests": ("compressed_tensors", "pydantic", "pytest", "yaml"),
}
"""Packages without which a part is left out."""
TOTAL_SECONDS = 520
KEPT_LINES = 400
BENCH = {
    ("bench", False): "kernels model=Qwen3-8B layer=gate_up,down m=1,16,512,4096,16384 seconds=0.1 device=cuda",
    ("bench", True): "kernels shape=64x128 m=1,17 seconds=0.02 device=cpu",
    ("bench_experts", False): "kernels model=Qwen3-30B-A3B m=16,4096 seconds=0.05 device=cuda "
    "operation=grouped_linear,grouped_input_gradient,experts",
    ("bench_experts", True): "kernels experts=8,2,256,128 m=3 seconds=0.02 rounds=1 device=cpu",
    ("trainer", False): "trainer model=Qwen3-0.6B layers=8 levels=linears launches=1 rounds=3 prompts=8 n=8 "
    "prompt_length=256 response_length=512 micro_batch=16 device=cuda",
    ("trainer", True): "trainer layers=1 schemes=w8a8 levels=linears launches=1 prompts=2 response_length=4 device=cpu",
}
"""(part, whether on a CPU) -> the benchmark's arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.environment:
        return environment(cpu=args.cpu)
    parts = args.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    started = time.monotonic()
    slower = 3 if args.cpu else 1  # a CPU may be shared
    results = {}
    for part in parts:
        left = TOTAL_SECONDS * slower - (time.monotonic() - started)
        results[part] = run_part(part, cpu=args.cpu, seconds=min(PARTS[part] * slower, left))
        print(f"== {part}: {results[part]['status']} ({results[part]['seconds']:.0f} s)", flush=True)
    write(args.output, results, cpu=args.cpu)
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


def run_part(part: str, *, cpu: bool, seconds: float) -> dict[str, Any]:
    """Run one part as a process; `status` is passed, failed or left out, `output` its last lines."""
    if seconds < 5:
        return {"status": "failed", "why": "no time was left", "seconds": 0.0, "output": []}
    print(f"== {part}", flush=True)
    if missing := [name for name in NEEDS.get(part, ()) if importlib.util.find_spec(name) is None]:
        why = f"{', '.join(missing)} not installed: this part was not run"
        return {"status": "left out", "why": why, "seconds": 0.0, "output": [why]}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = os.environ | {"QARL_GPU_CHECK_REPORT": str(report), "PYTHONUNBUFFERED": "1"}
        if cpu and part == "device_tests":
            environment["TRITON_INTERPRET"] = "1"
        output, code = run(command_of(part, cpu=cpu, folder=Path(folder)), environment, seconds)
        found = json.loads(report.read_text()) if report.is_file() else None
    print(output, end="", flush=True)
    why = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
    return {
        "status": "passed" if code == 0 else "failed",
        "why": None if code == 0 else why,
        "seconds": time.monotonic() - start,
        "report": found,
        "output": output.splitlines()[-KEPT_LINES:],
    }


def run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str, int | None]:
    """(output, exit code; None past the limit). Whatever the command started ends with it: the GPU is free again."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired as error:
        held = error.stdout or b""
        return held.decode(errors="replace") if isinstance(held, bytes) else held, None
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command_of(part: str, *, cpu: bool, folder: Path) -> list[str]:
    python = [sys.executable]
    if (part, cpu) in BENCH:
        return [*python, "-m", "qarl.bench", *BENCH[part, cpu].split(), f"json={folder / 'report.json'}"]
    if part == "device_tests":
        pytest = [*python, "-m", "pytest", "-q", "-rPs", "-p", "no:cacheprovider", "-o", "addopts="]
        if importlib.util.find_spec("pytest_timeout") is None:
            pytest += ["-o", "timeout="]
        triton = "tests/kernels/triton_kernels"
        return [*pytest, "tests/gpu", f"{triton}/test_compat.py" if cpu else triton]
    if part == "end_to_end":
        model, data = folder / "model", folder / "data"
        make = [*python, "scripts/make_tiny_model.py", "--steps", "5", "--output", str(model), "--data", str(data)]
        files = [f"data.{name}_files={data}/{file}.parquet" for name, file in (("train", "train"), ("val", "test"))]
        train = [*python, "-m", "qarl.train", "config=quickstart.yaml", f"output_dir={folder}", "name=gpu_check",
                 f"model.path={model}", *files, "trainer.total_training_steps=2",
                 "trainer.val_before_train=false", "trainer.test_freq=-1"]  # fmt: skip
        return ["sh", "-c", f"{shlex.join(make)} && {shlex.join(train)}"]
    return [*python, str(Path(__file__)), "--environment", *(["--cpu"] if cpu else [])]


def environment(*, cpu: bool) -> int:
    """Device, versions, and for Qwen3-8B's layers the kernel of every scheme; the exit code."""
    import torch

    from qarl.bench.report import facts
    from qarl.bench.sources import find_model, linear_shapes
    from qarl.errors import UserError
    from qarl.kernels.registry import LINEAR_KERNELS, choose_linear_kernel

    device = torch.device("cpu" if cpu else "cuda:0")
    if not cpu and not torch.cuda.is_available():
        print("PyTorch sees no GPU; --cpu tries the script without one")
        return 1
    report = facts(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report["capability"] = f"{properties.major}.{properties.minor}"
        report["memory_gib"] = round(properties.total_memory / 2**30, 1)
    kernels: dict[str, list[str]] = {}
    for scheme in LINEAR_KERNELS:
        for name, shape in linear_shapes(find_model("Qwen3-8B")).items():
            try:
                reason = choose_linear_kernel(scheme, device, shape, group_size=128).reason
            except UserError as error:
                reason = str(error)
            kernels.setdefault(f"{scheme}: {reason}", []).append(name)
    report["linear_kernels"] = kernels
    print(json.dumps(report, indent=1))
    Path(os.environ["QARL_GPU_CHECK_REPORT"]).write_text(json.dumps(report))
    return 0


class Bound(NamedTuple):
    """`kernels` must be `least` times as fast as `against` on every shape that `serves`, or reach that share of a copy
    if there is nothing to be compared with."""

    text: str
    least: float
    operation: str
    serves: Callable[[int], bool]
    kernels: tuple[str, ...]
    against: str | None = "bf16 bf16"


QUANTIZERS = tuple(f"{scheme} triton{copy}" for scheme in ("w4a16", "w8a8", "fp8")
                   for copy in ("", ", and the BF16 copy"))  # fmt: skip
BOUNDS = (
    Bound("W4A16, M <= 16: 2.5x BF16", 2.5, "linear", lambda m: m <= 16, ("w4a16 triton",)),
    Bound("W4A16, M <= 16: 0.9x Marlin", 0.9, "linear", lambda m: m <= 16, ("w4a16 triton",), "w4a16 vllm_marlin"),
    Bound("W4A16: 0.97x gemlite", 0.97, "linear", lambda m: True, ("w4a16 triton",), "w4a16 gemlite"),
    Bound("W4A16, M >= 4096: 0.9x BF16", 0.9, "linear", lambda m: m >= 4096, ("w4a16 triton",)),
    Bound("W8A8, M >= 4096: 1.5x BF16", 1.5, "linear", lambda m: m >= 4096, ("w8a8 triton",)),
    Bound("FP8, M >= 4096: 1.5x BF16", 1.5, "linear", lambda m: m >= 4096, ("fp8 triton",)),
    Bound("transposed W4A16, M = 4096: 0.8x BF16", 0.8, "input_gradient", lambda m: m == 4096, ("w4a16 triton",)),
    Bound("quantize and pack: 70% of a copy", 0.7, "quantize", lambda m: True, QUANTIZERS, None),
)
"""The kernels are held to these on an H200."""


def verdicts(results: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(bound, shape, figure, met | missed | not measured) for every bound and shape. A kernel without a figure (its
    numbers were wrong, or it did not run) misses its bound."""
    return [line for bound in BOUNDS for line in list(judge(bound, results))
            or [(bound.text, "", "no such shape was measured", "not measured")]]  # fmt: skip


def judge(bound: Bound, results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    shapes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for entry in results:
        if entry["operation"] == bound.operation and bound.serves(entry["m"]):
            key = (entry["layer"], entry["n"], entry["k"], entry["m"])
            shapes.setdefault(key, {})[f"{entry['scheme']} {entry['kernel']}"] = entry
    for (layer, n, k, m), entries in shapes.items():
        for name in bound.kernels:
            where = f"{layer} [{n}, {k}]" + (f", M = {m}" if m else f", {name}")
            mine, other = entries.get(name), entries.get(bound.against or "")
            if mine is None:
                yield bound.text, where, f"{name} has no figure", "missed"
            elif bound.against and other is None:
                yield bound.text, where, f"{bound.against} is not here", "not measured"
            else:
                value = other["seconds"]["median"] / mine["seconds"]["median"] if other else mine["share_of_copy"]
                figure = f"{value:.2f}x" if other else f"{value:.0%}"
                reached = f"; at {mine['share_of_copy']:.0%} of a copy's bytes/s"
                if mine["share_of_bf16_product"]:
                    reached += f", {mine['share_of_bf16_product']:.0%} of the BF16 product's FLOP/s"
                met = value >= bound.least
                yield bound.text, where, figure + reached * (not met), "met" if met else "missed"


def write(folder: Path, results: dict[str, Any], *, cpu: bool) -> None:
    """gpu_check_DATE.json and .md; cpu_check_... for a try on a CPU."""
    now = datetime.datetime.now(datetime.UTC)
    path = folder / f"{'cpu' if cpu else 'gpu'}_check_{now:%Y-%m-%d}"
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"date": now.isoformat(timespec="seconds"), "parts": results}
    lines = [f"`scripts/gpu_check.sh{' --cpu' if cpu else ''}`, {document['date']}", "",
             "| part | status | seconds | |", "|---|---|---|---|"]  # fmt: skip
    for part, result in results.items():
        lines.append(f"| {part} | {result['status']} | {result['seconds']:.0f} | {result.get('why') or ''} |")
    if measured := (results.get("bench") or {}).get("report"):
        document["verdicts"] = [list(line) for line in verdicts(measured["results"])]
        said = "On a CPU, to try the table: they mean nothing.\n\n" if cpu else ""
        rows = [f"| {' | '.join(line)} |" for line in document["verdicts"]]
        lines += ["", "## verdicts", "", said + "\n".join(["| bound | shape | found | |", "|---|---|---|---|", *rows])]
        print(lines[-1])
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for part, result in results.items():
        lines += ["", f"## {part}", "", *markdown(part, result)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written to {path}.json and .md")


def markdown(part: str, result: dict[str, Any]) -> list[str]:
    """Tables of a benchmark, else the last lines of output."""
    if (part, False) in BENCH and result.get("report"):
        from qarl.bench.kernels import tables as kernels
        from qarl.bench.steps import tables as steps

        return [(steps if part == "trainer" else kernels).markdown(result["report"])]
    return ["```", *result["output"][-60:], "```"]


if __name__ == "__main__":
    sys.exit(main())
