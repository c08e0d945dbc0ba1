"""Ceilings of matrix products, of the quantizer and of a publish: the trainer's own layers and the engine's own, of
`rig.PRODUCTS`, called alone.

At every M four shapes are timed; the shares of a call, a feature and a weight in their seconds are a fit. The
engine's few-row products go through the weights of all layers in turn, so that they come from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import nn

from qarl.bench.cost.ceilings import Product, QuantizeCost
from qarl.bench.cost.fit import fastest_seconds, nonnegative_fit
from qarl.bench.cost.rig import PRODUCTS
from qarl.quant import packed_state_dict
from qarl.quant.linear import QuantLinear
from qarl.quant.phases import measure_phases
from qarl.rollout.engine import RolloutEngine
from qarl.rollout.publish.checksum import checksums
from qarl.rollout.publish.manifest import check_complete
from qarl.rollout.publish.writers import refresh_tied_layers

TRAINER_ROWS = (32, 128, 512, 2048)
ENGINE_ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
TRAINER_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
ENGINE_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
TABLES = ("model.embed_tokens.", "lm_head.")
HEAD, HEAD_ROWS = (512, 40960), (128, 512, 1024)
FEW_ROWS = 64
"""Up to so many rows the engine's products take their weights from memory."""


def trainer_products(model: Any, rounds: int) -> dict[str, Product]:
    """Of a model with its linears quantized, or plain: "forward", and "backward" of both operands."""
    return _both_passes([model.model.layers[0].get_submodule(name) for name in TRAINER_LAYERS], TRAINER_ROWS, rounds)


def head_products(rounds: int) -> dict[str, Product]:
    """Of a weight as wide as an lm_head's, which is more than a CPU's cache holds, as are its logits of many rows."""
    return _both_passes([nn.Linear(*HEAD, bias=False, dtype=torch.bfloat16)], HEAD_ROWS, rounds)


def _both_passes(linears: list[Any], row_counts: tuple[int, ...], rounds: int) -> dict[str, Product]:
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    taken: dict[str, dict[int, list[float]]] = {"forward": {}, "backward": {}}
    for rows in row_counts:
        calls: dict[str, Callable[[], object]] = {}
        for number, linear in enumerate(linears):
            calls |= {f"{name} {number}": call for name, call in _passes(linear, rows).items()}
        seconds = fastest_seconds(calls, rounds)
        for name, found in taken.items():
            found[rows] = [seconds[f"{name} {i}"] for i in range(len(linears))]
    return {name: _product(shapes, found) for name, found in taken.items()}


def _product(shapes: list[tuple[int, int]], seconds: dict[int, list[float]]) -> Product:
    """From the seconds of a product with each of `shapes` [N, K] at each M, in order of M.

    What a call takes whatever its operands is told by the fewest rows, where activations are next to nothing.
    """
    fewest = next(iter(seconds))
    call = nonnegative_fit([(1, n * k) for n, k in shapes], seconds[fewest])[0] if len(shapes) > 1 else 0.0
    points = []
    for rows, taken in seconds.items():
        rest = [max(one - call, 0.05 * one) for one in taken]
        if len(shapes) > 1:
            points.append((rows, call, *nonnegative_fit([(n + k, n * k) for n, k in shapes], rest)))
        else:
            points.append((rows, 0.0, 0.0, taken[0] / (shapes[0][0] * shapes[0][1])))
    return Product.of(points)


def _passes(linear: Any, rows: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(rows, linear.in_features).bfloat16().requires_grad_()
    y = linear(x)
    grad = torch.randn_like(y)

    def forward() -> object:
        with torch.no_grad():
            return linear(x)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(y, [x, linear.weight], grad, retain_graph=True),
    }


@torch.no_grad()
def engine_products(engine: RolloutEngine, rounds: int) -> Product:
    """Of vLLM's own layers."""
    layers: list[Any] = list(engine.model().get_submodule("model.layers").children())
    taken = {}
    for rows in ENGINE_ROWS:
        calls = {}
        for name in ENGINE_LAYERS:
            members = [layer.get_submodule(name) for layer in (layers if rows <= FEW_ROWS else layers[:1])]
            calls[name] = _in_turn(members, rows)
        seconds = fastest_seconds(calls, max(rounds, len(layers)) if rows <= FEW_ROWS else rounds)
        taken[rows] = [seconds[name] for name in ENGINE_LAYERS]
    return _product([_engine_shape(name) for name in ENGINE_LAYERS], taken)


def _in_turn(modules: list[Any], rows: int) -> Callable[[], object]:
    turns: Iterator[Any] = cycle(modules)
    x = torch.randn(rows, modules[0].input_size).bfloat16()
    return lambda: next(turns)(x)


def _engine_shape(name: str) -> tuple[int, int]:
    """[N, K] of a layer: vLLM repacks its weight, and may leave no tensor to look at."""
    size = PRODUCTS
    query, pair = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    return {
        "self_attn.qkv_proj": (query + pair, size.hidden),
        "self_attn.o_proj": (size.hidden, query),
        "mlp.gate_up_proj": (2 * size.intermediate, size.hidden),
        "mlp.down_proj": (size.hidden, size.intermediate),
    }[name]


def quantizer(model: Any, rounds: int) -> QuantizeCost:
    """Of a model whose linears are quantized."""
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    weights = sum(layer.weight.numel() for layer in layers)
    parts: dict[str, list[float]] = {"quantize": [], "prepare": []}

    def requantize() -> None:
        with measure_phases() as seconds:
            for layer in layers:
                layer.invalidate()
                layer.quantized()
        parts["quantize"].append(seconds["quantize"] + seconds["pack"])
        parts["prepare"].append(seconds["prepare"])

    def dequantize() -> None:
        for layer in layers:
            layer.quantized().dequantize(torch.bfloat16)

    seconds = fastest_seconds({"all": requantize, "dequantize": dequantize}, rounds)
    prepare = min(parts["prepare"])
    return QuantizeCost(
        quantize=min(parts["quantize"]) / weights,
        prepare=prepare / weights,
        dequantize=seconds["dequantize"] / weights,
    )


def publish(model: Any, engine: RolloutEngine, rounds: int) -> dict[str, float]:
    """Seconds: `call`; a byte's `validate` and `transfer`; a weight's `apply` in the blocks."""
    tensors = list(packed_state_dict(model))
    size = sum(tensor.nbytes for _, tensor in tensors)
    assert engine.receiver is not None
    plan = engine.receiver.plan
    layer = {n: t for n, t in tensors if n.startswith("model.layers.1.")}
    linears = [p for n, p in model.model.layers[1].named_parameters() if n.endswith("proj.weight")]
    tables = {n: t for n, t in tensors if n.startswith(TABLES)}

    def validate() -> None:
        check_complete(tensors, engine.expected)
        checksums(tensor for _, tensor in tensors)

    versions = cycle(range(1000))
    calls: dict[str, Callable[[], object]] = {
        "validate": validate,
        "transfer": lambda: checksums(tensor for _, tensor in tensors),
        "apply": lambda: plan.write(layer),
        "tables": lambda: plan.write(tables),
        "publish": lambda: engine.publish(tensors, version=next(versions)),
    }
    seconds = fastest_seconds(calls, rounds)
    parts = seconds["validate"] + seconds["transfer"] + PRODUCTS.layers * seconds["apply"]
    return {
        "call": max(seconds["publish"] - parts - seconds["tables"], 0.0) / len(tensors),
        "validate": seconds["validate"] / size,
        "transfer": seconds["transfer"] / size,
        "apply": seconds["apply"] / sum(weight.numel() for weight in linears),
    }


def tables(model: Any, engine: RolloutEngine, rounds: int) -> float:
    """Seconds for each weight of the embedding to write it and lm_head; where they are one, lm_head's layout is made at
    the end of a publish."""
    tensors = list(packed_state_dict(model))
    assert engine.receiver is not None
    plan = engine.receiver.plan
    found = {n: t for n, t in tensors if n.startswith(TABLES)}

    def write() -> None:
        plan.write(found)
        refresh_tied_layers(engine.model())

    engine.publish(tensors, version=0)
    seconds = fastest_seconds({"write": write}, rounds)
    return seconds["write"] / model.get_input_embeddings().weight.numel()
