"""Arguments of `python -m qarl.bench kernels`.

python -m qarl.bench kernels                                       everything, on the GPU if there is one
python -m qarl.bench kernels model=Qwen3-8B m=1,4096 json=FILE.json
python -m qarl.bench kernels device=cpu threads=1                  a 1024 -> 3072 layer on the CPU
python -m qarl.bench kernels model=Qwen3-30B-A3B operation=grouped_linear,experts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl.bench.arguments import DEVICES, device_of, read
from qarl.bench.sources import LINEARS, Source, find_model, linear_shapes
from qarl.config.quant import ROLLOUT_SCHEMES
from qarl.errors import UserError

OPERATIONS = ("linear", "input_gradient", "quantize", "quantize_activations")
EXPERT_OPERATIONS = ("grouped_linear", "grouped_input_gradient", "experts")
LOW_BIT = tuple(name for name in ROLLOUT_SCHEMES if name != "bf16")
GPU_MODELS = ("Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen3-8B", "Qwen3-30B-A3B")
GPU_ROWS, CPU_ROWS = (1, 16, 64, 512, 4096, 16384), (64, 512, 4096)


@dataclass(frozen=True)
class Arguments:
    """
    device       cuda or cpu; by default cuda if there is a GPU
    model        names from qarl/bench/models, or folders, with commas; by default four on a GPU, Qwen3-0.6B on a CPU
    layer        which of a model's dense weights: q, kv, o, gate_up, down; by default all, on a CPU only gate_up
    shape        NxK of a single weight, instead of model
    experts      number of experts, experts per token, hidden and intermediate size of an expert layer, instead of model
    m            number of rows of activations; for expert layers, number of tokens
    scheme       w4a16,w8a8,fp8
    operation    linear, input_gradient, quantize, quantize_activations; for expert layers also grouped_linear,
                 grouped_input_gradient, experts
    group_size   group size of int4 weights
    seconds      seconds to measure the kernels that are compared; each is called at least `rounds` times
    rounds       minimum number of calls of each competitor
    threads      number of threads on a CPU
    json         the file to write"""

    device: str
    model: tuple[str, ...] = ()
    layer: tuple[str, ...] = ()
    shape: str | None = None
    experts: tuple[int, ...] = ()
    m: tuple[int, ...] = ()
    scheme: tuple[str, ...] = LOW_BIT
    operation: tuple[str, ...] = (*OPERATIONS, *EXPERT_OPERATIONS)
    group_size: int = 128
    seconds: float = 0.2
    rounds: int = 7
    threads: int = 1
    json: Path | None = None

    @classmethod
    def parse(cls, part: str, given: Sequence[str]) -> Arguments:
        """Read the arguments. Raise UserError if one is invalid."""
        device = device_of(given)
        on_cpu = device == "cpu"
        named = {argument.partition("=")[0] for argument in given}
        defaults = ["m=" + ",".join(map(str, CPU_ROWS if on_cpu else GPU_ROWS)), f"device={device}"]
        if on_cpu:
            defaults += ["seconds=3", "rounds=3"]
        if not named & {"model", "shape", "experts"}:
            defaults += ["model=Qwen3-0.6B"] if on_cpu else ["model=" + ",".join(GPU_MODELS)]
            defaults += ["layer=gate_up"] if on_cpu and "layer" not in named else []
        choices = {
            "device": DEVICES,
            "layer": LINEARS,
            "scheme": LOW_BIT,
            "operation": (*OPERATIONS, *EXPERT_OPERATIONS),
        }
        arguments = read(cls, [*defaults, *given], choices)
        if not arguments.layers() and not arguments.expert_layers():
            raise UserError(
                "there is no layer to measure", where="model, layer", fix="name layers that the models have"
            )
        return arguments

    def layers(self) -> list[tuple[str, str, tuple[int, int]]]:
        """Return (model, layer, [N, K]) of the dense weights to measure."""
        if self.shape:
            return [("custom", "layer", _shape(self.shape))]
        found = [(source.name, linear_shapes(source)) for source in self._sources()]
        return [(name, layer, nk) for name, shapes in found for layer, nk in shapes.items()
                if not self.layer or layer in self.layer]  # fmt: skip

    def expert_layers(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (model, (experts, experts per token, hidden, intermediate)) of the expert layers to measure.
        The list is empty if the key `layer` is given, because that key selects dense weights."""
        if not set(self.operation) & set(EXPERT_OPERATIONS):
            return []
        if self.experts:
            if len(self.experts) != 4:
                raise UserError("experts must have four numbers", where="experts", fix="write experts=128,8,2048,768")
            return [("custom", self.experts)]
        keys = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
        sources = [] if self.layer else [source for source in self._sources() if source.size.experts]
        return [(source.name, tuple(int(source.config[key]) for key in keys)) for source in sources]

    def _sources(self) -> list[Source]:
        return [find_model(name) for name in self.model]


def _shape(text: str) -> tuple[int, int]:
    n, by, k = text.lower().partition("x")
    if not (by and n.isdecimal() and k.isdecimal() and int(n) and int(k)):
        raise UserError(f"shape must be NxK, got {text!r}", where="shape", fix="write shape=3072x1024")
    return int(n), int(k)


KEYS = Arguments
