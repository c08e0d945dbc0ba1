"""The first session on a GPU: everything that needs one, in the order of what is most likely to break.

    scripts/gpu_check.sh                    the first parts, within nine minutes
    scripts/gpu_check.sh --parts second     the other schemes, levels, kernels and figures
    scripts/gpu_check.sh --parts NAME,NAME  some parts
    scripts/gpu_check.sh --cpu              a rehearsal on a CPU: small sizes; what needs a GPU is skipped
    scripts/gpu_check.sh --readme           write the GPU column of README.md from the results, and run nothing

Each part is a process with a limit on its time: one that fails or hangs takes none of the others with it. Stop the
script at any point. All lines that were printed are in benchmarks/results/gpu_check_DATE.log, and after each part
gpu_check_DATE.json and .md are written. The next call on the same day skips the parts that have passed and runs those
that failed last; --again repeats all. A part for which no time is left keeps its earlier result. Exit code: 0 all parts
passed, or were skipped for a reason that is written down; 1 some failed; 130 stopped.
A missed bound is not a failure. No network.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_verdicts import verdicts

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 520
LEAST_SECONDS = 5
KEPT_LINES = 400
PR_SET_PDEATHSIG = 1
NO_GPU = "needs a GPU"
NO_TIME = "no time was left; the next call runs it"


class Part(NamedTuple):
    """`seconds`: the most that it may take. `gpu`, `cpu`: arguments of Python, or of a shell for `train`; None if the
    part cannot run there. `needs`: packages without which it is skipped. {folder} and {report} are filled in."""

    name: str
    seconds: int
    gpu: str
    cpu: str | None
    needs: tuple[str, ...] = ()


_PYTEST = "-m pytest -q -rPs -p no:cacheprovider -o addopts= "
_TESTED = ("compressed_tensors", "pydantic", "pytest", "yaml")
_TRAINED = ("compressed_tensors", "pydantic", "transformers", "vllm", "yaml")
_STEPS = "-m qarl.bench steps json={report} launches=1 model=Qwen3-0.6B prompts=8 n=8 prompt_length=128 "
_MODEL = "scripts/make_tiny_model.py --steps 5 --output {folder}/model --data {folder}/data"


def training(scheme: str, level: str, eager: bool, kernels: str = "engine") -> str:
    """Two steps of the quickstart from a model that is hardly trained: two publishes, and log-probs compared."""
    files = " ".join(
        f"data.{name}_files={{folder}}/data/{file}.parquet" for name, file in (("train", "train"), ("val", "test"))
    )
    return (
        f"-m qarl.train config=quickstart.yaml output_dir={{folder}} name=run model.path={{folder}}/model {files} "
        f"quant.scheme={scheme} quant.align={level} quant.kernels={kernels} rollout.enforce_eager={str(eager).lower()} "
        "trainer.total_training_steps=2 trainer.val_before_train=false trainer.test_freq=-1"
    )


def trained(
    name: str, scheme: str, level: str, *, eager: bool, seconds: int, on_cpu: bool = False, kernels: str = "engine"
) -> Part:
    command = training(scheme, level, eager, kernels)
    return Part(name, seconds, command, command if on_cpu else None, _TRAINED)


FIRST = (
    Part("environment", 45, "scripts/gpu_check.py --facts", "scripts/gpu_check.py --facts --cpu"),
    Part(
        "operators", 150,
        f"{_PYTEST} tests/gpu/test_first_cuda.py tests/gpu/test_align_cuda.py tests/gpu/test_vllm_kernels_cuda.py "
        "tests/gpu/test_trainer_cuda.py tests/gpu/test_publish_cuda.py",
        f"{_PYTEST} tests/gpu/test_first_cuda.py", _TESTED,
    ),
    trained("eager", "w4a16", "linears", eager=True, seconds=90, on_cpu=True),
    trained("graphs", "w4a16", "linears", eager=False, seconds=110),
    trained("graphs_w8a8_model", "w8a8", "model", eager=False, seconds=110),
    Part(
        "bench", 120,
        "-m qarl.bench kernels model=Qwen3-8B layer=gate_up,down m=1,16,512,4096,16384 seconds=0.1 device=cuda "
        "json={report}",
        "-m qarl.bench kernels shape=64x128 m=1,17 seconds=0.02 device=cpu json={report}",
    ),
    Part(
        "tuning", 60, "scripts/tune_triton.py --operations w4a16 --minutes 0.7 --output {report}",
        "scripts/tune_triton.py --operations w4a16 --dry-run",
    ),
    Part(
        "steps", 150, f"{_STEPS} response_length=256 schemes=w4a16 levels=linears,model rounds=3 warmup=1 device=cuda",
        None, _TRAINED,
    ),
)  # fmt: skip
"""In the order of what is most likely to break. Nothing behind `eager` says anything if `eager` fails."""
SECOND = (
    *(trained(f"{scheme}_{level}", scheme, level, eager=False, seconds=110)
      for scheme, level in (("w8a8", "linears"), ("fp8", "linears"), ("fp8", "model"), ("w4a16", "model"),
                            ("w4a16", "off"), ("bf16", "off"), ("bf16", "model"))),
    *(trained(f"{scheme}_qarl", scheme, "model", eager=False, seconds=110, kernels="qarl")
      for scheme in ("w4a16", "fp8", "w8a8")),
    Part("verl", 300, f"{training('w4a16', 'linears', False)} backend=verl", None, (*_TRAINED, "verl", "ray")),
    Part("experts", 150, f"{_PYTEST} tests/gpu/test_experts_cuda.py", None, _TESTED),
    Part("triton", 250, f"{_PYTEST} tests/kernels/triton_kernels",
         f"{_PYTEST} tests/kernels/triton_kernels/test_compat.py", _TESTED),
    Part("all_steps", 400, f"{_STEPS} response_length=256 levels=off,linears,model rounds=1 warmup=1 device=cuda",
         None, _TRAINED),
    Part(
        "trainer", 150,
        "-m qarl.bench trainer model=Qwen3-0.6B layers=8 levels=linears launches=1 rounds=3 prompts=8 n=8 "
        "prompt_length=256 response_length=512 micro_batch=16 device=cuda json={report}",
        "-m qarl.bench trainer layers=1 schemes=w8a8 levels=linears launches=1 prompts=2 response_length=4 device=cpu "
        "json={report}", _TRAINED[:-2],
    ),
    Part("publish", 120, "-m qarl.bench publish model=Qwen3-0.6B launches=1 device=cuda json={report}", None, _TRAINED),
    Part(
        "bench_experts", 80,
        "-m qarl.bench kernels model=Qwen3-30B-A3B m=16,4096 seconds=0.05 device=cuda json={report} "
        "operation=grouped_linear,grouped_input_gradient,experts",
        "-m qarl.bench kernels experts=8,2,256,128 m=3 seconds=0.02 rounds=1 device=cpu json={report}",
    ),
)  # fmt: skip
PARTS = {part.name: part for part in (*FIRST, *SECOND)}
GROUPS = {"first": FIRST, "second": SECOND, "all": (*FIRST, *SECOND)}
Result = dict[str, Any]


STOP = threading.Event()
"""Set if somebody asks the script to stop. Its process then ends, and every line that it printed is still read."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a rehearsal with small sizes on the CPU")
    parser.add_argument("--parts", default="first", help="first, second, all, or names with commas")
    parser.add_argument("--again", action="store_true", help="repeat parts that have passed today")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--readme", action="store_true", help="write README.md's GPU column from the newest results")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.facts:
        return facts(cpu=args.cpu)
    if args.readme:
        return write_readme(args.output, ROOT / "README.md")
    names = [p.name for p in GROUPS[args.parts]] if args.parts in GROUPS else args.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, first, second and all")
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: STOP.set())
    return Session(args.output, cpu=args.cpu).run([PARTS[name] for name in names], again=args.again)


class Session:
    """Runs parts and keeps their results in `path`.json, .md and .log."""

    def __init__(self, folder: Path, *, cpu: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cpu = cpu
        self.path = folder / f"{'cpu' if cpu else 'gpu'}_check_{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        found = self.path.with_suffix(".json")
        self.results: dict[str, Result] = json.loads(found.read_text())["parts"] if found.is_file() else {}

    def run(self, parts: Sequence[Part], *, again: bool) -> int:
        """Run the parts in order, those that failed before last; the exit code."""
        started, slower = time.monotonic(), 3 if self.cpu else 1  # a CPU may be shared
        code = 0
        with self.path.with_suffix(".log").open("a", encoding="utf-8") as self.log, \
                tempfile.TemporaryDirectory() as folder:  # fmt: skip
            for part in sorted(parts, key=lambda part: self.status(part) == "failed"):
                if self.status(part) == "passed" and not again:
                    self.say(f"== {part.name}: passed before ({self.results[part.name]['commit']})")
                    continue
                left = TOTAL_SECONDS * slower - (time.monotonic() - started)
                self.take(part, Path(folder), part.seconds * slower, left)
                self.write()
                if STOP.is_set():
                    self.say(f"== stopped in {part.name}; the parts before it are kept")
                    code = 130
                    break
            if "bench" in self.results:
                self.say(verdict_table(self.results["bench"], cpu=self.cpu))
            self.say(f"results: {self.path}.json, .md and .log")
        return code or int(any(self.status(part) == "failed" for part in parts))

    def status(self, part: Part) -> str | None:
        return self.results.get(part.name, {}).get("status")

    def take(self, part: Part, folder: Path, limit: float, left: float) -> None:
        """Run one part and store its result. What it has printed is stored, too, if it is stopped.

        limit: its own limit in seconds. left: seconds until the limit of all parts.
        """
        self.say(f"== {part.name}")
        earlier, seconds = self.results.get(part.name), min(limit, left)
        result: Result = {"status": "failed", "why": None, "seconds": 0.0, "commit": commit(), "output": []}
        self.results[part.name] = result
        command = part.cpu if self.cpu else part.gpu
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        if command is None or missing:
            why = f"{', '.join(missing)} not installed" if missing else NO_GPU
            result.update(status="skipped", why=why)
        elif seconds < LEAST_SECONDS:
            result.update(status="skipped", why=NO_TIME)
        else:
            result.update(status="stopped", why="the script was stopped in this part")
            self.write()  # a process that is killed has no later chance
            start, report = time.monotonic(), folder / f"{part.name}.json"
            code = self.process(command, folder, report, seconds, result["output"])
            del result["output"][:-KEPT_LINES]
            result.update(seconds=time.monotonic() - start, report=read_report(part, folder, report))
            if not STOP.is_set() and code is None and left < limit:
                result.update(status="skipped", why=NO_TIME)
            elif not STOP.is_set():
                why = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
                result.update(status="passed" if code == 0 else "failed", why=None if code == 0 else why)
        if earlier and earlier["status"] != "skipped" and result["why"] == NO_TIME:
            self.results[part.name] = earlier
            return self.say(f"== {part.name}: no time was left; it {earlier['status']} before ({earlier['commit']})")
        self.say(f"== {part.name}: {result['status']} ({result['seconds']:.0f} s) {result['why'] or ''}")

    def process(self, command: str, folder: Path, report: Path, seconds: float, output: list[str]) -> int | None:
        """The exit code, or None past the limit. Lines are appended to `output` and the log as they come."""
        environment = os.environ | {"QARL_GPU_CHECK_REPORT": str(report), "PYTHONUNBUFFERED": "1"}
        if self.cpu and "pytest" in command:
            environment["TRITON_INTERPRET"] = "1"
        filled = command.format(folder=shlex.quote(str(folder)), report=shlex.quote(str(report)))
        python, before = shlex.quote(sys.executable), ""
        if "{folder}/model" in command:
            before = f"{python} {_MODEL.format(folder=shlex.quote(str(folder)))} && "
        return run(
            ["sh", "-c", f"{before}exec {python} {filled}"], environment, seconds, lambda line: self.keep(line, output)
        )

    def keep(self, line: str, output: list[str]) -> None:
        output.append(line)
        self.say(line)

    def say(self, line: str) -> None:
        self.log.write(line + "\n")
        self.log.flush()
        with contextlib.suppress(OSError):  # the terminal is gone
            print(line, flush=True)

    def write(self) -> None:
        """Write the .json and .md whole, so that a reader never finds half a file."""
        document = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "parts": self.results}
        for suffix, text in ((".json", json.dumps(document, indent=1) + "\n"), (".md", markdown(document, self.cpu))):
            new = self.path.with_name(self.path.name + suffix + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(self.path.with_suffix(suffix))


def run(command: list[str], environment: dict[str, str], seconds: float, keep: Callable[[str], None]) -> int | None:
    """The exit code, or None past the limit. Whatever the command started ends with it: the GPU is free again.

    If this script is killed, Linux kills the command's process, but not what that has started.
    """
    parent, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before prctl
            os._exit(1)

    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, preexec_fn=die_with_parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    late, finished, deadline = threading.Event(), threading.Event(), time.monotonic() + seconds

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        while not finished.wait(0.05):
            if STOP.is_set() or time.monotonic() > deadline:
                late.set()
                return end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            keep(line.rstrip("\n"))
        code = process.wait()
        return None if late.is_set() else code
    finally:
        finished.set()
        end()
        process.wait()


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return "unknown"


def read_report(part: Part, folder: Path, report: Path) -> Any:
    """The part's own JSON, or the measurements of each training step."""
    metrics = folder / "run" / "metrics.jsonl"
    if report.is_file():
        return json.loads(report.read_text())
    if "qarl.train" not in part.gpu or not metrics.is_file():
        return None
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.parent.rename(folder / f"{part.name}_run")  # the next part trains in the same folder
    kept = re.compile(r"mismatch/|publish/|timing|_s$|step$|quant_align")
    return {"steps": [{key: value for key, value in step.items() if kept.search(key)} for step in steps]}


def facts(*, cpu: bool) -> int:
    """Device, versions, and for Qwen3-8B's layers the kernel of every scheme; the exit code."""
    import torch

    from qarl.bench.report import facts as known_facts
    from qarl.bench.sources import find_model, linear_shapes
    from qarl.errors import UserError
    from qarl.kernels.registry import LINEAR_KERNELS, choose_linear_kernel

    device = torch.device("cpu" if cpu else "cuda:0")
    if not cpu and not torch.cuda.is_available():
        print("PyTorch sees no GPU; --cpu tries the script without one")
        return 1
    report = known_facts(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report["capability"] = f"{properties.major}.{properties.minor}"
        report["memory_gib"] = round(properties.total_memory / 2**30, 1)
        report["multiprocessors"] = properties.multi_processor_count
        report["shared_memory_kib"] = getattr(properties, "shared_memory_per_block_optin", 0) // 1024
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            report["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        report["attention"] = layer_facts()
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


def layer_facts() -> dict[str, Any]:
    """What level `model` needs: FlashAttention's version, and the reason if an operator cannot be called."""
    import torch

    from qarl.kernels.cuda import flash, layer_ops

    found = {"operators": layer_ops.unavailable(), "level": flash.unavailable(torch.cuda.get_device_capability())}
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return found | {"flash_attention": get_flash_attn_version()}
    except Exception as error:
        return found | {"flash_attention": f"{type(error).__name__}: {error}"}


def verdict_table(result: Result, *, cpu: bool) -> str:
    if not result.get("report"):
        return "no verdicts: the kernels were not measured"
    said = "On a CPU, to try the table: they mean nothing.\n\n" if cpu else ""
    rows = [f"| {' | '.join(line)} |" for line in verdicts(result["report"]["results"])]
    return said + "\n".join(["| bound | shape | found | |", "|---|---|---|---|", *rows])


def markdown(document: dict[str, Any], cpu: bool) -> str:
    """All results, as a page."""
    results = document["parts"]
    lines = [f"`scripts/gpu_check.sh{' --cpu' if cpu else ''}`, {document['date']}", "",
             "| part | status | seconds | commit | |", "|---|---|---|---|---|"]  # fmt: skip
    for name, found in results.items():
        lines.append(
            f"| {name} | {found['status']} | {found['seconds']:.0f} | {found['commit']} | {found['why'] or ''} |"
        )
    if "bench" in results:
        lines += ["", "## verdicts", "", verdict_table(results["bench"], cpu=cpu)]
    if cells := {} if cpu else readme_cells(results):
        lines += ["", "## README", "", *(f"| `{scheme}` | {cell} |" for scheme, cell in cells.items())]
    for name, found in results.items():
        lines += ["", f"## {name}", "", *tables(name, found)]
    return "\n".join(lines) + "\n"


def tables(name: str, result: Result) -> list[str]:
    """Tables of a benchmark, δ of a training run, else the last lines of output."""
    report, command = result.get("report"), PARTS[name].gpu if name in PARTS else ""
    if report and "qarl.bench" in command:
        from qarl.bench.kernels import tables as kernels
        from qarl.bench.steps import tables as steps

        return [(kernels if "bench kernels" in command else steps).markdown(report)]
    lines = ["```", *result["output"][-60:], "```"]
    if report and "steps" in report:
        head = ["| step | mean abs δ | largest abs δ |", "|---|---|---|"]
        found = [
            [step.get(f"mismatch/abs_{name}", float("nan")) for name in ("mean", "max")] for step in report["steps"]
        ]
        rows = [f"| {i} | {mean:.2g} | {largest:.2g} |" for i, (mean, largest) in enumerate(found)]
        return [*head, *rows, "", *lines]
    return lines


TRAINING = {
    "w4a16": ("eager", "graphs", "w4a16_model", "w4a16_off", "w4a16_qarl"),
    "w8a8": ("graphs_w8a8_model", "w8a8_linears", "w8a8_qarl"),
    "fp8": ("fp8_linears", "fp8_model", "fp8_qarl"),
    "bf16": ("bf16_off", "bf16_model"),
}
"""Scheme -> the parts that train with it."""


def readme_cells(results: dict[str, Result]) -> dict[str, str]:
    """The GPU column of README's status table, for each scheme that a GPU has trained with."""
    passed = {name for name, found in results.items() if found["status"] == "passed"}
    measured: set[str] = set()
    for name in ("steps", "all_steps"):
        if name in passed:
            measured |= {entry["scheme"] for entry in results[name]["report"]["results"]}
    return {
        scheme: "measured, local backend" if scheme in measured else "tested, local backend"
        for scheme, parts in TRAINING.items()
        if passed & set(parts)
    }


def write_readme(folder: Path, page: Path) -> int:
    """Write the cells of the newest results into the status table; the exit code."""
    found = sorted(folder.glob("gpu_check_*.json"))
    if not found:
        print(f"there is no gpu_check_*.json in {folder}")
        return 1
    cells = readme_cells(json.loads(found[-1].read_text())["parts"])
    text = page.read_text(encoding="utf-8")
    for scheme, cell in cells.items():
        text = re.sub(rf"(?m)^(\| `{scheme}` \|.*\| )[^|]*\|$", rf"\g<1>{cell} |", text)
    page.write_text(text, encoding="utf-8")
    print(f"{found[-1].name}: {', '.join(cells) or 'no scheme'} written to {page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
