"""Run all launches. A case is a scheme at a level. A turn launches every case once, and there are `launches` turns.

Because cases take turns, a change in the machine's speed affects all of them equally. Each turn starts with a different
case. A launch is a process, and only one runs at a time. If a case fails or has wrong numbers
(`qarl.bench.steps.check`) in any launch, it gets no figures, and the exit code is 1. The file is written after every
launch, so Ctrl-C loses only the current launch.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from qarl.bench import report
from qarl.bench.arguments import as_json, check_device
from qarl.bench.sources import write_model
from qarl.bench.steps import tables
from qarl.bench.steps.arguments import Arguments, Case
from qarl.bench.steps.launch import answer
from qarl.bench.steps.setup import config_of
from qarl.checkpoint.json_file import write_json

WORKLOAD = ("prompts", "n", "prompt_length", "sequences", "mini_batches", "micro_batch_size", "threads", "master_dtype")


class LaunchFailed(Exception):
    """A launch could not be measured, or its numbers are wrong."""


def run(arguments: Arguments) -> int:
    """Measure, write, print, and return the exit code."""
    check_device(arguments.device)
    for case in arguments.cases():
        config_of(arguments, case, "model")  # so that an invalid config is rejected before any work
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(arguments.source, arguments.depth, Path(folder) / "model")
        measured = Measured(arguments, parameters)
        interrupted = measured.take(Path(folder) / "model")
    if not measured.results and interrupted:
        raise KeyboardInterrupt
    print(tables.markdown(measured.document()))
    for name, why in measured.failures.items():
        print(f"no figures: {name}: {why}", file=sys.stderr)
    if interrupted:
        print("interrupted: the figures are those of the finished launches", file=sys.stderr)
        return 130
    return 1 if measured.failures else 0


class Measured:
    """`results`: for each case, batch and length, the samples of all launches, one list of rounds per launch."""

    def __init__(self, arguments: Arguments, parameters: int) -> None:
        self.arguments, self.parameters = arguments, parameters
        self.results: dict[tuple[Case, tuple[int, int]], dict[str, Any]] = {}
        self.failures: dict[str, str] = {}

    def take(self, folder: Path) -> bool:
        """Run all launches. Return whether they were interrupted."""
        cases, launches = self.arguments.cases(), self.arguments.launches
        try:
            for number in range(launches):
                for case in turned(cases, number):
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
        try:
            self._keep(case, launch(self.arguments, case, folder))
        except LaunchFailed as error:
            self.failures[str(case)] = str(error)
            self.results = {key: result for key, result in self.results.items() if key[0] != case}

    def _keep(self, case: Case, found: dict[str, Any]) -> None:
        for key in found["rounds"][0]:
            result = self.results.setdefault(
                (case, key),
                {
                    "scheme": case.scheme,
                    "level": case.level or None,
                    **{name: found[name] for name in ("level_applied", "kernels", "keeps_freed_memory")},
                    "layers": self.arguments.depth,
                    **({"batch": key[0], "response_length": key[1]} if key[0] else {}),
                    "phases": {},
                    "peak_bytes": {"step": 0},
                },
            )
            for name in found["rounds"][0][key]:
                samples = result["phases"].setdefault(name, {"samples": []})["samples"]
                samples.append([one[key][name] for one in found["rounds"]])
                result["phases"][name] |= tables.summary(samples)
            result["peak_bytes"]["step"] = max(result["peak_bytes"]["step"], found["peak_bytes"])

    def document(self) -> dict[str, Any]:
        arguments = self.arguments
        source = arguments.source
        device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        order = [(case, key) for case in arguments.cases() for one, key in self.results if one == case]
        return report.facts(device) | {
            "kind": arguments.part,
            "arguments": as_json(arguments) | {"model": source.name},
            "model": {
                "name": source.name,
                "weights": "random" if source.folder is None else "of the folder",
                "parameters": [self.parameters],
                "layers": [arguments.depth],
                **{key: value for key, value in source.config.items() if key[0] != "_"},
            },
            "workload": {
                **{name: getattr(arguments, name) for name in WORKLOAD},
                "response_length": arguments.response_length[0],
                "group_size": arguments.weight_group,
            },
            "results": [self.results[key] for key in order],
            "failures": self.failures,
        }


def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
    """Run one process and return its answer, or raise LaunchFailed if it sends none.
    The process has always ended when this function returns or raises, even on Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, arguments, case, str(folder)))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, so the child ignores Ctrl-C; we end it
    process.start()
    signal.signal(signal.SIGINT, handler)
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
        process.join(20)
    except (EOFError, OSError) as error:
        process.join()
        raise LaunchFailed(f"its process ended with exit code {process.exitcode}") from error
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
    if "error" in found:
        raise LaunchFailed(found["error"])
    return found


def turned(cases: list[Case], number: int) -> list[Case]:
    """Rotate `cases` so that each turn starts with a different case."""
    start = number % max(len(cases), 1)
    return cases[start:] + cases[:start]
