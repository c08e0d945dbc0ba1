"""One weight to measure, and its low-bit tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qarl.bench.kernels.arguments import Arguments
from qarl.kernels.cuda.vllm_ops import VllmMarlinLinear
from qarl.kernels.registry import LINEAR_KERNELS, LinearKernel
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.scheme import get_scheme


class Layer:
    """One BF16 weight [N, K], and its low-bit tensors by scheme.
    `failures`: tensors that could not be made, and why."""

    def __init__(self, weight: torch.Tensor, arguments: Arguments) -> None:
        self.weight, self.arguments = weight, arguments
        self.quantized: dict[str, QuantizedTensor] = {}
        self.failures: dict[str, str] = {}
        for name in arguments.scheme:
            scheme = get_scheme(name, arguments.group_size)
            if why_not := scheme.check_shape("the layer", *self.shape):
                self.failures[name] = why_not
            else:
                self.quantized[name] = quantize(weight, scheme)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def kernels(self, scheme: str) -> Iterator[type[LinearKernel]]:
        """Yield the registry's kernels that support this layer, except float64 references on GPUs, which are slow."""
        for kernel in LINEAR_KERNELS[scheme]:
            sizes = getattr(kernel, "group_sizes", None)
            fits = sizes is None or not get_scheme(scheme).group_size or self.arguments.group_size in sizes
            slow = kernel.name == "reference" and self.weight.is_cuda and scheme != "w4a16"  # float64 products
            if fits and not slow and self._serves(kernel, scheme):
                yield kernel

    def _serves(self, kernel: type[LinearKernel], scheme: str) -> bool:
        """Return whether to measure `kernel`. Marlin is measured even if vLLM prefers Machete."""
        why_not = kernel.unavailable(scheme, self.weight.device, self.shape)
        machete = kernel is VllmMarlinLinear and why_not == "here vLLM itself runs MacheteLinearKernel"
        return why_not is None or machete
