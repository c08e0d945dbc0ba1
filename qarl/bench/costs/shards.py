"""One rank's part of a weight, as FSDP2 quantizes, sends and receives it, on the meta device.

`qarl.quant.weight_shard` does the work. FSDP2 itself is stood in for by what the shard reads of a DTensor, and by the
three kernels of a gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py): one copies all tensors of a block
into one buffer, NCCL gathers the buffer, and one copies the tensors out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from qarl.bench.costs.counting import Counting
from qarl.quant.scheme import Scheme
from qarl.quant.weight_shard import WeightShard


def make_shard(shape: tuple[int, ...], scheme: Scheme, kernel: Any, ranks: int) -> WeightShard:
    """Return rank 0's part of a weight of `shape` that `ranks` ranks share. Its FP32 master is there."""
    mesh = SimpleNamespace(ndim=1, size=lambda dim=0: ranks)
    master = torch.empty(-(-shape[0] // ranks), *shape[1:], device="meta")
    parameter: Any = SimpleNamespace(placements=(Shard(0),), device_mesh=mesh, _version=0, _local_tensor=master)
    shard = WeightShard("weight", scheme, shape, layout=getattr(kernel, "layout", None))
    shard.attach(parameter)
    return shard


def gather(shards: Sequence[WeightShard], counter: Counting | None = None) -> list[dict[str, torch.Tensor]]:
    """Gather `shards`, which are quantized, as one block, and return the tensors that the layer reads of each.

    `counter`: counts the kernels, if given."""
    mesh = shards[0].parameter.device_mesh
    ranks = mesh.size()
    sent = [shard.fsdp_pre_all_gather(mesh)[0] for shard in shards]
    received = [tuple(tensor.new_empty(ranks * len(tensor), *tensor.shape[1:]) for tensor in each) for each in sent]
    if counter is not None:
        flat = sum(tensor.nbytes for each in sent for tensor in each)
        source = torch.empty(flat, dtype=torch.uint8, device="meta")
        target = torch.empty(ranks * flat, dtype=torch.uint8, device="meta")
        counter.launched("all_gather_copy_in", [source, *(tensor for each in sent for tensor in each)])
        counter.launched("all_gather", [source, target])
        counter.launched("split_with_sizes_copy", [target, *(tensor for each in received for tensor in each)])
    made = []
    for shard, tensors in zip(shards, received, strict=True):
        wrapped = shard.fsdp_post_all_gather(tensors, None, torch.bfloat16)
        assert wrapped is not None
        made.append(wrapped[0].tensors)
    return made
