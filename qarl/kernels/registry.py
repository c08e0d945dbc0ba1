"""Choose the kernel for a quantized linear or a layer of experts, and record why.

The order of preference is: the rollout engine's operator on that machine, PyTorch's operator, our Triton kernel (on
GPUs), the exact reference. The choice depends only on scheme, machine and shape, not on measured speed, so a resumed
run uses the same kernels as before.

`quant.kernels` chooses the table: `engine` is `LINEAR_KERNELS`, and the others are `OWN_KERNELS`, whose kernels QaRL's
plugin also gives to the engine (`qarl.rollout.vllm_plugin.own_linears`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.errors import UserError
from qarl.kernels import reference
from qarl.kernels.base import ExpertsKernel, ExpertsShape, LinearKernel
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
from qarl.kernels.cuda.vllm_linears import (
    VllmCutlassFP8Linear,
    VllmCutlassInt8Linear,
    VllmMacheteLinear,
    VllmMarlinLinear,
)
from qarl.kernels.experts import ReferenceExperts, TritonExperts
from qarl.kernels.triton import linears as triton
from qarl.kernels.vllm_experts import (
    CpuExperts,
    VllmCpuBf16Experts,
    VllmCutlassExperts,
    VllmMarlinExperts,
    VllmTritonExperts,
)

LINEAR_KERNELS: dict[str, tuple[type[LinearKernel], ...]] = {
    "w4a16": (
        VllmCpuWNA16Linear,
        VllmMacheteLinear,
        VllmMarlinLinear,
        triton.TritonW4A16Linear,
        triton.TritonInvariantW4A16Linear,
        reference.ReferenceW4A16Linear,
    ),
    "w8a8": (
        VllmCpuInt8TilesLinear,
        VllmCpuInt8Linear,
        VllmCutlassInt8Linear,
        TorchInt8Linear,
        triton.TritonW8A8Linear,
        triton.TritonInvariantW8A8Linear,
        reference.ReferenceW8A8Linear,
    ),
    "fp8": (
        TorchFP8Linear,
        VllmCutlassFP8Linear,
        triton.TritonFP8Linear,
        triton.TritonInvariantFP8Linear,
        reference.ReferenceFP8Linear,
    ),
    "w4a8": (CpuW4A8Linear, reference.ReferenceW4A8Linear),
}
"""The kernels of each scheme, in order of preference."""

EXPERTS_KERNELS: dict[str, tuple[type[ExpertsKernel], ...]] = {
    "w4a16": (CpuExperts, VllmMarlinExperts, TritonExperts, ReferenceExperts),
    "w8a8": (CpuExperts, VllmTritonExperts, TritonExperts, ReferenceExperts),
    "fp8": (CpuExperts, VllmCutlassExperts, VllmTritonExperts, TritonExperts, ReferenceExperts),
}
"""The same for layers of experts."""
BF16_KERNELS: tuple[type[ExpertsKernel], ...] = (VllmCpuBf16Experts, ReferenceExperts)
"""The kernels of experts that are not quantized, in order of preference."""

OWN_KERNELS: dict[str, dict[str, type[LinearKernel]]] = {
    "qarl": {
        "w4a16": triton.TritonInvariantW4A16Linear,
        "w8a8": triton.TritonInvariantW8A8Linear,
        "fp8": triton.TritonInvariantFP8Linear,
        "w4a8": CpuW4A8Linear,
    },
    "dequantized": {"w4a16": DequantizedW4A16Linear},
}
"""`quant.kernels` -> scheme -> the kernel that trainer and engine both run. `prepare` of such a kernel returns a
`PreparedWeight`, whose two tensors the engine keeps as the parameters of a layer."""


def kernels_of(kernels: str, scheme_name: str) -> tuple[type[LinearKernel], ...]:
    """Return the kernels of the table `kernels` (a value of `quant.kernels`) for a scheme, in order of preference."""
    if kernels == "engine":
        return LINEAR_KERNELS.get(scheme_name, ())
    own = OWN_KERNELS[kernels].get(scheme_name)
    return () if own is None else (own,)


@dataclass(frozen=True)
class Choice:
    """The chosen kernel, and a line of text about each kernel that was skipped, with the reason."""

    kernel: Any
    passed_over: tuple[str, ...]

    @property
    def reason(self) -> str:
        return f"{self.kernel.name}" + "".join(f"; not {line}" for line in self.passed_over)


def first_available(
    kernels: Sequence[Any],
    unavailable: Callable[[Any], str | None],
    *,
    force: str | None,
    refusal: str,
    served: str,
) -> Choice:
    """Return the first of `kernels` for which `unavailable` returns None. `force`: name of the only kernel to try.

    If there is none, raise UserError(`refusal`) with all reasons. `served`: the error's words for the weights.
    """
    passed_over: list[str] = []
    for kernel in kernels:
        if force is not None and kernel.name != force:
            continue
        why_not = unavailable(kernel)
        if why_not is None:
            return Choice(kernel, tuple(passed_over))
        passed_over.append(f"{kernel.name}: {why_not}")
    raise UserError(
        refusal,
        why="; ".join(passed_over)
        or f"kernels for {served}: {', '.join(k.name for k in kernels) or 'none'}",
        fix="choose another kernel" if force else "choose another quant.scheme or device",
    )


def choose_linear_kernel(
    scheme_name: str,
    device: torch.device,
    shape: tuple[int, int],
    *,
    group_size: int | None = None,
    force: str | None = None,
    kernels: str = "engine",
) -> Choice:
    """Return the first kernel in order of preference that supports `scheme_name` weights [N, K] on `device`.

    `group_size`: None if the weights have no groups, or to skip the check of group sizes. `force`: name of the only
    kernel to try. `kernels`: a value of `quant.kernels`. If there is no such kernel, raise UserError with the reason
    for each kernel.
    """
    action = f"kernel {force!r} cannot multiply" if force else "no kernel can multiply"
    if kernels != "engine":
        action = f"no kernel of quant.kernels={kernels} can multiply"
    return first_available(
        kernels_of(kernels, scheme_name),
        lambda kernel: (
            kernel.unavailable(scheme_name, device, shape) or _wrong_group(kernel, group_size)
        ),
        force=force,
        refusal=f"{action} by {scheme_name} weights {list(shape)} on {device.type}",
        served=scheme_name,
    )


def _wrong_group(kernel: type[LinearKernel], group_size: int | None) -> str | None:
    sizes = kernel.group_sizes
    if sizes is None or group_size is None or group_size in sizes:
        return None
    return f"supports group sizes {', '.join(map(str, sizes))}, not {group_size}"


def choose_experts_kernel(
    scheme_name: str,
    device: torch.device,
    shape: ExpertsShape,
    *,
    group_size: int | None = None,
    force: str | None = None,
) -> Choice:
    """Return the first kernel that supports these experts, or raise UserError.

    `force`: name of the only kernel to try.
    """
    return first_available(
        BF16_KERNELS if scheme_name == "bf16" else EXPERTS_KERNELS.get(scheme_name, ()),
        lambda kernel: kernel.unavailable(scheme_name, device, shape, group_size),
        force=force,
        refusal=f"no kernel serves {scheme_name} experts on {device.type}",
        served=f"{scheme_name} experts",
    )
