"""What can only be known on a GPU, checked and measured part by part, within nine minutes.

    environment    device, versions, and which kernel serves each scheme, with the reasons
    first          what only a device can say, a line each (scripts/gpu_first.py)
    correctness    every kernel against float64: odd shapes, few and many rows; experts, balanced and skewed
    bench          `qarl.bench kernels` on a few shapes, and the verdicts on its bounds (scripts/gpu_verdicts.py)
    bench_experts  the same of experts, grouped and fused
    trainer        forward, backward and quantization of a small model with the kernels chosen here
    end_to_end     two steps of the quickstart with vLLM, from a model that is hardly trained
    device_tests   pytest on tests/gpu and tests/kernels/triton_kernels

Each part is a process of its own with a limit on its time: one that fails or hangs takes none of the others with it.
Results go to benchmarks/results/gpu_check_DATE.json and .md. Exit code: 0 all parts passed, or were left out for a
reason that is written down; 1 some failed. No network, and only torch and triton besides this repository: a part that
needs a package which is not there is left out and says which. A verdict that is missed is no failure.
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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpu_first import first
from gpu_verdicts import table, verdicts

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"environment": 60, "first": 70, "correctness": 120, "bench": 150, "bench_experts": 80, "trainer": 60,
         "end_to_end": 120, "device_tests": 200}  # fmt: skip
"""Seconds that each may take at most: the figures come first, since all of them together may take `TOTAL_SECONDS`."""
NEEDS = {
    "trainer": ("compressed_tensors", "pydantic", "transformers", "yaml"),
    "end_to_end": ("vllm",),
    "device_tests": ("compressed_tensors", "pydantic", "yaml"),
}
"""Packages without which a part is left out."""
TOTAL_SECONDS = 520
_KEPT_LINES = 400


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        return run_inside(args.inside, cpu=args.cpu)
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
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        why_not, command, environment = command_of(part, cpu=cpu, folder=Path(folder))
        if why_not:
            print(why_not)
            return {"status": "left out", "why": why_not, "seconds": 0.0, "output": []}
        environment = os.environ | {"QARL_GPU_CHECK_REPORT": str(report), "PYTHONUNBUFFERED": "1"} | environment
        output, code = _run(command, environment, seconds)
        why = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
        found = json.loads(report.read_text()) if report.is_file() else None
    print(output, end="", flush=True)
    return {
        "status": "passed" if code == 0 else "failed",
        "why": None if code == 0 else why,
        "seconds": time.monotonic() - start,
        "report": found,
        "output": output.splitlines()[-_KEPT_LINES:],
    }


def _run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str, int | None]:
    """(output, exit code; None past the limit). What the command started ends with it: nothing holds on to the GPU."""
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


def command_of(part: str, *, cpu: bool, folder: Path) -> tuple[str | None, list[str], dict[str, str]]:
    """(why the part is left out, command, environment)."""
    python = [sys.executable]
    if missing := [package for package in NEEDS.get(part, ()) if not _installed(package)]:
        return f"{', '.join(missing)} not installed: this part was not run", [], {}
    if part in ("bench", "bench_experts"):
        sizes = {
            ("bench", True): ["shape=64x128", "m=1,17", "seconds=0.02"],
            ("bench", False): ["model=qwen3-8b", "layer=gate_up,down", "m=1,16,512,4096,16384", "seconds=0.1"],
            ("bench_experts", True): ["model=small", "m=3", "seconds=0.02", "rounds=1"],
            ("bench_experts", False): ["model=qwen3-30b-a3b", "m=16,4096", "seconds=0.05"],
        }[part, cpu]
        if part == "bench_experts":
            sizes.append("operation=grouped_linear,grouped_input_gradient,experts")
        device = "device=cpu" if cpu else "device=cuda"
        report = f"json={folder / 'report.json'}"
        return None, [*python, "-m", "qarl.bench", "kernels", device, *sizes, report], {}
    if part == "device_tests":
        if not _installed("pytest"):
            return "pytest is not installed: the device tests were not run (correctness covers the kernels)", [], {}
        pytest = [*python, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", "-o", "addopts="]
        if not _installed("pytest_timeout"):
            pytest += ["-o", "timeout="]
        if cpu:
            return None, [*pytest, "tests/kernels/triton_kernels/test_compat.py"], {"TRITON_INTERPRET": "1"}
        return None, [*pytest, "tests/gpu", "tests/kernels/triton_kernels"], {}
    if part == "end_to_end":
        model, data = folder / "model", folder / "data"
        make = [*python, "scripts/make_tiny_model.py", "--steps", "5", "--output", str(model), "--data", str(data)]
        files = [f"data.{part}_files={data}/{name}.parquet" for part, name in (("train", "train"), ("val", "test"))]
        train = [*python, "-m", "qarl.train", "config=quickstart.yaml", f"output_dir={folder}", "name=gpu_check",
                 f"model.path={model}", *files, "trainer.total_training_steps=2",
                 "trainer.val_before_train=false", "trainer.test_freq=-1"]  # fmt: skip
        return None, ["sh", "-c", f"{shlex.join(make)} && {shlex.join(train)}"], {}
    tried = cpu and part in ("first", "correctness") and _installed("triton")
    interpreted = {"TRITON_INTERPRET": "1"} if tried else {}
    return None, [*python, str(Path(__file__)), "--inside", part, *(["--cpu"] if cpu else [])], interpreted


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run_inside(part: str, *, cpu: bool) -> int:
    """The parts that are code of this file, in their own process; the exit code."""
    import torch

    device = torch.device("cpu" if cpu else "cuda:0")
    if not cpu and not torch.cuda.is_available():
        print("PyTorch sees no GPU; --cpu tries the script without one")
        return 1
    functions = {"environment": environment, "first": first, "correctness": correctness, "trainer": trainer}
    report, passed = functions[part](device)
    Path(os.environ["QARL_GPU_CHECK_REPORT"]).write_text(json.dumps(report))
    return 0 if passed else 1


def environment(device: Any) -> tuple[Any, bool]:
    """Device, versions, and for Qwen3-8B's layers the kernel of every scheme."""
    import torch

    from qarl.bench.report import commit, device_name, versions
    from qarl.bench.shapes import MODELS
    from qarl.errors import UserError
    from qarl.kernels.registry import LINEAR_KERNELS, choose_linear_kernel

    report: dict[str, Any] = {"device": device_name(device), "versions": versions(), "commit": commit()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report["capability"] = f"{properties.major}.{properties.minor}"
        report["memory_gib"] = round(properties.total_memory / 2**30, 1)
    kernels: dict[str, list[str]] = {}
    for scheme in LINEAR_KERNELS:
        for layer in MODELS["qwen3-8b"]:
            try:
                reason = choose_linear_kernel(scheme, device, (layer.n, layer.k), group_size=128).reason
            except UserError as error:
                reason = str(error)
            kernels.setdefault(f"{scheme}: {reason}", []).append(layer.name)
    report["linear_kernels"] = kernels
    print(json.dumps(report, indent=1))
    return report, True


def correctness(device: Any) -> tuple[Any, bool]:
    """Every kernel that can serve here, on shapes that divide tiles and shapes that do not."""
    report = [*_dense_checks(device), *_expert_checks(device)]
    worst: dict[str, float] = {}
    for entry in report:
        if not entry["good"]:
            print(f"FAILED {entry}")
        if "error" in entry:
            name = f"{entry['operation']} {entry['kernel']}"
            worst[name] = max(worst.get(name, 0.0), entry["error"])
    for name, error in worst.items():
        print(f"{name:60} largest relative RMS error {error:.2e}")
    print(f"{len(report)} checks")
    return report, all(entry["good"] for entry in report)


def _dense_checks(device: Any) -> Iterator[dict[str, Any]]:
    import torch

    from qarl.bench.arguments import Arguments
    from qarl.bench.competitors import BUILDERS, Layer

    small = device.type == "cpu"
    shapes = [(64, 96, 32), (128, 256, 128)] if small else [
        (2048, 1536, 128), (4096, 4096, 64), (384, 1024, 128), (200, 416, 32), (8960, 1536, 128), (64, 64, 32)
    ]  # fmt: skip
    rows = (1, 17) if small else (1, 3, 16, 33, 64, 200, 1024, 2500)
    for n, k, group_size in shapes:
        torch.manual_seed(n + k)
        weight = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
        layer = Layer(weight, Arguments(device=device.type, model=(), group_size=group_size), {})
        for operation, build in BUILDERS.items():
            for m in (0,) if operation == "quantize" else rows:
                keys = {"operation": operation, "shape": [m, n, k], "group_size": group_size}
                yield from _checks(keys, partial(build, layer, m))
        if layer.failures:
            print(f"not checked at {[n, k]}: {layer.failures}")


def _expert_checks(device: Any) -> Iterator[dict[str, Any]]:
    import torch

    from qarl.bench.arguments import Arguments
    from qarl.bench.grouped import BUILDERS, ROUTINGS, ExpertLayer
    from qarl.bench.shapes import Experts

    small = device.type == "cpu"
    shapes = [(Experts(32, 4, 2048, 768), 128), (Experts(6, 2, 96, 64), 32)]
    if small:
        shapes = [(Experts(3, 2, 32, 32), 32)]
    for shape, group_size in shapes:
        torch.manual_seed(0)
        layer = ExpertLayer(shape, Arguments(device=device.type, model=(), group_size=group_size), device)
        for (operation, build), m, routing in product(BUILDERS.items(), (3,) if small else (2, 1000), ROUTINGS):
            for part in ("layer",) if operation == "experts" else ("gate_up", "down"):
                keys = {"operation": f"{operation}, {routing}", "shape": [m, *shape], "group_size": group_size}
                yield from _checks(keys, partial(build, layer, part, m, routing))
        for name, why in layer.failures.items():
            scheme, _, kernel = name.partition(" ")
            if kernel:  # it said that it serves here, and then could not take the weights
                keys = {"operation": "prepare experts", "shape": list(shape), "group_size": group_size}
                yield keys | {"kernel": f"{scheme} {kernel}", "failed": why, "good": False}
            else:
                print(f"not checked with {shape}: {scheme}: {why}")


def _checks(keys: dict[str, Any], build: Callable[[], list[Any]]) -> Iterator[dict[str, Any]]:
    """An entry for every competitor, with its error or what it raised."""
    try:
        competitors = build()
    except Exception as error:
        yield keys | {"kernel": "none", "failed": repr(error), "good": False}
        return
    for competitor in competitors:
        entry = keys | {"kernel": competitor.name, "allowed": competitor.allowed}
        try:
            error = competitor.error()
        except Exception as raised:
            yield entry | {"failed": repr(raised), "good": False}
        else:
            yield entry | {"error": error, "good": error <= competitor.allowed}


def trainer(device: Any) -> tuple[Any, bool]:
    """A small random Qwen3 under every scheme: log-probs beside the reference kernels', finite gradients, seconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from qarl.kernels.registry import LINEAR_KERNELS
    from qarl.quant.linear import QuantLinear
    from qarl.quant.scheme import get_scheme
    from qarl.rollout.engine import RolloutBatch
    from qarl.trainer.batch import make_batch
    from qarl.trainer.policy import Policy

    size = 256 if device.type == "cpu" else 1024
    config = Qwen3Config(
        vocab_size=2048, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size // 4, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    length = 24 if device.type == "cpu" else 400
    rollout = RolloutBatch([[3, 4, 5]] * 4, [list(range(10, 10 + length))] * 4, [[-1.0] * length] * 4, ["stop"] * 4, 0)
    batch = make_batch(rollout, torch.zeros(4), torch.zeros(4), pad_token_id=0).to(device)
    report, passed = {}, True
    for scheme in LINEAR_KERNELS:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(device, torch.bfloat16)
        policy = Policy(model, get_scheme(scheme, 64 if size == 1024 else 32), ("lm_head",), align="model")
        entry: dict[str, Any] = {
            "level": policy.align,
            "attention": model.config._attn_implementation,
            "kernels": sorted({layer.kernel.name for layer in policy.quantized_layers().values()}),
        }
        seconds: dict[str, list[float]] = {"quantize": [], "forward": [], "backward": []}
        for _ in range(3):
            for layer in policy.quantized_layers().values():
                layer.invalidate()
            model.zero_grad()
            with _timed(seconds["quantize"], device):
                policy.requantize()
            with _timed(seconds["forward"], device):
                log_probs = policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
            with _timed(seconds["backward"], device):
                log_probs.sum().backward()
        entry["seconds"] = {phase: min(values) for phase, values in seconds.items()}
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.choice = _reference(scheme)
                module.invalidate()
        with torch.no_grad():
            kernels = {layer.kernel.name for layer in policy.quantized_layers().values()}
            assert kernels == {"reference"}, kernels
            reference = policy.response_log_probs(batch, slice(0, 4), temperature=1.0)
        entry["mean_difference_to_reference"] = float((log_probs.detach() - reference).abs().mean())
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        entry["passed"] = finite and entry["mean_difference_to_reference"] < 0.05
        passed = passed and entry["passed"]
        report[scheme] = entry
        print(f"{scheme}: {entry}")
    return report, passed


def _reference(scheme: str) -> Any:
    from qarl.kernels.registry import LINEAR_KERNELS, Choice

    return Choice(LINEAR_KERNELS[scheme][-1], ())


class _timed:
    """Seconds of a block, the GPU's work included, appended to a list."""

    def __init__(self, seconds: list[float], device: Any) -> None:
        self.seconds, self.device = seconds, device

    def __enter__(self) -> None:
        self._wait()
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self.start)

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def write(folder: Path, results: dict[str, Any], *, cpu: bool) -> None:
    """gpu_check_DATE.json and .md; cpu_check_... where it was a try on a CPU."""
    now = datetime.datetime.now(datetime.UTC)
    path = folder / f"{'cpu' if cpu else 'gpu'}_check_{now:%Y-%m-%d}"
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"date": now.isoformat(timespec="seconds"), "parts": results}
    lines = [f"`scripts/gpu_check.sh{' --cpu' if cpu else ''}`, {document['date']}", "",
             "| part | status | seconds | |", "|---|---|---|---|"]  # fmt: skip
    for part, result in results.items():
        lines.append(f"| {part} | {result['status']} | {result['seconds']:.0f} | {result.get('why') or ''} |")
    if measured := (results.get("bench") or {}).get("report"):
        found = verdicts(measured["results"])
        document["verdicts"] = [line._asdict() for line in found]
        said = "Of a CPU, to try the table: they mean nothing.\n\n" if cpu else ""
        lines += ["", "## verdicts", "", said + table(found)]
        print(table(found))
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for part, result in results.items():
        lines += ["", f"## {part}", ""]
        if part in ("bench", "bench_experts") and result.get("report"):
            from qarl.bench.report import tables

            lines.append(tables(result["report"]))
        else:
            lines += ["```", *result["output"][-60:], "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written to {path}.json and .md")


if __name__ == "__main__":
    sys.exit(main())
