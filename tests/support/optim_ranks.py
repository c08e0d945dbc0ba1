"""One of four gloo ranks that update sharded parameters with `MuonAdamW`: run by tests/unit/optim/test_shards.py.

    optim_ranks.py OUTPUT_FILE

Every case of `CASES` runs on meshes of 1, 2, 3, 4 and 2 x 2 ranks (the last as verl's hybrid sharding: two copies of
two shards). Rank 0 writes, for each case and mesh, the whole parameters and states after `STEPS` updates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from qarl.optim.muon_adamw import MuonAdamW

RANKS, STEPS, RESUMED_AFTER = 4, 3, 2
SHAPES = {
    "model.embed_tokens.weight": (21, 16),
    "model.layers.0.self_attn.q_proj.weight": (24, 16),
    "model.layers.0.self_attn.k_proj.weight": (
        7,
        16,
    ),  # uneven, and the fourth rank has a single row
    "model.layers.0.self_attn.o_proj.weight": (16, 24),
    "model.layers.0.self_attn.v_proj.weight": (7, 16),  # the shape of k_proj
    "model.layers.0.mlp.gate.weight": (2, 16),  # fewer rows than ranks
    "model.layers.0.mlp.experts.gate_up_proj": (3, 24, 16),  # fewer experts than ranks
    "model.layers.0.mlp.experts.down_proj": (5, 16, 12),
    "model.layers.1.self_attn.q_proj.weight": (40, 33),
    "model.layers.0.input_layernorm.weight": (17,),
    "lm_head.weight": (21, 16),
}
BASE = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "seed": 3}
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "muon, fp32": (torch.float32, BASE | {"muon_lr": 0.02, "muon_momentum": 0.9}),
    "muon, bf16": (torch.bfloat16, BASE | {"muon_lr": 0.02, "muon_momentum": 0.9}),
    "adamw, bf16": (torch.bfloat16, BASE),
}


def values(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters (step -1), or the gradients of a step."""
    random = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


def train(
    dtype: torch.dtype, settings: dict[str, Any], mesh: DeviceMesh | None, *, resume: bool
) -> Any:
    """Return the whole parameters and states after `STEPS` updates. `mesh`: None for plain tensors.

    `resume`: continue with a new optimizer, from the saved state, after `RESUMED_AFTER` of them.
    """

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])

    parameters = {
        name: torch.nn.Parameter(place(tensor)) for name, tensor in values(-1, dtype).items()
    }
    optimizer = MuonAdamW(parameters.items(), **settings)
    for step in range(STEPS):
        if resume and step == RESUMED_AFTER:
            state, optimizer = (
                optimizer.state_dict(),
                MuonAdamW(parameters.items(), **settings | {"seed": 9}),
            )
            optimizer.load_state_dict(state)
        for name, gradient in values(step, torch.float32).items():
            parameters[name].grad_dtype = None
            parameters[name].grad = place(gradient)
        optimizer.step()
    states = {
        f"{name}.{key}": whole(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    return {name: whole(parameter.detach()) for name, parameter in parameters.items()} | states


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def meshes() -> Iterator[tuple[str, DeviceMesh]]:
    for ranks in range(1, RANKS + 1):
        yield str(ranks), DeviceMesh("cpu", torch.arange(ranks))
    yield "2 x 2", DeviceMesh("cpu", torch.arange(4).view(2, 2))


def main(output: str) -> None:
    dist.init_process_group("cpu:gloo")
    states = {}
    for name, mesh in meshes():
        if mesh.get_coordinate() is not None:
            for case, (dtype, settings) in CASES.items():
                states[case, name] = train(dtype, settings, mesh, resume=name == "3")
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save(states, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
