"""Which kernel serves a quantized linear, and why.

The choice depends on scheme, device and shape alone and is never timed at run time, so a resumed run multiplies with
the kernels it started with. First the operator the rollout engine itself uses on that device, then the exact
reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qarl.errors import UserError
from qarl.kernels.reference import ReferenceLinear
from qarl.kernels.vllm_ops import VllmCpuWNA16Linear


class LinearKernel(Protocol):
    """y = x Q(W)^T + b on 2-D activations; `prepare` runs once per optimizer step, `linear` on every forward."""

    name: str

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        """Why this kernel cannot serve the scheme on weights of `shape` [N, K] here, or None when it can."""
        ...

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> Any:
        """The wire tensors of one weight in the layout `linear` reads."""
        ...

    @staticmethod
    def linear(x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor: ...


LINEAR_KERNELS: tuple[type[LinearKernel], ...] = (VllmCpuWNA16Linear, ReferenceLinear)


@dataclass(frozen=True)
class Choice:
    """The chosen kernel, and one line per kernel that was passed over with its reason."""

    kernel: type[LinearKernel]
    passed_over: tuple[str, ...]

    @property
    def reason(self) -> str:
        return f"{self.kernel.name}" + "".join(f"; not {line}" for line in self.passed_over)


def choose_linear_kernel(
    scheme_name: str,
    device: torch.device,
    shape: tuple[int, int],
    *,
    kernels: Sequence[type[LinearKernel]] = LINEAR_KERNELS,
) -> Choice:
    """The first kernel of the preference order that can serve `scheme_name` weights of `shape` [N, K] on `device`."""
    passed_over: list[str] = []
    for kernel in kernels:
        why_not = kernel.unavailable(scheme_name, device, shape)
        if why_not is None:
            return Choice(kernel, tuple(passed_over))
        passed_over.append(f"{kernel.name}: {why_not}")
    raise UserError(
        f"no kernel multiplies by {scheme_name} weights {list(shape)} on {device.type}",
        why="; ".join(passed_over),
        fix="choose another quant.scheme or device",
    )
