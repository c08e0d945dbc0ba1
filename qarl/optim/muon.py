"""Muon's update of matrices, as in the `muon-optimizer` package, also of matrices that FSDP2 has sharded by rows.

Two functions can run on different ranks:

    direction        Nesterov momentum. Elements are independent, so a rank computes it on its shard.
    orthogonalized   five Newton-Schulz steps by the package's `zeropower_via_newtonschulz5`. They need a whole matrix.

The package's `muon_update` is not used, because it overwrites the gradient and needs whole parameters on every rank.

A matrix has N rows (outputs) and K columns (inputs). Newton-Schulz brings the singular values near 1: the largest is
then between 1.05 and 1.2, and all but the smallest few are above 0.67. The package multiplies the result by sqrt(max(1,
N / K)). So an update with learning rate lr (`optim.muon_lr`) has

    spectral norm       lr * sqrt(max(1, N / K)) * (1.05 to 1.2)
    root mean square    lr / sqrt(K) * (0.8 to 0.95) over the elements, for every N

docs/do/paper_runs.md compares this lr with the paper's 1e-6.

Under FSDP2 each rank orthogonalizes some of the matrices. With R ranks, R matrices are handled at a time. Each rank
receives the rows of one matrix from all ranks, orthogonalizes it, and sends every rank its rows of the update. Both
exchanges are all-to-alls in BF16. This loses nothing, because Newton-Schulz starts by rounding to BF16 and its result
is BF16. So the result is the same as on a single device. Experts [E, N, K] are sharded by experts. Each rank
orthogonalizes its own in one batch, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from muon import zeropower_via_newtonschulz5
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from qarl.errors import UserError
from qarl.optim.rounding import Region

_STEPS = 5


def use_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates this parameter. It updates matrices, except embeddings and lm_head.

    Stacked expert weights [experts, out, in] count as matrices, because Muon orthogonalizes the last two dimensions.
    """
    if "embed" in name or "lm_head" in name:
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)


def direction(gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """Add `gradient` to `momentum` in place, and return Nesterov's look-ahead. All are FP32 and have the same shape.

    `gradient` is not changed.
    """
    momentum.lerp_(gradient, 1 - beta)
    return gradient.lerp(momentum, beta)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return Muon's update for directions [..., N, K], in BF16: U S V^T with S near 1, times sqrt(max(1, N / K))."""
    rows, columns = matrices.shape[-2:]
    if not matrices.numel():
        return matrices.to(torch.bfloat16)
    update: Tensor = zeropower_via_newtonschulz5(matrices, steps=_STEPS)
    return update.mul_(max(1, rows / columns) ** 0.5)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory. Return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_axis(tensor: Tensor) -> int | None:
    """Return the dimension of the tensor's device mesh over which it is sharded, or None if every rank has all of it.

    Raises:
        UserError: it is sharded over several dimensions of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return None
    placements = tensor.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    sharded = all(isinstance(placements[axis], Shard) for axis in axes)
    if len(axes) > 1 or not sharded:
        raise UserError(
            f"QaRL's optimizer cannot update a parameter with the placements {placements}",
            where="actor_rollout_ref.actor: strategy, fsdp_config",
            why="it supports only parameters that FSDP2 has cut once",
            fix="set actor_rollout_ref.actor.strategy=fsdp2, and train without tensor, sequence or expert parallelism",
        )
    if not axes or tensor.device_mesh.size(axes[0]) == 1:
        return None
    return axes[0]


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return start and stop of each rank's part of a dimension. FSDP2 cuts it like torch.chunk."""
    size = -(-length // parts)
    cuts = [min(rank * size, length) for rank in range(parts + 1)]
    return list(pairwise(cuts))


def region(tensor: Tensor) -> Region:
    """Return the part of the whole tensor that this rank holds."""
    axis = shard_axis(tensor)
    if axis is None:
        return Region.whole(tuple(tensor.shape))
    assert isinstance(tensor, DTensor)
    placement = tensor.placements[axis]
    mesh = tensor.device_mesh
    assert isinstance(placement, Shard)
    of_ranks = bounds(tensor.shape[placement.dim], mesh.size(axis))
    start, stop = of_ranks[mesh.get_local_rank(axis)]
    return Region(tuple(tensor.shape), placement.dim, start, stop)


def rounds(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Return groups of parameters, one parameter for each rank. The matrices of a group have about the same size.

    All ranks get the same order.
    """

    def size(parameter: Parameter) -> tuple[int, tuple[int, ...]]:
        return parameter.numel(), tuple(parameter.shape)

    ordered = sorted(parameters, key=size, reverse=True)
    starts = range(0, len(ordered), ranks)
    return [ordered[start : start + ranks] for start in starts]


def updates(parameters: Sequence[Parameter], directions: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """Yield each parameter with this rank's part of its Muon update, in BF16. All ranks must call this together.

    Args:
        parameters: plain tensors or DTensors, [N, K] or [experts, N, K].
        directions: a function from a parameter to its direction (`direction`) on this rank.
    """
    spread = [p for p in parameters if p.ndim == 2 and shard_axis(p) is not None]
    for parameter in parameters:
        if parameter.ndim != 2 or shard_axis(parameter) is None:
            yield parameter, orthogonalized(directions(parameter))
    groups: dict[Any, list[Parameter]] = {}
    for parameter in spread:
        groups.setdefault(_group(parameter), []).append(parameter)
    for group, members in groups.items():
        for matrices in rounds(members, dist.get_world_size(group)):
            parts = [directions(parameter) for parameter in matrices]
            yield from zip(matrices, _exchange(matrices, parts, group), strict=True)


def _group(parameter: Tensor) -> Any:
    axis = shard_axis(parameter)
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh.get_group(axis)


def _exchange(matrices: Sequence[Tensor], parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Return this rank's rows of the updates of `matrices`. Rank i of the group orthogonalizes matrix i.

    `parts`: this rank's rows of the directions, FP32.
    """
    ranks = dist.get_world_size(group)
    me = dist.get_rank(group)
    sizes = [part.numel() for part in parts]
    idle = ranks - len(parts)
    sizes_of_ranks = sizes + [0] * idle
    rows = columns = 0
    if me < len(matrices):
        rows, columns = matrices[me].shape
    collected = [(stop - start) * columns for start, stop in bounds(rows, ranks)]
    flat = [part.reshape(-1).to(torch.bfloat16) for part in parts]
    sent = torch.cat(flat)
    whole = sent.new_empty(rows * columns)
    dist.all_to_all_single(whole, sent, collected, sizes_of_ranks, group=group)
    update = orthogonalized(whole.view(rows, columns)).reshape(-1) if rows else whole
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, update, sizes_of_ranks, collected, group=group)
    updates_of_rank = zip(received.split(sizes), parts, strict=True)
    return [values.view(part.shape) for values, part in updates_of_rank]
