"""Ceilings of one machine: what single operations cost on it. A JSON file, `kind: ceilings`.

`qarl.bench.cost.measure` measures them, `qarl.bench.cost.gpus` assumes them from data sheets, and the model in
`qarl.bench.cost.step` reads nothing else about a machine. Every number is in seconds for the unit that its name gives,
so all three agree on units:

    products     one matrix product [M, K] x [K, N]: seconds a call, a feature and a weight, at each measured M
    blocks       a decoder block without its products, in seconds a token and element of width
    engine       what vLLM adds to its products: seconds a step, a sequence, a layer, a logit, an attended key
    head         lm_head's log-softmax
    optimizer    seconds a parameter, by size of the tensor
    quantize     seconds a weight
    publish      seconds a byte, and a weight
    links        bytes/s between GPUs; none on a single machine
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from qarl.errors import UserError

KIND = "ceilings"
COSTS = ("copy_bytes_per_s", "products", "blocks", "engine", "head", "optimizer", "quantize", "publish", "links")
CURVES = ("points", "attention", "optimizer", "tied", "untied")
"""Lists of points, in order of their first number."""


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at `x` from (x, y) in order of x: a power law between neighbours (linear where a y is 0), and beyond the ends
    that of a cost in proportion to x (above) or a constant one (below)."""
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1]
    if x >= last[0]:
        return last[1] * x / last[0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            if min(x0, y0, y1) <= 0:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
            return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))
    raise AssertionError("points are in order of x")


def within(points: Sequence[tuple[float, float]], x: float) -> float:
    """As `interpolate`, but constant beyond either end: for a cost of one unit."""
    return interpolate(points, min(x, points[-1][0]))


@dataclass(frozen=True)
class Product:
    """Time of products with one kind of weight, at every measured number of rows M: (M, seconds a call, seconds a
    feature, seconds a weight). A product [M, K] x [K, N] takes call + feature (N + K) + weight N K; what is done to
    each activation goes with the features."""

    points: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def of(cls, points: Sequence[Sequence[float]]) -> Product:
        return cls(tuple((float(m), float(call), float(feature), float(weight)) for m, call, feature, weight in points))

    def seconds(self, rows: float, shapes: Sequence[tuple[float, float]], calls: float | None = None) -> float:
        """Of one product with a weight of each shape [N, K]; `calls` where several are one call."""
        call = within([(p[0], p[1]) for p in self.points], rows)
        feature, weight = (interpolate([(p[0], p[i]) for p in self.points], rows) for i in (2, 3))
        features, weights = sum(n + k for n, k in shapes), sum(n * k for n, k in shapes)
        return call * (len(shapes) if calls is None else calls) + feature * features + weight * weights

    @property
    def flop_per_s(self) -> float:
        """The highest rate among the measured points; infinite where calls and features take all the time."""
        return max((2 * m / weight for m, _, _, weight in self.points if weight > 0), default=math.inf)


@dataclass(frozen=True)
class Block:
    """A decoder block without its products, seconds a token: `hidden`, `intermediate`, `attention_width` and
    `qk_norm_width` for each element of that width; `attention` (T, seconds) for each element of the query width in
    rows of T tokens; `call` for each block."""

    call: float
    hidden: float
    intermediate: float
    attention_width: float
    qk_norm_width: float
    attention: tuple[tuple[float, float], ...]

    def attention_at(self, length: float) -> float:
        return interpolate(self.attention, length)


@dataclass(frozen=True)
class EngineCost:
    """What vLLM's step takes beside its products. Seconds: `step` + `step_sequence` B a decode step, `layer` +
    `layer_sequence` B for each of its layers, `logit` for each of B x vocabulary logits, `request` + `request_sequence`
    B for a call of generate; `token_hidden`, `token_intermediate`, `token_width` for a token and element in a layer of
    a prefill; `decode_key` for a key that a decoded token attends to and an element of the query width, `decode_kv`
    for it and an element of the keys' and values' width, `prefill_pair` for a (query, key) pair and element of the
    query width."""

    step: float
    step_sequence: float
    layer: float
    layer_sequence: float
    logit: float
    request: float
    request_sequence: float
    token_hidden: float
    token_intermediate: float
    token_width: float
    decode_key: float
    decode_kv: float
    prefill_pair: float


@dataclass(frozen=True)
class HeadCost:
    """Seconds a logit of log-softmax with its copies: `forward`, `forward_grad` (what a backward needs is kept),
    `backward`."""

    forward: float
    forward_grad: float
    backward: float


@dataclass(frozen=True)
class OptimizerCost:
    """Seconds a parameter. `first`: the first micro-batch's gradient to FP32; `add`: a later one's; `clip`: norm and
    scaling; `step_fp32`, `step_bf16`: an AdamW step by `optim.master_dtype`; `embedding`: the gradient of an
    embedding."""

    first: float
    add: float
    clip: float
    step_fp32: float
    step_bf16: float
    embedding: float


@dataclass(frozen=True)
class QuantizeCost:
    """Seconds a weight of one scheme: to its wire tensors, into the layout of the trainer's kernel, and back to BF16
    for the backward."""

    quantize: float
    prepare: float
    dequantize: float


@dataclass(frozen=True)
class PublishCost:
    """Seconds a byte on the wire of `validate` and `transfer`; `apply` seconds a weight by scheme; those of the
    embedding and lm_head, a weight of one of them, by their size: `tied` where they are one, `untied` for both
    together."""

    call: float
    validate: float
    transfer: float
    apply: Mapping[str, float]
    tied: tuple[tuple[float, float], ...]
    untied: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Links:
    """Between GPUs: bytes/s of one GPU within a node, of each GPU's adapter between nodes, and GPUs a node; seconds of
    latency of a gather or scatter within a node and between nodes; of the engine's own all-reduce within a node, whose
    latency grows with its bytes at `reduce_rate` until NCCL is as fast."""

    node: float
    network: float
    gpus_per_node: int
    node_latency: float
    network_latency: float
    reduce_latency: float
    reduce_rate: float


@dataclass(frozen=True)
class Ceilings:
    """Of one device. `products` by "SIDE PASS SCHEME": "engine forward w8a8", "trainer backward bf16"."""

    device: str
    assumed: bool
    copy_bytes_per_s: float
    products: Mapping[str, Product]
    blocks: Mapping[str, Mapping[str, Block]]
    engine: EngineCost
    head: HeadCost
    optimizer: tuple[tuple[float, OptimizerCost], ...]
    quantize: Mapping[str, QuantizeCost]
    publish: PublishCost
    memory_bytes: int
    links: Links | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def product(self, side: str, direction: str, scheme: str) -> Product:
        """UserError where it was not measured."""
        name = f"{side} {direction} {scheme}"
        if name not in self.products:
            raise UserError(
                f"the ceilings have no {name} products", where="ceilings", why=f"they have {', '.join(self.products)}",
                fix="measure them: python -m qarl.bench ceilings json=FILE",
            )  # fmt: skip
        return self.products[name]

    def optimizer_at(self, parameters: float) -> OptimizerCost:
        """Of a tensor with so many parameters: a small one stays in the caches from one pass over it to the next."""
        names = [field.name for field in dataclasses.fields(OptimizerCost)]
        curves = {name: [(size, getattr(cost, name)) for size, cost in self.optimizer] for name in names}
        return OptimizerCost(**{name: within(curve, parameters) for name, curve in curves.items()})

    def block(self, level: str, direction: str) -> Block:
        """Level `linears` rounds as `off` does outside of its products."""
        return self.blocks["off" if level == "linears" else level][direction]

    def to_json(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        return {"kind": KIND, **content.pop("facts"), **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str = "ceilings") -> Ceilings:
        """UserError for what is no ceilings file, an incomplete one, or one with costs that cannot be."""
        if content.get("kind") != KIND:
            raise UserError("this is no ceilings file", where=where, why=f"its kind is {content.get('kind')!r}",
                            fix="python -m qarl.bench ceilings json=FILE makes one")  # fmt: skip
        _check_costs({name: value for name, value in content.items() if name in COSTS}, where)
        try:
            names = {field.name for field in dataclasses.fields(cls)} - {"facts"}
            links = content["links"]
            return cls(
                device=content["device"],
                assumed=content["assumed"],
                copy_bytes_per_s=content["copy_bytes_per_s"],
                products={name: Product.of(entry["points"]) for name, entry in content["products"].items()},
                blocks={
                    level: {name: _block(entry) for name, entry in entries.items()}
                    for level, entries in content["blocks"].items()
                },
                engine=EngineCost(**content["engine"]),
                head=HeadCost(**content["head"]),
                optimizer=tuple((float(size), OptimizerCost(**entry)) for size, entry in content["optimizer"]),
                quantize={name: QuantizeCost(**entry) for name, entry in content["quantize"].items()},
                publish=PublishCost(**{**content["publish"], **_curves(content["publish"], ("tied", "untied"))}),
                memory_bytes=content["memory_bytes"],
                links=None if links is None else Links(**links),
                facts={name: value for name, value in content.items() if name not in names and name != "kind"},
            )
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                "the ceilings file is incomplete", where=where, why=reason, fix="measure again with this release"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Ceilings:
        return cls.from_json(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}", why=f"{type(error).__name__}: {error}", fix="name a JSON file"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"cannot use {path}", why="it holds no JSON object", fix="name a file of qarl.bench")
    return content


def _check_costs(given: Any, where: str, name: str = "") -> None:
    """UserError where a number is negative or none, or the points of a curve are not in order: no prediction from
    numbers that are not, and at sizes between and beyond the points, can then be negative."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            _check_costs(value, where, f"{name}.{key}" if name else key)
    elif isinstance(given, list | tuple):
        if name.rpartition(".")[2] in CURVES:
            sizes = [point[0] for point in given if isinstance(point, list | tuple) and point]
            if not sizes or any(not low < high for low, high in pairwise(sizes)):
                raise _impossible(where, f"the points of {name} are none, or not in order of size")
        for number, value in enumerate(given):
            _check_costs(value, where, f"{name}[{number}]")
    elif isinstance(given, float | int) and not (math.isfinite(given) and given >= 0):
        raise _impossible(where, f"{name} is {given}")


def _impossible(where: str, why: str) -> UserError:
    fix = "measure again: python -m qarl.bench ceilings json=FILE"
    return UserError("the ceilings have a cost that cannot be", where=where, why=why, fix=fix)


def _block(given: Mapping[str, Any]) -> Block:
    return Block(**{**given, **_curves(given, ("attention",))})


def _curves(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[tuple[float, float], ...]]:
    return {name: tuple((float(x), float(y)) for x, y in given[name]) for name in names}
