"""What the plugin gives to vLLM on a GPU for mixtures of experts, and its registration.

    QaRLTensorsConfig   vLLM's compressed-tensors config, but these layers get the methods below
    OwnExpertsMethod    low-bit experts by QaRL's own kernel, if `quant.kernels` asks for it: W4A16, W8A8 and FP8
    PaddedFp8Method     vLLM's FP8 experts, which CUTLASS multiplies, called with at least 65 pairs of token and expert
    RouterMethod        the router, by the product that the trainer runs too (`qarl.kernels.triton.router`)

The first is for engines that were asked for QaRL's kernels (`engine_arguments`), the last two for engines whose
arithmetic the trainer follows (levels `model` and `exact`). All other engines in the process get vLLM's own classes.
The kernels are called inside vLLM's operator `moe_forward`, so torch.compile does not see them.

These internals of vLLM are used, which both supported releases have, beside those of `expert_weights.py`:

    register_quantization_config
        a config registered under a built-in name replaces vLLM's
    CompressedTensorsConfig.get_quant_method(layer, prefix)
    CompressedTensorsW8A8Fp8MoEMethod
        its constructor, attributes `weight_quant`, `input_quant`, `moe` and `experts_cls`, and `apply`
    FusedMoEMethodBase
        `apply`, `process_weights_after_loading`, `get_fused_moe_quant_config`; `supports_internal_mk`, which is true of
        methods that need no kernel made for them
    UnquantizedLinearMethod.apply
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501  a module's name
    CompressedTensorsW8A8Fp8MoEMethod,
)

from qarl.kernels.base import ExpertsKernel, PreparedStacks, Tensors, with_least_pairs
from qarl.kernels.registry import EXPERTS_KERNELS
from qarl.kernels.triton.router import router_logits
from qarl.quant.convert import ROUTERS
from qarl.rollout.kernel_request import is_followed
from qarl.rollout.publish.experts import STORED
from qarl.rollout.vllm_plugin.expert_weights import LowBitWeights, scheme_of_experts
from qarl.rollout.vllm_plugin.own_linears import requested


def register() -> None:
    """Put the config into vLLM's registry."""
    register_quantization_config("compressed-tensors")(QaRLTensorsConfig)


class OwnExpertsMethod(LowBitWeights):
    """The experts of one layer by QaRL's kernel, on tensors that its `prepare` makes."""

    device_type = "cuda"

    @property
    def supports_internal_mk(self) -> bool:
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return nothing: QaRL's kernel applies the scales."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.write(layer, *self.loaded(layer))

    def write(self, layer: Any, gate_up: Tensors, down: Tensors) -> None:
        """Replace the weights by published tensors, stacked over experts: gate_up [E, 2I, ...], down [E, H, ...].

        They stay at their addresses, which a CUDA graph may have captured."""
        prepared = self.kernel.prepare(gate_up, down, self.scheme.operands)
        stacks = (prepared.gate_up, prepared.down)
        for stack, tensors in zip(STORED.values(), stacks, strict=True):
            for name, tensor in tensors.items():
                parameter = getattr(layer, f"{stack}_{name}")
                if tensor.data_ptr() != parameter.data_ptr():
                    parameter.data.copy_(tensor)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *shared: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Return the experts' output, BF16 [T, H]. x is BF16 [T, H], `topk_weights` FP32 and `topk_ids` [T, k]. Further
        arguments are of shared experts, which no model of QaRL's has."""
        gate_up, down = self.loaded(layer)
        prepared = PreparedStacks(gate_up, down, self.scheme.operands)
        return self.kernel.forward(x, topk_weights, topk_ids, prepared)


class PaddedFp8Method(CompressedTensorsW8A8Fp8MoEMethod):
    """vLLM's FP8 experts with the least number of pairs that `kernel` names, as in the trainer."""

    kernel: type[ExpertsKernel]

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *shared: Any,
        **named: Any,
    ) -> torch.Tensor:
        rows = with_least_pairs(self.kernel, x, topk_weights, topk_ids)
        y: torch.Tensor = super().apply(layer, *rows, *shared, **named)
        return y[: len(x)]


def _padded(method: CompressedTensorsW8A8Fp8MoEMethod) -> CompressedTensorsW8A8Fp8MoEMethod:
    """Return `method`, or one that pads, if the operator behind it needs a least number of pairs."""
    chosen = getattr(method.experts_cls, "__name__", None)
    kernel = next((k for k in EXPERTS_KERNELS if chosen in k.engine_classes), None)
    if kernel is None or not kernel.least_pairs:
        return method
    padded = PaddedFp8Method(method.weight_quant, method.input_quant, method.moe)
    padded.kernel = kernel
    return padded


class RouterMethod(UnquantizedLinearMethod):
    """A router whose logits do not depend on the other tokens."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None
        return router_logits(x, layer.weight)


class QaRLTensorsConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config with QaRL's methods for experts and routers, in engines that ask for them."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and (request := requested()) is not None:
            scheme = scheme_of_experts(self, layer, prefix, request)
            if scheme is not None:
                return OwnExpertsMethod(layer.moe_config, scheme, request)
        method = super().get_quant_method(layer, prefix)
        if not is_followed(get_current_vllm_config_or_none()):
            return method
        if isinstance(method, CompressedTensorsW8A8Fp8MoEMethod):
            return _padded(method)
        is_router = isinstance(layer, LinearBase) and prefix.endswith(ROUTERS[0])
        return RouterMethod() if is_router and type(method) is UnquantizedLinearMethod else method
