"""The kernels of linears, in the order of preference.

A kernel says the rest of itself (`LinearKernel`). `qarl.kernels.registry` chooses among them. Kernels of experts that
multiply each expert as a linear find theirs here (`LinearKernel.multiplies_experts`).
"""

from __future__ import annotations

from qarl.kernels import reference
from qarl.kernels.base import LinearKernel
from qarl.kernels.cpu.torch_linears import (
    CpuW4A8Linear,
    DequantizedW4A16Linear,
    TorchFP8Linear,
    TorchInt8Linear,
)
from qarl.kernels.cpu.vllm_linears import (
    VllmCpuInt8Linear,
    VllmCpuInt8TilesLinear,
    VllmCpuWNA16Linear,
)
from qarl.kernels.cuda.machete import MacheteWholeLinear
from qarl.kernels.cuda.vllm_linears import (
    VllmCutlassFP8Linear,
    VllmCutlassInt8Linear,
    VllmMacheteLinear,
    VllmMarlinLinear,
)
from qarl.kernels.triton import linears as triton
from qarl.schemes.base import Operands

LINEAR_KERNELS: list[type[LinearKernel]] = [
    VllmCpuWNA16Linear,
    VllmMacheteLinear,
    VllmMarlinLinear,
    MacheteWholeLinear,
    triton.TritonW4A16Linear,
    triton.TritonInvariantW4A16Linear,
    DequantizedW4A16Linear,
    reference.ReferenceW4A16Linear,
    VllmCpuInt8TilesLinear,
    VllmCpuInt8Linear,
    VllmCutlassInt8Linear,
    TorchInt8Linear,
    triton.TritonW8A8Linear,
    reference.ReferenceW8A8Linear,
    TorchFP8Linear,
    VllmCutlassFP8Linear,
    triton.TritonFP8Linear,
    triton.TritonInvariantFP8Linear,
    reference.ReferenceFP8Linear,
    CpuW4A8Linear,
    reference.ReferenceW4A8Linear,
]
"""All kernels of linears. Among those with the same operands, the order is that of preference."""


def multiply_experts(operands: Operands) -> list[type[LinearKernel]]:
    """Return the kernels with these operands that multiply experts, too, in order of preference."""
    kernels = (kernel for kernel in LINEAR_KERNELS if kernel.operands == operands)
    return [kernel for kernel in kernels if kernel.multiplies_experts]
