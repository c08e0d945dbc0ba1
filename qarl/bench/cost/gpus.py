"""Ceilings of GPUs that are elsewhere: data sheets times stated efficiencies. All of it is assumed until it is
measured, and says so (`Ceilings.assumed`).

Data sheets (dense rates, without sparsity): NVIDIA H100, H200 and A100 Tensor Core GPU datasheets, SXM; the H800 is an
H100 with 400 GB/s of NVLink. InfiniBand: one adapter a GPU, 400 Gb/s (H) or 200 Gb/s (A), as in NVIDIA's DGX systems.
"""

from __future__ import annotations

from dataclasses import dataclass

from qarl.bench.cost.ceilings import (
    Block,
    Ceilings,
    EngineCost,
    HeadCost,
    Links,
    OptimizerCost,
    Product,
    PublishCost,
    QuantizeCost,
)

ROWS = tuple(2**i for i in range(17))


@dataclass(frozen=True)
class DataSheet:
    """FLOP/s (0: no tensor cores for it), bytes, and bytes/s; NVLink and network in one direction."""

    bf16: float
    int8: float
    fp8: float
    memory: float
    memory_bytes: int
    nvlink: float
    network: float


SHEETS = {
    "h100": DataSheet(989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 450e9, 50e9),
    "h200": DataSheet(989.4e12, 1978.9e12, 1978.9e12, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h800": DataSheet(989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 200e9, 50e9),
    "a100": DataSheet(312e12, 624e12, 0.0, 2.039e12, 80 * 10**9, 300e9, 25e9),
}

EFFICIENCY = {"bf16": 0.65, "w4a16": 0.55, "w8a8": 0.50, "fp8": 0.50}
"""Of the tensor cores' rate in a large product: what cuBLAS reaches in BF16; unpacking int4 costs some of that; 8 bits
with their scales reach 1.5 times BF16, where 2 are possible."""
MEMORY, LINK, ATTENTION, ATTENTION_BACKWARD = 0.8, 0.8, 0.5, 0.4
"""Of bytes/s of memory and of links; of the BF16 rate in attention."""
LATENCY = 2e-5, 4e-5, 1e-5
"""Seconds: of an all-gather or reduce-scatter in a node, and between nodes (a guess); of vLLM's own all-reduce."""
REDUCE_RATE = 60e9
"""Bytes/s, beside those of the link, at which that all-reduce slows down as it grows: with `LATENCY` it gives public
times of H100s to a quarter, see `qarl.bench.cost.collectives`."""
TRAINER_CALL, ENGINE_CALL = 20e-6, 0.0
"""Seconds a product takes to launch; the engine replays CUDA graphs, whose kernels are counted in `LAYER`."""
STEP, STEP_SEQUENCE, LAYER, REQUEST, REQUEST_SEQUENCE = 2e-3, 1e-5, 3e-5, 1e-2, 1e-4
"""Seconds of vLLM's scheduler and sampler a step, and for each sequence; of a layer's ten or so replayed kernels; of a
call of generate, and for each response."""
TRAFFIC = {
    "forward": (50.0, 10.0, 20.0, 20.0),
    "forward_grad": (50.0, 10.0, 20.0, 20.0),
    "backward": (100.0, 20.0, 30.0, 40.0),
}
"""Bytes a token for each element of hidden, intermediate and attention width, and of the normed queries and keys, that
transformers' unfused operations read and write."""
BLOCK_CALL = 4e-4
"""Seconds of a block's other launches; hidden behind the GPU's work where that takes longer, counted all the same."""


def assumed_ceilings(gpu: str) -> Ceilings:
    """Of one of `SHEETS`."""
    sheet = SHEETS[gpu]
    bandwidth = MEMORY * sheet.memory
    return Ceilings(
        device=f"{gpu.upper()} SXM (assumed)",
        assumed=True,
        copy_bytes_per_s=bandwidth,
        products=_products(sheet, bandwidth),
        blocks={level: _blocks(sheet, bandwidth) for level in ("off", "model")},
        engine=EngineCost(
            step=STEP,
            step_sequence=STEP_SEQUENCE,
            layer=LAYER,
            layer_sequence=0.0,
            logit=20 / bandwidth,
            request=REQUEST,
            request_sequence=REQUEST_SEQUENCE,
            token_hidden=16 / bandwidth,
            token_intermediate=6 / bandwidth,
            token_width=8 / bandwidth,
            decode_key=4 / (ATTENTION * sheet.bf16),
            decode_kv=2 / bandwidth,
            prefill_pair=4 / (ATTENTION * sheet.bf16),
        ),
        head=HeadCost(30 / bandwidth, 30 / bandwidth, 40 / bandwidth),
        optimizer=((1.0, OptimizerCost(*(size / bandwidth for size in (6.0, 10.0, 12.0, 60.0, 70.0, 4.0)))),),
        quantize={
            name: QuantizeCost(quantize=5 / bandwidth, prepare=3 / bandwidth, dequantize=4 / bandwidth)
            for name in ("w4a16", "w8a8", "fp8")
        },
        publish=PublishCost(
            call=2e-5,
            validate=2 / bandwidth,
            transfer=3 / bandwidth,
            apply=dict.fromkeys(("bf16", "w4a16", "w8a8", "fp8"), 4 / bandwidth),
            tied=((1.0, 4 / bandwidth),),
            untied=((1.0, 8 / bandwidth),),
        ),
        memory_bytes=sheet.memory_bytes,
        links=Links(LINK * sheet.nvlink, LINK * sheet.network, 8, *LATENCY, REDUCE_RATE),
    )


def _products(sheet: DataSheet, bandwidth: float) -> dict[str, Product]:
    """A roofline: a product takes as long as its arithmetic or as its weights' way from memory, whichever is longer,
    and its activations' way. The backward is two BF16 products with a dequantized weight, whatever the scheme."""
    wire = {"bf16": 2.0, "w4a16": 0.516, "w8a8": 1.0, "fp8": 1.0}
    peak = {"bf16": sheet.bf16, "w4a16": sheet.bf16, "w8a8": sheet.int8, "fp8": sheet.fp8 or sheet.bf16}
    found = {}
    for scheme, size in wire.items():
        rate = EFFICIENCY[scheme if scheme != "fp8" or sheet.fp8 else "w4a16"] * peak[scheme]
        feature = (3.5 if scheme in ("w8a8", "fp8") else 2.0) / bandwidth
        forward = [(m, feature * m, max(size / bandwidth, 2 * m / rate)) for m in ROWS]
        plain = EFFICIENCY["bf16"] * sheet.bf16
        backward = [(m, 2 * feature * m, 2 * max(2.0 / bandwidth, 2 * m / plain)) for m in ROWS]
        found[f"engine forward {scheme}"] = Product.of([(m, ENGINE_CALL, f, w) for m, f, w in forward])
        found[f"trainer forward {scheme}"] = Product.of([(m, TRAINER_CALL, f, w) for m, f, w in forward])
        found[f"trainer backward {scheme}"] = Product.of([(m, 2 * TRAINER_CALL, f, w) for m, f, w in backward])
    for direction in ("forward", "backward"):
        found[f"trainer {direction} head"] = found[f"trainer {direction} bf16"]
    return found


def _blocks(sheet: DataSheet, bandwidth: float) -> dict[str, Block]:
    """Causal attention is 2 T FLOP a token and element of the query width, 2.5 times that in the backward. Levels above
    `linears` are not built for CUDA: `model` is taken as `off`."""
    found = {}
    for direction, traffic in TRAFFIC.items():
        back = direction == "backward"
        rate = (ATTENTION_BACKWARD if back else ATTENTION) * sheet.bf16
        hidden, intermediate, width, normed = (size / bandwidth for size in traffic)
        attention = ((1.0, (5.0 if back else 2.0) / rate),)
        found[direction] = Block(BLOCK_CALL * (2 if back else 1), hidden, intermediate, width, normed, attention)
    return found
