"""Arguments of `steps`, `rollout`, `trainer` and `publish`: the same keys for all four, checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl.bench.arguments import default_device, key_values, names, numbers, one_of
from qarl.bench.steps.models import Source, default_group_size, find_model
from qarl.errors import UserError
from qarl.process import limit_threads

SCHEMES = ("bf16", "w8a8", "fp8", "w4a16")
LEVELS = ("off", "linears", "model", "exact")
MASTER_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Arguments:
    """
    model            a name of qarl/bench/models, or a folder; SmolLM2-135M on a CPU, Qwen3-8B on a GPU
    layers           decoder layers that are kept, all by default; two numbers (2,4) separate a layer's time from the
                     rest's and extrapolate to the whole model
    schemes          bf16,w8a8,fp8,w4a16; bf16 is the base of all ratios
    levels           off,linears,model (and exact); bf16 has no `linears`
    prompts, n       different prompts of a step, and responses to each
    prompt_length    tokens, random ones
    response_length  tokens, no fewer (ignore_eos); `rollout` takes several
    batch            `rollout` only: sequences at a time, several; prompts * n by default
    mini_batches     optimizer steps of a training step
    micro_batch      sequences of a forward and backward; all of a mini-batch by default
    group_size       of int4 weights; the largest of 128, 64, 32 that divides every input size
    master_dtype     fp32 or bf16, as optim.master_dtype
    launches         times that all processes are started anew; with two or more, launches and not rounds are the unit
                     of the statistics, and what differs from run to run is in the spread
    repeats          counted rounds over all schemes and levels, of each launch
    warmup           rounds before, not counted; in them only the first level of a scheme makes rollouts. On a CPU the
                     second one still gets memory that the system has to hand out (`qarl.process.keep_freed_memory`)
    threads          of a CPU
    gpu_memory_utilization   of each engine, all schemes' and depths' live side by side; 0.6 shared out by default
    device           cuda where there is one, else cpu
    json, plot       files to write
    """

    part: str
    source: Source
    device: str
    layers: tuple[int, ...]
    schemes: tuple[str, ...]
    levels: tuple[str, ...]
    prompts: int
    n: int
    prompt_length: int
    response_length: tuple[int, ...]
    batch: tuple[int, ...]
    mini_batches: int
    micro_batch: int
    group_size: int
    master_dtype: str
    launches: int
    repeats: int
    warmup: int
    threads: int
    gpu_memory_utilization: float
    json: Path | None = None
    plot: Path | None = None

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @classmethod
    def parse(cls, part: str, given: Sequence[str]) -> Arguments:
        """Raises UserError for what is not key=value, no key, no value of its key, or does not fit together."""
        known = {field.name for field in dataclasses.fields(cls)} - {"part", "source"} | {"model"}
        values = key_values(given, known)
        device = values.get("device") or default_device()
        one_of(device, ("cuda", "cpu"), "device")
        source = find_model(values.get("model") or ("SmolLM2-135M" if device == "cpu" else "Qwen3-8B"))
        try:
            arguments = cls._build(part, values, device, source)
        except ValueError as error:
            raise UserError(str(error), where=f"qarl.bench {part}", fix="numbers: layers=2,4 repeats=5") from error
        _check(arguments)
        return arguments

    @classmethod
    def _build(cls, part: str, values: dict[str, str], device: str, source: Source) -> Arguments:
        def number(key: str, default: int) -> int:
            return int(values.get(key, default))

        schemes = names(values, "schemes", SCHEMES, SCHEMES)
        schemes = tuple(sorted(set(schemes), key=SCHEMES.index))
        layers = numbers(values["layers"]) if "layers" in values else (source.layers,)
        prompts, n = number("prompts", 8), number("n", 4)
        mini_batches = number("mini_batches", 1)
        return cls(
            part=part,
            source=source,
            device=device,
            layers=layers,
            schemes=schemes,
            levels=tuple(sorted(set(names(values, "levels", LEVELS, LEVELS[:3])), key=LEVELS.index)),
            prompts=prompts,
            n=n,
            prompt_length=number("prompt_length", 8),
            response_length=numbers(values.get("response_length", "16")),
            batch=numbers(values.get("batch", str(prompts * n))),
            mini_batches=mini_batches,
            micro_batch=number("micro_batch", max(prompts * n // max(mini_batches, 1), 1)),
            group_size=number("group_size", default_group_size(source.config)),
            master_dtype=values.get("master_dtype", "fp32"),
            launches=number("launches", 1),
            repeats=number("repeats", 3),
            warmup=number("warmup", 2),
            threads=number("threads", 1),
            gpu_memory_utilization=float(values.get("gpu_memory_utilization", 0.6 / len(schemes) / len(layers))),
            json=Path(values["json"]) if "json" in values else None,
            plot=Path(values["plot"]) if "plot" in values else None,
        )

    def levels_of(self, scheme: str) -> tuple[str, ...]:
        """Levels that are measured for `scheme`: bf16 has no low-bit linears, so `linears` would be `off` again."""
        return tuple(level for level in self.levels if scheme != "bf16" or level != "linears")

    def limit_threads(self) -> None:
        """Before torch is imported; the schemes' processes inherit it. On a GPU the CPU's threads do not matter."""
        limit_threads(self.threads if self.device == "cpu" else None)


def _check(arguments: Arguments) -> None:
    where = f"qarl.bench {arguments.part}"
    positive = (
        "prompts",
        "prompt_length",
        "mini_batches",
        "micro_batch",
        "group_size",
        "launches",
        "repeats",
        "threads",
    )
    for key in positive:
        if getattr(arguments, key) < 1:
            raise UserError(f"{key} must be 1 or more", where=where)
    if arguments.n < 2:
        raise UserError("n must be 2 or more", where=where, why="an advantage is relative to the other responses")
    if arguments.launches * arguments.repeats < 2:
        raise UserError("repeats or launches must be 2 or more", where=where, why="one measurement has no spread")
    if arguments.warmup < 1:
        raise UserError("warmup must be 1 or more", where=where, why="first calls allocate and compile")
    if min(arguments.response_length) < 2 or min(arguments.batch) < 1:
        raise UserError("response_length must be 2 or more, batch 1 or more", where=where,
                        why="the first token comes from the prefill")  # fmt: skip
    if not 0 < arguments.gpu_memory_utilization <= 1:
        raise UserError("gpu_memory_utilization must be above 0 and at most 1", where=where)
    one_of(arguments.master_dtype, MASTER_DTYPES, "master_dtype")
    _check_depths(arguments, where)
    _check_batches(arguments, where)
    _check_part(arguments, where)


def _check_depths(arguments: Arguments, where: str) -> None:
    layers, most = arguments.layers, arguments.source.layers
    if len(layers) > 2 or len(set(layers)) < len(layers) or not all(1 <= depth <= most for depth in layers):
        raise UserError(
            f"layers={','.join(map(str, layers))} will not do",
            where=where,
            why=f"{arguments.source.name} has {most} layers",
            fix=f"one number from 1 to {most}, or two different ones",
        )
    positions = arguments.source.config.get("max_position_embeddings")
    wanted = arguments.prompt_length + max(arguments.response_length)
    if positions and wanted > positions:
        raise UserError(f"prompt_length + response_length = {wanted}, the model has {positions} positions", where=where)


def _check_batches(arguments: Arguments, where: str) -> None:
    if arguments.prompts % arguments.mini_batches:
        raise UserError(
            f"{arguments.prompts} prompts do not make {arguments.mini_batches} mini-batches",
            where=where,
            fix="mini_batches must divide prompts",
        )
    size = arguments.sequences // arguments.mini_batches
    if size % arguments.micro_batch:
        raise UserError(
            f"a mini-batch of {size} sequences is no multiple of micro_batch={arguments.micro_batch}", where=where
        )


def _check_part(arguments: Arguments, where: str) -> None:
    several = len(arguments.response_length) > 1 or arguments.batch != (arguments.sequences,)
    if several and arguments.part != "rollout":
        raise UserError(
            "several response lengths, or another batch than prompts * n",
            where=where,
            fix="one response_length and no batch here; `python -m qarl.bench rollout` takes several of both",
        )
    if arguments.source.has_experts and arguments.part != "rollout":
        raise UserError(
            f"{arguments.source.name} is a mixture of experts",
            where=where,
            why="the trainer has no quantized experts yet",
            fix="python -m qarl.bench rollout model=..., or kernels model=qwen3-30b-a3b",
        )


def run_part(part: str, given: Sequence[str]) -> int:
    """`python -m qarl.bench steps | rollout | trainer | publish`; the exit code."""
    arguments = Arguments.parse(part, given)
    arguments.limit_threads()
    from qarl.bench.steps.run import run

    return run(arguments)
