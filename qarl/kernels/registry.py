"""Choose the kernel for a quantized linear or a layer of experts, and record why.

The order of preference is: the rollout engine's operator on that machine, PyTorch's operator, our Triton kernel (on
GPUs), the exact reference. The choice depends only on scheme, machine and shape, not on measured speed, so a resumed
run uses the same kernels as before.

A kernel says which operands it multiplies, and which values of `quant.kernels` may choose it. Those that another value
than `engine` chooses QaRL's plugin also gives to the engine (`qarl.rollout.vllm_plugin.own_linears`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from qarl.errors import UserError, alternatives
from qarl.kernels.base import ExpertsKernel, ExpertsShape, Kernel, LinearKernel
from qarl.kernels.cpu.vllm_experts import CpuExperts, CpuOwnExperts, VllmCpuBf16Experts
from qarl.kernels.cuda.vllm_experts import (
    VllmCutlassExperts,
    VllmMarlinExperts,
    VllmTritonExperts,
)
from qarl.kernels.experts import ReferenceExperts, TritonExperts, TritonInvariantExperts
from qarl.kernels.linear_kernels import LINEAR_KERNELS
from qarl.schemes.base import Operands, Scheme
from qarl.schemes.kernel_choice import KernelChoice

AnyKernel = TypeVar("AnyKernel", bound=type[Kernel])

EXPERTS_KERNELS: list[type[ExpertsKernel]] = [
    CpuExperts,
    CpuOwnExperts,
    VllmCpuBf16Experts,
    VllmMarlinExperts,
    VllmCutlassExperts,
    VllmTritonExperts,
    TritonExperts,
    TritonInvariantExperts,
    ReferenceExperts,
]
"""All kernels of layers of experts. Among those with the same operands, the order is that of preference."""


def register(kernel: AnyKernel) -> AnyKernel:
    """Prefer `kernel` to all others with its operands and options, and return it.

    A plugin calls this (`qarl.plugins`). With the option "engine", the kernel must give the bits of the engine's."""
    if issubclass(kernel, ExpertsKernel):
        EXPERTS_KERNELS.insert(0, kernel)
    elif issubclass(kernel, LinearKernel):
        LINEAR_KERNELS.insert(0, kernel)
    return kernel


def unregister(name: str) -> None:
    """Remove the kernels called `name`."""
    LINEAR_KERNELS[:] = [kernel for kernel in LINEAR_KERNELS if kernel.name != name]
    EXPERTS_KERNELS[:] = [kernel for kernel in EXPERTS_KERNELS if kernel.name != name]


def kernels_of(kernels: KernelChoice, operands: Operands) -> tuple[type[LinearKernel], ...]:
    """Return the kernels that `kernels`, a value of quant.kernels, may choose, in order of preference."""
    return tuple(
        kernel
        for kernel in LINEAR_KERNELS
        if kernel.operands == operands and kernels in kernel.options
    )


def reference_kernel(operands: Operands) -> type[LinearKernel]:
    """Return the kernel that any machine has."""
    return next(kernel for kernel in kernels_of(KernelChoice.ENGINE, operands) if kernel.reference)


def own_kernel(kernels: KernelChoice, operands: Operands) -> type[LinearKernel] | None:
    """Return the kernel that trainer and engine both run if `kernels` is not the engine's own."""
    if kernels.by_engine:
        return None
    return next(iter(kernels_of(kernels, operands)), None)


def least_rows(kernels: KernelChoice, operands: Operands) -> int:
    """Return the rows that an engine shall give its linears at least, so that a row does not depend on their number."""
    return max((kernel.least_rows for kernel in kernels_of(kernels, operands)), default=1)


def experts_kernels_of(
    operands: Operands, kernels: KernelChoice = KernelChoice.ENGINE
) -> tuple[type[ExpertsKernel], ...]:
    """Return the kernels of experts with these operands that `kernels`, a value of quant.kernels, may choose, in order
    of preference."""
    return tuple(
        kernel
        for kernel in EXPERTS_KERNELS
        if kernels in kernel.options and operands in kernel.all_operands()
    )


def presumed_experts_kernel(
    operands: Operands, kernels: KernelChoice, device_type: str
) -> type[ExpertsKernel] | None:
    """Return the kernel of experts that trainer and engine prefer on a machine that is not here, or None."""
    candidates = experts_kernels_of(operands, kernels)
    return next((kernel for kernel in candidates if kernel.device_type == device_type), None)


def check_registered(scheme: Scheme, kernels: KernelChoice) -> None:
    """Raise UserError if no kernel of linears that `kernels` may choose has the operands of `scheme`, whatever the
    machine."""
    operands = scheme.operands
    if kernels_of(kernels, operands):
        return
    others = [choice for choice in KernelChoice if kernels_of(choice, operands)]
    fix = f"set quant.kernels={alternatives(others)}" if others else _REGISTER
    known = {kernel.operands for kernel in LINEAR_KERNELS}
    raise _not_registered(scheme, f"of quant.kernels={kernels} ", known, fix)


def check_experts_registered(scheme: Scheme, kernels: KernelChoice = KernelChoice.ENGINE) -> None:
    """Raise UserError if no kernel of experts that `kernels` may choose has the operands of `scheme`, whatever the
    machine."""
    operands = scheme.operands
    if experts_kernels_of(operands, kernels):
        return
    known = {each for k in EXPERTS_KERNELS if kernels in k.options for each in k.all_operands()}
    others = [choice for choice in KernelChoice if experts_kernels_of(operands, choice)]
    fix = f"choose another quant.scheme or a dense model; or {_REGISTER}"
    which = "of experts "
    if not kernels.by_engine:
        which += f"of quant.kernels={kernels} "
        fix = f"set quant.kernels={alternatives(others)}" if others else fix
    raise _not_registered(scheme, which, known, fix)


_REGISTER = (
    "register a kernel with these operands in the scheme's file, as examples/own_kernel.py does "
    "(qarl.kernels.registry.register)"
)


def _not_registered(scheme: Scheme, which: str, known: set[Operands], fix: str) -> UserError:
    weights, activations = scheme.operands
    return UserError(
        f"no kernel {which}multiplies {weights} weights by {activations} activations",
        where=f"quant.scheme={scheme.name}",
        why="kernels multiply " + ", ".join(f"{w} by {a}" for w, a in sorted(known))
        if known
        else f"there is no kernel {which}".rstrip(),
        fix=fix,
    )


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
    weights: str,
) -> Choice:
    """Return the first of `kernels` for which `unavailable` returns None. `force`: name of the only kernel to try.

    If there is none, raise UserError(`refusal`) with all reasons. `weights`: the error's words for the weights.
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
        or f"kernels for {weights}: {', '.join(kernel.name for kernel in kernels)}",
        fix="choose another kernel" if force else "choose another quant.scheme or device",
    )


def choose_linear_kernel(
    scheme: Scheme,
    device: torch.device,
    shape: tuple[int, int],
    *,
    force: str | None = None,
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> Choice:
    """Return the first kernel in order of preference that multiplies weights [N, K] of `scheme` on `device`.

    `force`: name of the only kernel to try. `kernels`: a value of quant.kernels. If there is no such kernel, raise
    UserError with the reason for each kernel.
    """
    check_registered(scheme, kernels)
    action = f"kernel {force!r} cannot multiply" if force else "no kernel can multiply"
    if not kernels.by_engine:
        action = f"no kernel of quant.kernels={kernels} can multiply"
    return first_available(
        kernels_of(kernels, scheme.operands),
        lambda kernel: kernel.refusal(scheme, device, shape),
        force=force,
        refusal=f"{action} by {scheme.name} weights {list(shape)} on {device.type}",
        weights=scheme.name,
    )


def choose_experts_kernel(
    scheme: Scheme,
    device: torch.device,
    shape: ExpertsShape,
    *,
    force: str | None = None,
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> Choice:
    """Return the first kernel that supports these experts, or raise UserError.

    `force`: name of the only kernel to try. `kernels`: a value of quant.kernels.
    """
    check_experts_registered(scheme, kernels)
    asked = "" if kernels.by_engine else f" of quant.kernels={kernels}"
    return first_available(
        experts_kernels_of(scheme.operands, kernels),
        lambda kernel: kernel.unavailable(scheme, device, shape),
        force=force,
        refusal=f"no kernel{asked} serves {scheme.name} experts on {device.type}",
        weights=f"{scheme.name} experts",
    )
