"""Bytes that a layer moves beside its products, and what Muon moves and computes: formulas of a model's sizes.

A test compares them with what a proof counts (`benchmarks/proofs/layer_costs.py`).
"""

from __future__ import annotations

from qarl.bench.plan import assumptions
from qarl.bench.plan.assumptions import BlockBytes
from qarl.checks.model_size import ModelSize, Shape
from qarl.schemes import Scheme
from qarl.schemes.plan_terms import BeyondProducts


def beyond_products(size: ModelSize, trainer: Scheme, tokens: int) -> tuple[float, float]:
    """Return the bytes of a layer's forward and backward that products do not move. `trainer`: its scheme."""
    forward = assumptions.NORMED_FORWARD if size.qk_norm else assumptions.FORWARD
    backward = assumptions.NORMED_BACKWARD if size.qk_norm else assumptions.BACKWARD
    terms = trainer.plan
    return (
        _block(size, forward, tokens) + _linears(size, terms.forward, tokens),
        _block(size, backward, tokens) + _linears(size, terms.backward, tokens),
    )


def _block(size: ModelSize, moved: BlockBytes, tokens: int) -> float:
    """Return the bytes of norms, rotary embedding, residuals and SwiGLU of a layer."""
    mlp = 0 if size.experts else size.intermediate
    each = (
        moved.hidden * size.hidden
        + moved.queries_and_keys * (size.query_width + size.kv_width)
        + moved.head * (size.heads + size.kv_heads)
        + moved.head_element * size.head_dim
        + moved.mlp * mlp
    )
    return float(tokens * each)


def _linears(size: ModelSize, moved: BeyondProducts, tokens: int) -> float:
    """Return the bytes that a layer's linears and experts move beyond those of their products."""
    dense = dense_linears(size)
    inputs = sum(columns for _, columns in dense)
    weights = sum(rows * columns for rows, columns in dense)
    total = moved.dense_input * tokens * inputs + moved.dense_weight * weights
    if not size.experts:
        return total
    hidden = size.hidden
    inner = size.moe_intermediate
    rows = tokens * size.experts_per_token
    total += moved.expert_token * tokens * hidden
    total += rows * (moved.expert_hidden * hidden + moved.expert_inner * inner)
    return total + moved.expert_weight * 3 * size.experts * hidden * inner


def dense_linears(size: ModelSize) -> list[Shape]:
    """Return [N, K] of the linears of a block that are not experts'."""
    return [shape for name, shape in size.block_linears(0).items() if ".experts." not in name]


def muon_bytes_per_weight(size: ModelSize) -> float:
    """Return the bytes that Muon moves for a weight of a block. The stacks of experts are two matrices an expert."""
    block = dense_linears(size)
    gate_up = (2 * size.moe_intermediate, size.hidden)
    down = (size.hidden, size.moe_intermediate)
    block += [gate_up, down] * size.experts
    moved = 0
    for rows, columns in block:
        moved += assumptions.MUON_ELEMENT_BYTES * rows * columns
        moved += assumptions.MUON_SQUARE_BYTES * min(rows, columns) ** 2
    return moved / sum(rows * columns for rows, columns in block)


def newton_schulz_flop(rows: int, columns: int) -> float:
    """Return FLOP of Muon's Newton-Schulz for a matrix: per step two products of n x n x m and one of n x n x n."""
    n = min(rows, columns)
    m = max(rows, columns)
    of_step = 4.0 * n * n * m + 2.0 * n**3
    return assumptions.NEWTON_SCHULZ_STEPS * of_step
