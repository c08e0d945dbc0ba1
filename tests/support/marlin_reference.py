"""Marlin's layout by vLLM's plain PyTorch, one matrix at a time (marlin_utils_test.py, marlin_utils.py)."""

from __future__ import annotations

from typing import Any

import torch

from qarl.kernels.int4 import unpack_int4
from qarl.process import configure_vllm_process


def random_stack(experts: int, rows: int, columns: int, group_size: int) -> dict[str, torch.Tensor]:
    packed = torch.randint(-(2**31), 2**31, (experts, rows, columns // 8)).to(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": torch.randn(experts, rows, columns // group_size).bfloat16(),
    }


def vllm_layout(
    tensors: dict[str, torch.Tensor], group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [E, K/16, 2N] and scales [E, K/g, N] from stacked wire tensors."""
    utils, for_tests = _modules()
    weights: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    for packed, scale in zip(tensors["weight_packed"], tensors["weight_scale"], strict=True):
        codes = unpack_int4(packed).int().t() + 8
        size = tuple(codes.shape)
        weights.append(for_tests.marlin_weights(codes, *size, 4, for_tests.get_weight_perm(4)))
        scales.append(utils.marlin_permute_scales(scale.t().contiguous(), *size, group_size))
    return torch.stack(weights), torch.stack(scales)


def _modules() -> tuple[Any, Any]:
    configure_vllm_process()
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_test

    return marlin_utils, marlin_utils_test
