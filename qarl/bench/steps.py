"""`qarl bench steps`, `trainer` and `publish`: their launches and their tables.

python -m qarl.bench steps                                  all schemes; on a CPU with a model of 135M parameters
python -m qarl.bench steps model=Qwen3-8B layers=4 schemes=bf16,fp8 json=FILE.json
python -m qarl.bench trainer                                old log-probs and update, without an engine
python -m qarl.bench trainer schemes=bf16,w4a16 levels=model lora_r=0,32    adapters beside all weights
python -m qarl.bench publish                                quantize and publish, part by part

A case is a scheme at a level, with adapters of a rank or without. A turn launches every case once, and there are
`launches` turns. Because cases take turns, a change in the machine's speed affects all of them equally. Each turn
starts with a different case. A launch is a process, and only one runs at a time. If a case fails or has wrong numbers
in any launch, it gets no figures, and the exit code is 1. The file is written after every launch, so Ctrl-C loses only
the current launch.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qarl.bench import report
from qarl.bench.arguments import as_json, check_device
from qarl.bench.model import default_group_size, write_model
from qarl.bench.step_arguments import Arguments, Case
from qarl.checkpoint.storage import write_json

KEYS = Arguments
WORKLOAD = (
    "prompts",
    "n",
    "prompt_length",
    "response_length",
    "sequences",
    "mini_batches",
    "micro_batch_size",
    "threads",
)


def run(arguments: Arguments) -> int:
    """Measure, write, print, and return the exit code."""
    from qarl.bench.measured_process import config_of

    check_device(arguments.device)
    for case in arguments.cases():
        config_of(arguments, case, "model")  # so that an invalid config is rejected before any work
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(arguments.source, arguments.depth, Path(folder) / "model")
        measured = Measured(arguments, parameters)
        interrupted = measured.take(Path(folder) / "model")
    print(report.step_tables(measured.document()))
    for name, why in measured.failures.items():
        print(f"no figures: {name}: {why}", file=sys.stderr)
    if interrupted:
        print("interrupted: the figures are those of the finished launches", file=sys.stderr)
        return 130
    return 1 if measured.failures else 0


class Measured:
    """`results`: for each case, the samples of all launches, one list of rounds per launch."""

    def __init__(self, arguments: Arguments, parameters: int) -> None:
        self.arguments = arguments
        self.parameters = parameters
        self.results: dict[Case, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}

    def take(self, folder: Path) -> bool:
        """Run all launches. Return whether they were interrupted."""
        cases = self.arguments.cases()
        launches = self.arguments.launches
        try:
            for number in range(launches):
                start = number % len(cases)  # each turn starts with a different case
                for case in cases[start:] + cases[:start]:
                    if str(case) in self.failures:
                        continue
                    print(f"launch {number + 1} of {launches}: {case}", file=sys.stderr, flush=True)
                    self._launch(case, folder)
                    if self.arguments.json:
                        write_json(self.arguments.json, self.document())
        except KeyboardInterrupt:
            return True
        return False

    def _launch(self, case: Case, folder: Path) -> None:
        launched = launch(self.arguments, case, folder)
        if "error" in launched:
            self.failures[str(case)] = launched["error"]
            self.results.pop(case, None)
            return
        about = {
            "scheme": case.scheme,
            "level": case.level,
            "level_applied": launched["level_applied"],
        }
        if case.lora_r:
            about["lora_r"] = case.lora_r
        about |= {"kernels": launched["kernels"], "layers": self.arguments.depth}
        about |= {"phases": {}, "peak_bytes": {"step": 0}}
        result = self.results.setdefault(case, about)
        for name in launched["rounds"][0]:
            phase = result["phases"].setdefault(name, {"samples": []})
            phase["samples"].append([phases[name] for phases in launched["rounds"]])
            phase |= report.summary(phase["samples"])
        peak = result["peak_bytes"]
        peak["step"] = max(peak["step"], launched["peak_bytes"])

    def document(self) -> dict[str, Any]:
        import torch

        arguments = self.arguments
        source = arguments.source
        device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        model: dict[str, Any] = {"name": source.name}
        model["weights"] = "random" if source.folder is None else "of the folder"
        model["parameters"] = [self.parameters]
        model["layers"] = [arguments.depth]
        model |= {key: value for key, value in source.config.items() if key[0] != "_"}
        workload = {name: getattr(arguments, name) for name in WORKLOAD}
        workload["group_size"] = default_group_size(source.size)
        finished = [case for case in arguments.cases() if case in self.results]
        return report.facts(device) | {
            "kind": arguments.part,
            "arguments": as_json(arguments) | {"model": source.name},
            "model": model,
            "workload": workload,
            "results": [self.results[case] for case in finished],
            "failures": self.failures,
        }


def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
    """Run one process and return its answer, which is {"error": text} if it could not be measured or was wrong.
    The process has always ended when this function returns or raises, even on Ctrl-C, which only this process gets."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "launch"
        path.write_bytes(pickle.dumps((arguments, case, str(folder))))
        command = [sys.executable, "-m", "qarl.bench.measured_process", str(path)]
        code = subprocess.run(command, start_new_session=True, check=False).returncode
        if code:
            return {"error": f"its process ended with exit code {code}"}
        return pickle.loads(path.read_bytes())
