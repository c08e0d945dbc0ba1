"""Arguments of the benchmark: key=value, as `qarl.train` takes them; an unknown key or value is an error."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from qarl.bench.shapes import CPU_ROWS, EXPERTS, MODELS, ROWS, Experts, Layer
from qarl.errors import UserError
from qarl.process import limit_threads

OPERATIONS = ("linear", "input_gradient", "quantize", "quantize_activations")
EXPERT_OPERATIONS = ("grouped_linear", "grouped_input_gradient", "experts")
ALL_OPERATIONS = OPERATIONS + EXPERT_OPERATIONS
SCHEMES = ("w4a16", "w8a8", "fp8", "w4a8")


@dataclass(frozen=True)
class Arguments:
    """
    device       cuda where there is one, else cpu
    model        of `qarl.bench.shapes.MODELS`, several with commas; all four on a GPU, `small` on CPU
    layer        names of layers of these models; all
    shape        NxK of one layer, in place of model
    m            rows of activations; tokens where they are routed to experts
    scheme       which low-bit schemes
    operation    linear, input_gradient, quantize, quantize_activations; of models with experts also grouped_linear,
                 grouped_input_gradient, experts
    group_size   of int4 weights
    seconds      of measuring for each group of competitors, at least `rounds`
    rounds       calls of each competitor at least
    threads      of a CPU
    json, plot   files to write: figures with all that they depend on, and a PNG
    """

    device: str
    model: tuple[str, ...]
    layer: tuple[str, ...] = ()
    shape: tuple[int, int] | None = None
    m: tuple[int, ...] = ()
    scheme: tuple[str, ...] = SCHEMES
    operation: tuple[str, ...] = ALL_OPERATIONS
    group_size: int = 128
    seconds: float = 0.2
    rounds: int = 7
    threads: int = 1
    json: Path | None = None
    plot: Path | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> Arguments:
        """Raises UserError for what is not key=value, no key, or no value of its key."""
        values = key_values(given, [field.name for field in dataclasses.fields(cls)])
        device = values.get("device") or default_device()
        one_of(device, ("cuda", "cpu"), "device")
        on_cpu = device == "cpu"
        models = ("small",) if on_cpu else tuple(name for name in MODELS if name != "small")
        try:
            arguments = cls(
                device=device,
                model=names(values, "model", MODELS, models),
                layer=names(values, "layer", {layer.name for layers in MODELS.values() for layer in layers}, ()),
                shape=_shape(values["shape"]) if "shape" in values else None,
                m=numbers(values["m"]) if "m" in values else CPU_ROWS if on_cpu else ROWS,
                scheme=names(values, "scheme", SCHEMES, SCHEMES),
                operation=names(values, "operation", ALL_OPERATIONS, ALL_OPERATIONS),
                group_size=int(values.get("group_size", 128)),
                seconds=float(values.get("seconds", 3.0 if on_cpu else 0.2)),
                rounds=int(values.get("rounds", 3 if on_cpu else 7)),
                threads=int(values.get("threads", 1)),
                json=Path(values["json"]) if "json" in values else None,
                plot=Path(values["plot"]) if "plot" in values else None,
            )
        except ValueError as error:
            raise UserError(str(error), where="qarl.bench kernels", fix="numbers: m=1,16 shape=3072x1024") from error
        if arguments.rounds < 1 or min(arguments.m) < 1:
            raise UserError("m and rounds must be 1 or more", where="qarl.bench kernels")
        return arguments

    def layers(self) -> list[tuple[str, Layer]]:
        """(model, layer) to measure."""
        if self.shape:
            return [("custom", Layer("layer", *self.shape))]
        chosen = [(model, layer) for model in self.model for layer in MODELS[model]]
        return [(model, layer) for model, layer in chosen if not self.layer or layer.name in self.layer]

    def experts(self) -> list[tuple[str, Experts]]:
        """(model, its experts) to measure: not where one layer is named."""
        if self.shape or self.layer or not set(self.operation) & set(EXPERT_OPERATIONS):
            return []
        return [(model, EXPERTS[model]) for model in self.model if model in EXPERTS]

    def limit_threads(self) -> None:
        """Before torch is imported. On a GPU the CPU's threads do not matter."""
        limit_threads(self.threads if self.device == "cpu" else None)


def run_kernels(part: str, given: Sequence[str]) -> int:
    """`python -m qarl.bench kernels`; the exit code."""
    arguments = Arguments.parse(given)
    arguments.limit_threads()
    from qarl.bench.kernels import run

    return run(arguments)


def key_values(given: Sequence[str], keys: Collection[str]) -> dict[str, str]:
    """What was given, by key. UserError for what is not key=value, or none of `keys`."""
    values: dict[str, str] = {}
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals or not value:
            raise UserError(f"{argument!r} is not key=value", where="qarl.bench", fix="key=value, as in json=FILE")
        one_of(key, keys, "key")
        values[key] = value
    return values


def default_device() -> str:
    """`cuda` where the driver shows a device; torch is asked later, once the threads are set."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and Path("/dev/nvidiactl").exists() else "cpu"


def one_of(value: str, known: Collection[str], what: str) -> None:
    """UserError where `value` is none of `known`, with the nearest."""
    if value not in known:
        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(f"there is no {what} {value!r}", where=what, fix=f"one of {', '.join(sorted(known))}{hint}")


def names(values: dict[str, str], key: str, known: Collection[str], default: tuple[str, ...]) -> tuple[str, ...]:
    """The names under `key`, with commas between them; each one of `known`."""
    if key not in values:
        return default
    given = tuple(values[key].split(","))
    for name in given:
        one_of(name, known, key)
    return given


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. ValueError for anything else."""
    return tuple(int(number) for number in text.split(","))


def _shape(text: str) -> tuple[int, int]:
    n, k = text.lower().split("x")
    return int(n), int(k)
