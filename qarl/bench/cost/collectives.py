"""Seconds of collectives, by the usual ring counts: of S bytes on N GPUs each GPU sends and receives S (N-1)/N for an
all-gather or reduce-scatter, twice that for an all-reduce. NCCL lays as many rings as a node has adapters, so that each
adapter carries its share of the S bytes: between nodes a ring's rate is that of all adapters of a node together, or
NVLink's where that is slower. Measured so: bus bandwidth near the sum of the adapters' rates (NVIDIA/nccl #495, 75 of
100 GB/s with 8 adapters of 12.5; NVIDIA/nccl-tests #100, 91 of 100 GB/s with 4 of 25).

Besides its bytes every call takes its latency, in a node or between nodes. An engine reduces few bytes in a node by
vLLM's own kernel, which starts faster than NCCL's two passes and carries bytes more slowly. On H100s that kernel took,
on 2, 4 and 8 GPUs, 9 us at 4 KiB; 13, 21 and 24 us at 256 KiB; 27, 40 and 45 us at 1 MiB (sgl-project/sglang #2904,
without CUDA graphs); NCCL on 8 took 59 us at 4 MiB and 136 us at 16 MiB (ByteDance-Seed/Triton-distributed #57).
"""

from __future__ import annotations

from qarl.bench.cost.ceilings import Links
from qarl.bench.cost.parts import Part
from qarl.errors import UserError


def all_gather(links: Links | None, size: float, gpus: int, name: str = "all-gather", calls: float = 1.0) -> Part:
    """Every GPU gets `size` bytes, of which it had its share; in `calls` pieces."""
    if gpus == 1 or not size:
        return Part(name, 0.0, "link")
    bandwidth, latency = _slowest(links, gpus)
    return Part(name, calls * latency + size * (gpus - 1) / gpus / bandwidth, "link")


def reduce_scatter(links: Links | None, size: float, gpus: int, calls: float = 1.0) -> Part:
    """The sums over GPUs of `size` bytes, a share to each."""
    return all_gather(links, size, gpus, "reduce-scatter", calls)


def all_reduce(links: Links | None, size: float, gpus: int) -> Part:
    """The sum over GPUs of `size` bytes to all, by what is faster: NCCL, or within a node vLLM's kernel."""
    if gpus == 1 or not size:
        return Part("all-reduce", 0.0, "link")
    bandwidth, latency = _slowest(links, gpus)
    assert links is not None
    sent, start = 2 * size * (gpus - 1) / gpus, 2 * latency
    if gpus <= links.gpus_per_node:
        start = min(start, links.reduce_latency + sent / links.reduce_rate)
    return Part("all-reduce", start + sent / bandwidth, "link")


def _slowest(links: Links | None, gpus: int) -> tuple[float, float]:
    """(bytes/s, latency)."""
    if links is None:
        raise UserError("the ceilings have no links between GPUs", where=f"gpus={gpus}", fix="gpus=1, or gpu=h100")
    if gpus <= links.gpus_per_node:
        return links.node, links.node_latency
    fewest = gpus % links.gpus_per_node or links.gpus_per_node  # on the last node
    return min(links.node, fewest * links.network), links.network_latency
