"""Copies of everything in an engine's model, and how many tensors of two copies differ."""

from __future__ import annotations

import torch


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter and buffer, under every name that it has."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """Return the number of tensors that are not equal byte for byte, or that only one of the two has."""

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return len(a.keys() ^ b.keys()) + sum(not torch.equal(raw(a[name]), raw(b[name])) for name in a.keys() & b.keys())
