"""The keys of `qarl bench steps`, `trainer` and `publish`, with their bounds and defaults, and the cases to measure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from qarl.bench.arguments import Device, Schemes, check_divides, device_of
from qarl.bench.model import Source, find_model
from qarl.config.command_arguments import Commas, read_request, writes_json
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names, get_scheme


class Case(NamedTuple):
    """The scheme, level and rank of adapters that a launch measures. For `publish`, `level` is None."""

    scheme: str
    level: Level | None
    lora_r: int = 0

    def __str__(self) -> str:
        parts = [self.scheme]
        if self.level:
            parts.append(f"level {self.level}")
        if self.lora_r:
            parts.append(f"r={self.lora_r}")
        return ", ".join(parts)


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
    levels: Annotated[tuple[Level, ...], Commas] = tuple(Level)[:-1]
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
    json: Annotated[Path, writes_json("workload", "results")] | None = None

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
            return [Case(scheme, None) for scheme in schemes]
        levels = sorted(set(self.levels))
        ranks = sorted(set(self.lora_r))
        return [
            Case(scheme, level, rank)
            for scheme, level, rank in product(schemes, levels, ranks)
            if _is_measured(scheme, level, rank)
        ]


def _is_measured(scheme: str, level: Level, rank: int) -> bool:
    if get_scheme(scheme).quantized:
        return level.low_bit or not rank
    return level.follows_engine or not level.low_bit


def _check(arguments: Arguments) -> None:
    source = arguments.source
    where = f"qarl.bench {arguments.part}"
    if arguments.depth > source.size.layers:
        raise UserError(
            f"layers={arguments.layers}, but {source.name} has only {source.size.layers}",
            where=where,
        )
    positions = source.config.get("max_position_embeddings")
    length = arguments.prompt_length + arguments.response_length
    if positions and length > positions:
        what = f"prompt_length + response_length = {length}, but the model has only {positions} positions"
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
