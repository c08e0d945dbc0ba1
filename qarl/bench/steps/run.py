"""`python -m qarl.bench steps | rollout | trainer | publish`: the phases of a training step, per scheme and level.

    python -m qarl.bench steps                                     all schemes; on a CPU a model of 135M parameters
    python -m qarl.bench steps model=Qwen3-8B layers=2,4 schemes=bf16,fp8 json=FILE.json plot=FILE.png
    python -m qarl.bench rollout batch=1,16,64 response_length=32,128
    python -m qarl.bench trainer                                   old log-probs and update, without an engine
    python -m qarl.bench publish                                   quantize and publish, part by part

Keys: `qarl.bench.steps.arguments.Arguments`. What is timed is the local trainer and its engine themselves
(`qarl.bench.steps.trainer`), every scheme in a process of its own (`qarl.bench.steps.worker`). A round takes one step
of every scheme and level in turn, each round from another one on, so that a machine whose speed drifts slows all alike
and none is always the first; ratios to BF16 are taken round by round. `launches=N` starts all processes anew N times.
A scheme at a level that fails a check (`qarl.bench.steps.checks`) in any round gets no figures, the reason is printed,
and the exit code is 1.

The base of all ratios is `bf16` at `off`: plain BF16 in rollout and trainer.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from qarl.bench import report
from qarl.bench.steps import tables
from qarl.bench.steps.arguments import Arguments
from qarl.bench.steps.checks import problems
from qarl.bench.steps.models import write_model
from qarl.bench.steps.results import Key, results
from qarl.bench.steps.worker import serve
from qarl.errors import UserError
from qarl.kernels.logprob import LOGITS_AT_A_TIME

BYTES_PER_PARAMETER = {"steps": 26, "trainer": 24, "rollout": 10, "publish": 10}
"""Of one process on a CPU, roughly: weights, masters, moments, gradients, the engine's and the kernels' copies."""
LOGIT_BYTES = {"steps": 12, "trainer": 12}
"""Of each logit of a micro-batch: in BF16 and FP32, with their gradients."""
PROCESS_BYTES = 2**30


class WorkerFailed(Exception):
    """A scheme's process could not do what it was told."""


class Worker:
    """The parent's end of a scheme's process."""

    def __init__(self, arguments: Arguments, scheme: str, layers: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, arguments, scheme, layers, str(folder)), daemon=True)
        self.process.start()
        other.close()
        self.built: dict[str, Any] = self._receive()["ready"]

    def call(self, **command: Any) -> dict[str, Any]:
        try:
            self.connection.send(command)
        except OSError as error:
            raise WorkerFailed("its process has ended") from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise WorkerFailed(f"its process ended with exit code {self.process.exitcode}") from error
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def close(self) -> None:
        """The process ends when its pipe closes; one that does not is ended."""
        self.connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def run(arguments: Arguments) -> int:
    """Measure, print, write; the exit code."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU", where="device", fix="device=cpu")
    if arguments.device == "cpu" and torch.cuda.is_available():
        fix = "device=cuda, or hide it: CUDA_VISIBLE_DEVICES="
        raise UserError("there is a GPU, and the trainer takes it", where="device", fix=fix)
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(arguments, Path(folder))
        document = measured.document()
    if arguments.json:
        report.write_json(arguments.json, document)
    print(tables.markdown(document))
    for name, why in document["failures"].items():
        print(f"no figures: {name}: {why}", file=sys.stderr)
    if arguments.plot:
        from qarl.bench.steps.plot import plot

        plot(arguments.plot, document)
    return 1 if document["failures"] else 0


class Measured:
    """Everything that was measured: `samples` holds, for each key that has not failed, the answers of each launch, one
    a round, and `peaks` the bytes that each phase of it had at most."""

    def __init__(self, arguments: Arguments, folder: Path) -> None:
        self.arguments = arguments
        self.samples: dict[Key, list[list[dict[str, Any]]]] = {}
        self.peaks: dict[Key, dict[str, int]] = {}
        self.failures: dict[str, str] = {}
        self.built: dict[str, dict[str, Any]] = {}
        self.parameters: list[int] = []
        folders = {}
        for layers in arguments.layers:
            folders[layers] = folder / f"layers{layers}"
            self.parameters.append(write_model(arguments.source, layers, folders[layers]))
        check_memory(arguments, self.parameters)
        for launch in range(arguments.launches):
            self._launch(launch, folders)

    def _launch(self, launch: int, folders: Mapping[int, Path]) -> None:
        """Start every process, and take its rounds."""
        repeats, warmup = self.arguments.repeats, self.arguments.warmup
        with ExitStack() as stack:
            workers = {}
            for layers, folder in folders.items():
                for scheme in self.arguments.schemes:
                    worker = self._start(scheme, layers, folder)
                    if worker:
                        stack.callback(worker.close)
                        workers[scheme, layers] = worker
            for number in range(-warmup, repeats):
                which = f"round {number + 1} of {repeats}" if number >= 0 else "warm-up"
                print(f"launch {launch + 1} of {self.arguments.launches}, {which}", file=sys.stderr)
                self._round(workers, launch, number)
            if launch == self.arguments.launches - 1:
                print("a last round that is not timed: peak memory, and the checks once more", file=sys.stderr)
                self._last_round(workers)

    def _start(self, scheme: str, layers: int, folder: Path) -> Worker | None:
        name = f"{scheme}, {layers} layers"
        if name in self.failures:
            return None
        try:
            worker = Worker(self.arguments, scheme, layers, folder)
        except WorkerFailed as error:
            self._fail(name, str(error), lambda key: (key.scheme, key.layers) == (scheme, layers))
            return None
        self.built[name] = worker.built
        return worker

    def _fail(self, name: str, why: str, concerns: Callable[[Key], bool]) -> None:
        """From here on there are no figures of what this concerns, those of earlier rounds included."""
        self.failures[name] = why
        self.samples = {key: samples for key, samples in self.samples.items() if not concerns(key)}

    def _round(self, workers: Mapping[tuple[str, int], Worker], launch: int, number: int) -> None:
        """One of everything. `number`: of the counted round, from 0; below that it warms up."""
        counted = number >= 0
        turn = launch * self.arguments.repeats + number if counted else 0
        for (scheme, layers), worker in _turned(list(workers.items()), turn):
            stepped = False
            for key, command in _turned(list(commands(self.arguments, scheme, layers)), turn):
                if str(key) in self.failures:
                    continue
                if stepped and not counted and command["do"] == "step":
                    command = command | {"do": "warm"}  # the engine is warm, and rollouts are the longest part
                try:
                    answer = worker.call(**command)
                    stepped, found = True, problems(answer["checks"])
                except WorkerFailed as error:
                    found = [str(error)]
                if found:
                    self._fail(str(key), "; ".join(found), key.__eq__)
                elif counted:
                    self._keep(key, launch, answer)

    def _last_round(self, workers: Mapping[tuple[str, int], Worker]) -> None:
        """Peaks; a check that fails now takes the figures of all rounds along. A process that ends here costs its
        peaks alone: what it measured was checked."""
        for (scheme, layers), worker in workers.items():
            for key, command in commands(self.arguments, scheme, layers):
                if key not in self.samples:
                    continue
                try:
                    worker.call(do="last_round")
                    answer = worker.call(**command)
                except WorkerFailed as error:
                    print(f"no peak memory: {key}: {error}", file=sys.stderr)
                    continue
                self.peaks[key] = answer["peak_bytes"]
                if found := problems(answer["checks"]):
                    self._fail(str(key), "; ".join(found), key.__eq__)

    def _keep(self, key: Key, launch: int, answer: dict[str, Any]) -> None:
        launches = self.samples.setdefault(key, [])
        if len(launches) <= launch:
            launches.append([])
        launches[launch].append(answer)
        if "step" in answer["phases"]:
            print(f"  {key}: {answer['phases']['step']:.2f} s", file=sys.stderr)

    def document(self) -> dict[str, Any]:
        arguments = self.arguments
        device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
        given = report.given(arguments)
        given["model"] = given.pop("source").name
        return {
            "kind": arguments.part,
            "device": report.device_name(device),
            "versions": report.versions(),
            "commit": report.commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "arguments": given,
            "model": {
                "name": arguments.source.name,
                "weights": "random" if arguments.source.folder is None else "of the folder",
                "parameters": self.parameters,
                "layers": list(arguments.layers),
                **arguments.source.shape(),
            },
            "workload": {
                "prompts": arguments.prompts,
                "n": arguments.n,
                "prompt_length": arguments.prompt_length,
                "response_length": arguments.response_length[0],
                "sequences": arguments.sequences,
                "mini_batches": arguments.mini_batches,
                "micro_batch_size": arguments.micro_batch,
                "threads": arguments.threads,
                "group_size": arguments.group_size,
                "master_dtype": arguments.master_dtype,
            },
            "built": self.built,
            "results": results(arguments, self.samples, self.peaks),
            "failures": self.failures,
        }


def _turned(items: list[Any], number: int) -> list[Any]:
    """`items` from another one on in every counted round: what goes first finds the caches as others left them."""
    start = number % max(len(items), 1)
    return items[start:] + items[:start]


def commands(arguments: Arguments, scheme: str, layers: int) -> Iterator[tuple[Key, dict[str, Any]]]:
    """What a scheme's process is told in one round."""
    if arguments.part in ("steps", "trainer"):
        do = "step" if arguments.part == "steps" else "trainer_step"
        for level in arguments.levels_of(scheme):
            yield Key(scheme, level, layers), {"do": do, "level": level}
    elif arguments.part == "publish":
        yield Key(scheme, "", layers), {"do": "publish_step"}
    else:
        for length in arguments.response_length:
            for batch in arguments.batch:
                key = Key(scheme, "", layers, batch, length)
                yield key, {"do": "rollout_step", "batch": batch, "length": length}


def check_memory(arguments: Arguments, parameters: Sequence[int]) -> None:
    """UserError where a CPU's memory cannot hold all processes at their peaks, which each keeps while the others take
    their turns, rather than a killed process."""
    if arguments.device != "cpu":
        return
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    processes = len(arguments.schemes) * len(parameters)
    logits = arguments.micro_batch * max(arguments.response_length) * int(arguments.source.config.get("vocab_size", 0))
    each = PROCESS_BYTES + min(logits, LOGITS_AT_A_TIME) * LOGIT_BYTES.get(arguments.part, 0)
    needed = len(arguments.schemes) * sum(parameters) * BYTES_PER_PARAMETER[arguments.part] + processes * each
    if free is not None and needed > free:
        raise UserError(
            f"{processes} processes would take some {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free",
            where=f"model={arguments.source.name} layers={','.join(map(str, arguments.layers))}",
            why="every scheme keeps its trainer and engine alive, so that they can be measured in turn",
            fix="fewer schemes at a time, fewer layers, or a smaller model",
        )
