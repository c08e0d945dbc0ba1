"""The keys of `qarl bench kernels`, with their bounds and defaults, and the layers that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from qarl.bench.arguments import Device, device_of
from qarl.bench.model import LINEARS, find_model, linear_shapes
from qarl.config.command_arguments import Commas, read_request, writes_json
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names

OPERATIONS = ("linear", "input_gradient", "quantize", "experts")
LOW_BIT = engine_scheme_names(quantized=True)
GPU_MODELS = ("Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen3-8B", "Qwen3-30B-A3B")
GPU_ROWS = (1, 16, 64, 512, 4096, 16384)
CPU_ROWS = (64, 512, 4096)


@dataclass(frozen=True, config={"extra": "forbid"})
class Arguments:
    """
    device       cuda or cpu; by default cuda if there is a GPU
    model        names from qarl/bench/models, or folders, with commas; by default four on a GPU, Qwen3-0.6B on a CPU
    layer        which of a model's dense weights: q, kv, o, gate_up, down; by default all, on a CPU only gate_up
    shape        NxK of a single weight, instead of model
    experts      number of experts, experts per token, hidden and intermediate size of an expert layer, instead of model
    m            number of rows of activations; for expert layers, number of tokens
    scheme       w4a16,w8a8,fp8
    operation    linear, input_gradient, quantize; experts for layers of experts
    group_size   group size of int4 weights
    seconds      seconds to measure the kernels that are compared; each is called at least `rounds` times
    rounds       minimum number of calls of each competitor
    threads      number of threads on a CPU
    json         the file to write"""

    device: Device
    model: Annotated[tuple[str, ...], Commas] = ()
    layer: Annotated[tuple[Literal[*LINEARS], ...], Commas] = ()  # type: ignore[valid-type]  # not written out
    shape: Annotated[str, Field(pattern=r"^[1-9]\d*x[1-9]\d*$")] | None = None
    experts: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None, Commas] = (
        None
    )
    m: Annotated[tuple[PositiveInt, ...], Commas] = ()
    scheme: Annotated[tuple[Literal[*LOW_BIT], ...], Commas] = LOW_BIT  # type: ignore[valid-type]  # as above
    operation: Annotated[tuple[Literal[*OPERATIONS], ...], Commas] = OPERATIONS  # type: ignore[valid-type]  # as above
    group_size: PositiveInt = 128
    seconds: PositiveFloat = 0.2
    rounds: PositiveInt = 7
    threads: PositiveInt = 1
    json: Annotated[Path, writes_json("ceilings", "results")] | None = None

    @classmethod
    def parse(cls, part: str, words: Sequence[str]) -> Arguments:
        """Read the arguments. Raise UserError if one is invalid."""
        device = device_of(words)
        on_cpu = device == "cpu"
        named = {argument.partition("=")[0] for argument in words}
        defaults: dict[str, Any] = {"device": device, "m": CPU_ROWS if on_cpu else GPU_ROWS}
        if on_cpu:
            defaults |= {"seconds": 3, "rounds": 3}
        if not named & {"model", "shape", "experts"}:
            defaults |= (
                {"model": "Qwen3-0.6B", "layer": "gate_up"} if on_cpu else {"model": GPU_MODELS}
            )
        arguments = read_request(
            cls, words, example="qarl bench kernels model=Qwen3-8B m=1,4096", **defaults
        )
        if not arguments.layers() and not arguments.expert_layers():
            fix = "name layers that the models have"
            raise UserError("there is no layer to measure", where="model, layer", fix=fix)
        return arguments

    def layers(self) -> list[tuple[str, str, tuple[int, int]]]:
        """Return (model, layer, [N, K]) of the dense weights to measure."""
        if self.shape:
            n, k = map(int, self.shape.split("x"))
            return [("custom", "layer", (n, k))]
        sources = map(find_model, self.model)
        models = [(source.name, linear_shapes(source)) for source in sources]
        return [(name, layer, nk) for name, shapes in models for layer, nk in shapes.items()
                if not self.layer or layer in self.layer]  # fmt: skip

    def expert_layers(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (model, (experts, experts per token, hidden, intermediate)) of the expert layers to measure.
        The list is empty if the key `layer` is given, because that key selects dense weights."""
        if "experts" not in self.operation:
            return []
        if self.experts:
            return [("custom", self.experts)]
        sizes = (
            {}
            if self.layer
            else {source.name: source.size for source in map(find_model, self.model)}
        )
        return [(name, (size.experts, size.experts_per_token, size.hidden, size.moe_intermediate))
                for name, size in sizes.items() if size.experts]  # fmt: skip
