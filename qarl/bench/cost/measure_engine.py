"""Ceilings of what the engine does besides its products.

A decode step of a model of almost no size is all overhead. Three of them, with more layers or a larger vocabulary than
the first, and two batch sizes tell what a step, a layer, a sequence and a logit take. Norms, rotary embedding,
activation and attention are called alone, with many tokens.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qarl.bench.cost.ceilings import Product
from qarl.bench.cost.fit import fastest_seconds
from qarl.bench.cost.rig import PRODUCTS, TINY, RigSize, make_engine, make_model
from qarl.kernels.cpu.attention import causal_attention
from qarl.quant import packed_state_dict
from qarl.rollout.engine import RolloutEngine, SamplingConfig

SEQUENCES = (4, 16)
RESPONSE = (6, 26)
"""Response lengths between which decode steps are counted."""
DEEP = replace(TINY, layers=7)
WIDE = replace(TINY, vocab=32768)
TOKENS = 1024
ATTENTION = (256, 768)
"""Lengths of rows between which attended keys are counted."""


def overheads(products: Product, rounds: int) -> dict[str, float]:
    """`step`, `layer`, `logit`, `request`. `products`: the engine's, BF16."""
    decode = {name: _decode(size, rounds) for name, size in (("tiny", TINY), ("deep", DEEP), ("wide", WIDE))}
    layer = [(decode["deep"][b]["step"] - decode["tiny"][b]["step"]) / (DEEP.layers - TINY.layers) for b in SEQUENCES]
    # What the tiny model's own products take is predicted like everybody's.
    layer = [max(s - products.seconds(b, _shapes(TINY)), 0.0) for b, s in zip(SEQUENCES, layer, strict=True)]
    step = [
        max(decode["tiny"][b]["step"] - s - products.seconds(b, [*_shapes(TINY), (TINY.vocab, TINY.hidden)]), 0.0)
        for b, s in zip(SEQUENCES, layer, strict=True)
    ]
    many, added = SEQUENCES[-1], WIDE.vocab - TINY.vocab
    logits = decode["wide"][many]["step"] - decode["tiny"][many]["step"]
    logits -= products.seconds(many, [(added, TINY.hidden)], calls=0)
    request = [decode["tiny"][b]["request"] for b in SEQUENCES]
    step_call, step_sequence = _by_sequence(step)
    layer_call, layer_sequence = _by_sequence(layer)
    call, sequence = _by_sequence(request)
    return {
        "step": step_call,
        "step_sequence": step_sequence,
        "layer": layer_call,
        "layer_sequence": layer_sequence,
        "logit": max(logits, 0.0) / (many * added),
        "request": call,
        "request_sequence": sequence,
    }


def token_costs(engine: RolloutEngine, rounds: int) -> dict[str, float]:
    """What goes with tokens and attended keys. `engine`: of `rig.PRODUCTS`."""
    return {**_tokens(engine, rounds), **_attention(rounds)}


def _by_sequence(seconds: list[float]) -> tuple[float, float]:
    """(constant, for each sequence) through the seconds at both `SEQUENCES`."""
    (few, many), (low, high) = SEQUENCES, seconds
    slope = max((high - low) / (many - few), 0.0)
    return max(high - slope * many, 0.0), slope


def _shapes(size: RigSize) -> list[tuple[int, int]]:
    """[N, K] of the engine's linears of one layer."""
    query, pair = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    return [(query + pair, size.hidden), (size.hidden, query),
            (2 * size.intermediate, size.hidden), (size.hidden, size.intermediate)]  # fmt: skip


def _decode(size: RigSize, rounds: int) -> dict[int, dict[str, float]]:
    """For each of `SEQUENCES` the seconds of a decode `step`, and of the `request`: a call less its decode steps."""
    with tempfile.TemporaryDirectory() as folder, make_engine(Path(folder), size, "bf16") as engine:
        engine.publish(list(packed_state_dict(make_model(size))), version=0)
        seconds = fastest_seconds(
            {f"{b} {length}": _generate(engine, b, length) for b in SEQUENCES for length in (1, *RESPONSE)}, rounds
        )
    found = {}
    short, long = RESPONSE
    for b in SEQUENCES:
        step = (seconds[f"{b} {long}"] - seconds[f"{b} {short}"]) / (long - short)
        found[b] = {"step": step, "request": max(seconds[f"{b} 1"] - step, 0.0)}
    return found


def _generate(engine: RolloutEngine, sequences: int, length: int) -> Any:
    prompts = [[3 + i % 8, 5, 8, 4] for i in range(sequences)]
    sampling = SamplingConfig(length, ignore_eos=True)
    return lambda: engine.generate(prompts, sampling, list(range(sequences)))


@torch.no_grad()
def _tokens(engine: RolloutEngine, rounds: int) -> dict[str, float]:
    """Seconds for each token and element of a layer's width."""
    layer: Any = engine.model().get_submodule("model.layers.0")
    size = PRODUCTS
    query, key = size.heads * size.head_dim, size.kv_heads * size.head_dim
    positions = torch.arange(TOKENS)
    hidden, residual = (torch.randn(TOKENS, size.hidden).bfloat16() for _ in range(2))
    gate_up = torch.randn(TOKENS, 2 * size.intermediate).bfloat16()
    q, k = (torch.randn(TOKENS, width).bfloat16() for width in (query, key))
    attention = layer.self_attn
    seconds = fastest_seconds(
        {
            "norm": lambda: layer.input_layernorm(hidden, residual),
            "activation": lambda: layer.mlp.act_fn(gate_up),
            "rotary": lambda: attention.rotary_emb(positions, q, k),
            "q_norm": lambda: attention.q_norm(q.view(TOKENS, size.heads, size.head_dim)),
            "k_norm": lambda: attention.k_norm(k.view(TOKENS, size.kv_heads, size.head_dim)),
        },
        max(rounds, 5),
    )
    around = seconds["rotary"] + seconds["q_norm"] + seconds["k_norm"]
    return {
        "token_hidden": 2 * seconds["norm"] / (TOKENS * size.hidden),
        "token_intermediate": seconds["activation"] / (TOKENS * size.intermediate),
        "token_width": around / (TOKENS * (query + key)),
    }


def _attention(rounds: int) -> dict[str, float]:
    heads, kv_heads, size = PRODUCTS.heads, PRODUCTS.kv_heads, PRODUCTS.head_dim
    calls = {}
    for length in ATTENTION:
        q, k, v = (torch.randn(1, length, count, size).bfloat16() for count in (heads, kv_heads, kv_heads))
        for name, prompt in (("decode", 0), ("prefill", length)):
            calls[f"{name} {length}"] = lambda q=q, k=k, v=v, p=prompt: causal_attention(q, k, v, size**-0.5, [p])
    seconds = fastest_seconds(calls, max(rounds, 5))
    short, long = ATTENTION
    pairs = (long * (long + 1) - short * (short + 1)) / 2 * heads * size
    return {
        "decode_key": max(seconds[f"decode {long}"] - seconds[f"decode {short}"], 0.0) / pairs,
        "decode_kv": 0.0,
        "prefill_pair": max(seconds[f"prefill {long}"] - seconds[f"prefill {short}"], 0.0) / pairs,
    }
