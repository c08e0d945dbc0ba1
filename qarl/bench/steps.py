"""`qarl bench steps`, `trainer` and `publish`: their keys, their launches, their tables.

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
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from qarl.bench import report
from qarl.bench.arguments import Device, Schemes, as_json, check_device, check_divides, device_of
from qarl.bench.model import Source, default_group_size, find_model, write_model
from qarl.checkpoint.storage import write_json
from qarl.config.command_arguments import Commas, OutputFile, read_request
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names

LEVELS = ("off", "linears", "model", "exact")


class Case(NamedTuple):
    """The scheme, level and rank of adapters that a launch measures. For `publish`, `level` is empty."""

    scheme: str
    level: str
    lora_r: int = 0

    def __str__(self) -> str:
        level = f", level {self.level}" * bool(self.level)
        rank = f", r={self.lora_r}" * bool(self.lora_r)
        return self.scheme + level + rank


@dataclass(frozen=True, config={"extra": "forbid"})
class Arguments:
    """
    model            a name from qarl/bench/models, or a folder; by default SmolLM2-135M on a CPU, Qwen3-8B on a GPU
    layers           number of decoder layers to keep; all by default
    schemes          bf16,w8a8,fp8,w4a16; all ratios are relative to bf16
    levels           off,linears,model,exact; all but exact by default, which `model` is on a CPU; bf16 has no `linears`
    lora_r           0,32: ranks of adapters on a frozen base; 0, the default, trains all weights
    prompts, n       prompts per step, and responses per prompt
    prompt_length    number of random tokens in a prompt
    response_length  exact number of tokens in a response
    mini_batches     optimizer steps per training step
    micro_batch      sequences per forward and backward; all of a mini-batch by default
    launches         processes for each scheme and level; they take turns, and figures are medians over launches
    rounds           measured rounds per launch; the figure of a launch is their median
    warmup           rounds before the measured ones
    threads          number of threads on a CPU
    gpu_memory_utilization   the engine's share of a GPU's memory
    device           cuda or cpu; by default cuda if there is a GPU
    json             the file to write"""

    part: Literal["steps", "trainer", "publish"]
    device: Device
    model: str
    layers: PositiveInt | None = None
    schemes: Schemes = engine_scheme_names()
    levels: Annotated[tuple[Literal[*LEVELS], ...], Commas] = LEVELS[:3]  # type: ignore[valid-type]  # not written out
    lora_r: Annotated[tuple[NonNegativeInt, ...], Commas] = (0,)
    prompts: PositiveInt = 8
    n: PositiveInt = 4
    prompt_length: PositiveInt = 8
    response_length: Annotated[int, Field(ge=2)] = 16  # the first token comes from the prefill
    mini_batches: PositiveInt = 1
    micro_batch: PositiveInt | None = None
    launches: PositiveInt = 3
    rounds: PositiveInt = 1
    warmup: PositiveInt = 2
    threads: PositiveInt = 1
    gpu_memory_utilization: PositiveFloat = 0.5
    json: OutputFile | None = None

    @classmethod
    def parse(cls, part: str, words: Sequence[str]) -> Arguments:
        """Read the arguments. Raise UserError if one is invalid, or if they do not fit together."""
        device = device_of(words)
        defaults: dict[str, Any] = {"part": part, "device": device}
        defaults["model"] = "SmolLM2-135M" if device == "cpu" else "Qwen3-8B"
        arguments = read_request(
            cls, words, example=f"qarl bench {part} device={device}", **defaults
        )
        _check(arguments)
        return arguments

    @property
    def source(self) -> Source:
        return find_model(self.model)

    @property
    def depth(self) -> int:
        return self.layers or self.source.size.layers

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def micro_batch_size(self) -> int:
        return self.micro_batch or self.sequences // self.mini_batches

    def cases(self) -> list[Case]:
        """Return the cases in order, BF16 first. BF16 has no case `linears`, which would be the same as `off`. Adapters
        have no case `off` of a quantized base, which QaRL refuses."""
        schemes = sorted(set(self.schemes), key=engine_scheme_names().index)
        if self.part == "publish":
            return [Case(scheme, "") for scheme in schemes]
        levels = sorted(set(self.levels), key=LEVELS.index)
        ranks = sorted(set(self.lora_r))
        missing = {("bf16", "linears", rank) for rank in ranks}
        missing |= {
            (scheme, "off", rank)
            for scheme in schemes
            for rank in ranks
            if scheme != "bf16" and rank
        }
        return [Case(*case) for case in product(schemes, levels, ranks) if case not in missing]


def _check(arguments: Arguments) -> None:
    source = arguments.source
    where = f"qarl.bench {arguments.part}"
    if arguments.depth > source.size.layers:
        raise UserError(
            f"layers={arguments.layers}, but {source.name} has only {source.size.layers}",
            where=where,
        )
    positions = source.config.get("max_position_embeddings")
    wanted = arguments.prompt_length + arguments.response_length
    if positions and wanted > positions:
        what = f"prompt_length + response_length = {wanted}, but the model has only {positions} positions"
        raise UserError(what, where=where)
    check_divides(arguments, "mini_batches", "prompts")
    if arguments.part == "publish" and any(arguments.lora_r):
        why = "its parts are those of a publish of all weights"
        raise UserError(
            "publish has no adapters",
            where=where,
            why=why,
            fix="run steps, which publishes them, too",
        )
    if source.size.experts:
        raise UserError(
            f"{source.name} is a mixture of experts", where=where, why="this benchmark supports only dense models",
            fix=f"run kernels model={source.name} for its layers, or plan model={source.name} for a step",
        )  # fmt: skip


KEYS = Arguments


WORKLOAD = (
    *("prompts", "n", "prompt_length", "response_length", "sequences"),
    *("mini_batches", "micro_batch_size", "threads"),
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
            "level": case.level or None,
            "level_applied": launched["level_applied"],
        }
        about |= {"lora_r": case.lora_r} if case.lora_r else {}
        about |= {"kernels": launched["kernels"], "layers": self.arguments.depth}
        result = self.results.setdefault(case, about | {"phases": {}, "peak_bytes": {"step": 0}})
        for name in launched["rounds"][0]:
            samples = result["phases"].setdefault(name, {"samples": []})["samples"]
            samples.append([phases[name] for phases in launched["rounds"]])
            result["phases"][name] |= report.summary(samples)
        result["peak_bytes"]["step"] = max(result["peak_bytes"]["step"], launched["peak_bytes"])

    def document(self) -> dict[str, Any]:
        import torch

        arguments = self.arguments
        source = arguments.source
        device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
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
                "group_size": default_group_size(source.size),
            },
            "results": [self.results[case] for case in arguments.cases() if case in self.results],
            "failures": self.failures,
        }


def launch(arguments: Arguments, case: Case, folder: Path) -> dict[str, Any]:
    """Run one process and return its answer, which is {"error": text} if it could not be measured or was wrong.
    The process has always ended when this function returns or raises, even on Ctrl-C, which only this process gets."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "launch"
        path.write_bytes(pickle.dumps((arguments, case, str(folder))))
        command = [sys.executable, "-m", "qarl.bench.measured_process", str(path)]
        if code := subprocess.run(command, start_new_session=True, check=False).returncode:
            return {"error": f"its process ended with exit code {code}"}
        return pickle.loads(path.read_bytes())
