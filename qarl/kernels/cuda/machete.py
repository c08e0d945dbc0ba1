"""W4A16 by vLLM's Machete with sums over K that are never split, for trainer and engine (quant.kernels=machete).

vLLM calls `machete_mm` without a schedule, and then the order of a sum depends on the number of rows. This kernel names
a schedule and pads the rows so that no sum is split (`machete_schedules.py`). So the engine's fused layers and steps of
a few rows have the bits of the trainer's rows if, as we expect, a sum's bits depend on the order over K alone. No
device has confirmed this: docs/lookup/results/gpu.md lists it.

Weights are padded to a multiple of 128 output channels, so whether a layer can be multiplied depends on K and the group
size alone, which the layers that an engine fuses share. The bias is added to the rounded product, as in vLLM.

A call depends on shapes alone, so a CUDA graph replays it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from qarl.kernels.base import LinearKernel, PreparedWeight, int4_bytes
from qarl.kernels.cuda.machete_schedules import BLOCK, PROCESSORS, padded_channels, plan
from qarl.kernels.cuda.vllm_linears import uint4b8, why_not_here
from qarl.kernels.speed import on_hopper
from qarl.kernels.triton.linears import TritonW4A16Linear
from qarl.schemes.base import INT4_BF16, Scheme
from qarl.schemes.kernel_choice import KernelChoice

_CAPABILITY = (9, 0)
"""Machete runs on this capability alone."""


class MacheteWholeLinear(LinearKernel):
    """`machete_mm` with a schedule and a number of rows that keep sums whole. dX is TritonW4A16Linear's."""

    name = "machete_whole"
    operands = INT4_BF16
    options = (KernelChoice.MACHETE,)
    group_sizes = (64, 128)
    row_invariant = True
    speed = on_hopper("bf16", "vllm_machete", 0.650, 0.721, 0.668)  # of its default schedules
    computes_input_gradient = True
    input_gradient_by = TritonW4A16Linear

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        why_not = why_not_here(device, "machete_mm", capability=_CAPABILITY)
        if why_not:
            return why_not
        if torch.cuda.get_device_capability(device) != _CAPABILITY:
            return "runs on compute capability 9.0 alone"
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        if processors != PROCESSORS:
            return f"its schedules are for {PROCESSORS} multiprocessors (H100 SXM, H200), not {processors}"
        if shape[1] % BLOCK:
            return f"needs K in multiples of {BLOCK}, not {list(shape)}"
        return None

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return int4_bytes(scheme, (padded_channels(rows), columns))

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """Return the weight in Machete's layout, int32 [K/8, N rounded up to 128], and the scales [K/g, N]."""
        from vllm import _custom_ops as ops

        packed = tensors["weight_packed"]
        scale = tensors["weight_scale"]
        more = padded_channels(len(packed)) - len(packed)
        weight = ops.machete_prepack_B(
            F.pad(packed, (0, 0, 0, more)).contiguous().t(),
            a_type=scale.dtype,
            b_type=uint4b8(),
            group_scales_type=scale.dtype,
        )
        return PreparedWeight(weight, scale.t().contiguous())

    @staticmethod
    def linear(
        x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [M, K] BF16 -> [M, N] BF16."""
        from vllm import _custom_ops as ops

        (m, k), n, channels = x.shape, prepared.scale.shape[1], prepared.weight.shape[1]
        if m == 0:
            return x.new_empty(0, n)
        schedule, rows = plan(channels, k, m)
        y: torch.Tensor = ops.machete_mm(
            a=F.pad(x, (0, 0, 0, rows - m)).contiguous(),
            b_q=prepared.weight,
            b_type=uint4b8(),
            b_group_scales=F.pad(prepared.scale, (0, channels - n)).contiguous(),
            b_group_size=k // prepared.scale.shape[0],
            schedule=schedule,
        )
        y = y[:m, :n].contiguous()
        return y if bias is None else y.add_(bias)
