"""Which operators compute a decoder block at an alignment level, and what autograd saves of them for the backward.

    TRANSFORMERS       transformers' own, at levels `off` and `linears`
    FP32_ATTENTION     `qarl.align` on a CPU, with attention in PyTorch
    ENGINE_ATTENTION   the same, with the engine's attention
    CUDA               `qarl.align.cuda`: each operator saves its BF16 inputs, and a linear its input; attention also
                       its output and log-sums

A test compares each with autograd. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from qarl.config.level import Level


@dataclass(frozen=True)
class BlockArithmetic:
    """What the operators of a block save, in bytes.

    block_input   for each number of a block's input, if gradient checkpointing keeps nothing else of the block
    norm          for each number that one of the two norms of the block reads
    head_norm     for each number that the norms of queries and keys read
    norm_scale    for each row of a norm
    qkv           for each number of queries, keys and values
    attention     for each number of attention's output
    log_sum_exp   for each head
    rotary        for each number of a head: cosines and sines
    mlp           for each number of gate_proj's output, together with what is computed from it; not of experts

    The FP32 copies and scores that the backward of one row holds are not counted.
    """

    block_input: int
    norm: int
    head_norm: int
    norm_scale: int
    qkv: int
    attention: int
    log_sum_exp: int
    rotary: int
    mlp: int


TRANSFORMERS = BlockArithmetic(
    block_input=2,
    norm=8,
    head_norm=6,
    norm_scale=4,
    qkv=2,
    attention=2,
    log_sum_exp=4,
    rotary=0,
    mlp=8,
)
FP32_ATTENTION = BlockArithmetic(
    block_input=4,
    norm=6,
    head_norm=2,
    norm_scale=4,
    qkv=4,
    attention=6,
    log_sum_exp=4,
    rotary=8,
    mlp=8,
)
ENGINE_ATTENTION = BlockArithmetic(
    block_input=4,
    norm=6,
    head_norm=2,
    norm_scale=4,
    qkv=2,
    attention=2,
    log_sum_exp=0,
    rotary=0,
    mlp=8,
)
CUDA = BlockArithmetic(
    block_input=2,
    norm=4,
    head_norm=2,
    norm_scale=0,
    qkv=2,
    attention=2,
    log_sum_exp=4,
    rotary=0,
    mlp=6,
)


def block_arithmetic(level: Level, device: str) -> BlockArithmetic:
    """Return the operators of a block at an applied level. `device`: "cpu" or "cuda"."""
    if not level.follows_engine:
        return TRANSFORMERS
    if device == "cuda":
        return CUDA
    return ENGINE_ATTENTION if level.zero_mismatch else FP32_ATTENTION
