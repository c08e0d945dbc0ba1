"""Equality of tensors of any dtype. PyTorch cannot compare float8 tensors on a CPU, so their bytes are compared."""

from __future__ import annotations

import torch


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
