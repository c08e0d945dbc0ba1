"""The kernels of every quantized scheme, in order of preference."""

from __future__ import annotations

from qarl.kernels.base import ExpertsKernel, LinearKernel
from qarl.kernels.registry import experts_kernels_of, kernels_of
from qarl.schemes import get_scheme, scheme_names
from qarl.schemes.kernel_choice import KernelChoice

_QUANTIZED = [name for name in scheme_names() if get_scheme(name).quantized]


def linear_kernels(scheme: str) -> tuple[type[LinearKernel], ...]:
    """Return the kernels that quant.kernels=engine may choose for linears of the scheme with this name."""
    return kernels_of(KernelChoice.ENGINE, get_scheme(scheme).operands)


def experts_kernels(scheme: str) -> tuple[type[ExpertsKernel], ...]:
    """Return the same for layers of experts. It may be empty."""
    return experts_kernels_of(get_scheme(scheme).operands)


LINEAR_KERNELS = [(scheme, kernel) for scheme in _QUANTIZED for kernel in linear_kernels(scheme)]
"""Each quantized scheme's name with each of its kernels of linears."""
EXPERTS_KERNELS = [(scheme, kernel) for scheme in _QUANTIZED for kernel in experts_kernels(scheme)]
"""The same for layers of experts."""
