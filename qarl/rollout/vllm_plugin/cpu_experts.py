"""The classes for experts that the plugin gives to vLLM on a CPU, and their registration.

    QaRLCompressedTensorsConfig   vLLM's compressed-tensors config, but low-bit experts get LowBitExpertsMethod
    LowBitExpertsMethod           loads low-bit experts, and multiplies them with the trainer's function
    RepairedUnquantizedMethod     BF16 experts, packed again after each reload

`expert_weights.py` makes the parameters of low-bit experts, in checkpoint format. After loading they are emptied,
because the kernel uses its own packed copy. vLLM's layerwise reload restores their shapes before it loads new weights.

The plugin runs with the vLLM of requirements/cpu.lock. `qarl.vllm_versions` says why an older one cannot import this
module. These internals of vLLM are used:

    register_quantization_config, get_quantization_config
        a config registered under a built-in name replaces vLLM's
    CompressedTensorsConfig.get_quant_method(layer, prefix)
    RoutedExperts
        the module of a layer's experts (`mlp.experts.routed_experts`): `moe_config`, and the routing settings
        (`use_grouped_topk`, `renormalize`, `scoring_func`, `custom_routing_function`)
    FusedMoEMethodBase
        `process_weights_after_loading`, `apply_monolithic`, `is_monolithic`, `moe_kernel`
    FusedMoEKernel, maybe_make_prepare_finalize(use_monolithic=True)
        wrap the experts of a method in the form that vLLM's runner calls
    CPUUnquantizedExperts
        `_select_experts`, vLLM's routing on CPUs, and `apply(hidden_states, w1, w2, router_logits, ...)`. These experts
        are "monolithic": they route the tokens themselves. For modular experts vLLM would route with
        `_moe_C.topk_softmax`, which does not exist on CPUs.
    supports_routing_replay_capture, routing_replay_capture_fn
        members of monolithic experts. With enable_return_routed_experts, vLLM checks the first and sets the second
    UnquantizedFusedMoEMethod.register_oot, experts_cls, _setup_kernel
        the method of BF16 experts. `_setup_kernel` packs the weights only the first time it is called.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from qarl.kernels.base import ExpertsKernel, Tensors
from qarl.kernels.cpu import vllm_linears
from qarl.rollout.publish.experts import STORED
from qarl.rollout.vllm_plugin.expert_weights import LowBitWeights, scheme_of_experts
from qarl.rollout.vllm_plugin.own_linears import requested


def register() -> None:
    """Put the classes into vLLM's registries."""
    UnquantizedFusedMoEMethod.register_oot(
        RepairedUnquantizedMethod, name=UnquantizedFusedMoEMethod.__name__
    )
    register_quantization_config("compressed-tensors")(QaRLCompressedTensorsConfig)


class _ShowsRouting(CPUUnquantizedExperts):
    """vLLM's experts on a CPU, which also report the routing (the experts chosen for each token)."""

    def supports_routing_replay_capture(self) -> bool:
        return True

    def _select_experts(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super()._select_experts(*args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(ids)
        return weights, ids


class LowBitFusedExperts(_ShowsRouting):
    """Low-bit experts: vLLM routes the tokens, and QaRL's function computes the outputs."""

    kernel: type[ExpertsKernel]
    prepared: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Copy the layer's routing settings, which `_select_experts` reads."""
        self.use_grouped_topk = layer.use_grouped_topk
        self.renormalize = layer.renormalize
        self.scoring_func = layer.scoring_func
        self.custom_routing_function = layer.custom_routing_function

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        *_: Any,
        **settings: Any,
    ) -> torch.Tensor:
        """Return the experts' output, BF16 [T, H]. `hidden_states` [T, H] and `router_logits` [T, E] are BF16.
        `settings`: vLLM's other arguments, all by name."""
        names = (
            "num_expert_group",
            "topk_group",
            "e_score_correction_bias",
            "routed_scaling_factor",
        )
        weights, ids = self._select_experts(
            hidden_states, router_logits, *(settings[name] for name in names)
        )
        assert self.prepared is not None
        return self.kernel.forward(hidden_states, weights, ids, self.prepared)


class LowBitExpertsMethod(LowBitWeights):
    """The experts of one layer, quantized with `scheme`, by the kernel that the trainer chooses on a CPU, too."""

    device_type = "cpu"

    @property
    def is_monolithic(self) -> bool:
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG  # QaRL's kernel applies the scales, so vLLM does not need them

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pass the loaded parameters to the kernel, and empty them."""
        self.write(layer, *self.loaded(layer))

    def write(self, layer: Any, gate_up: Tensors, down: Tensors) -> None:
        """Replace the weights by published tensors, stacked over experts: gate_up [E, 2I, ...], down [E, H, ...].

        Both may have the tiles that the trainer's kernel has made (`weight_tiles`), which are copied."""
        stacks = _own_tiles(gate_up), _own_tiles(down)
        prepared = self.kernel.prepare(*stacks, self.scheme.operands)
        if self.moe_kernel is None:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            prepare_finalize = maybe_make_prepare_finalize(
                moe=self.moe,
                quant_config=self.moe_quant_config,
                routing_tables=layer._expert_routing_tables(),
                allow_new_interface=True,
                use_monolithic=True,
            )
            assert prepare_finalize is not None
            self.moe_kernel = FusedMoEKernel(
                prepare_finalize, LowBitFusedExperts(self.moe, self.moe_quant_config)
            )
        experts: Any = self.moe_kernel.fused_experts
        experts.process_weights_after_loading(layer)
        experts.kernel = self.kernel
        experts.prepared = prepared
        for stack in STORED.values():
            for name in self.names:
                old = getattr(layer, f"{stack}_{name}")
                old.data = old.data.new_empty(0)

    def storage(self) -> list[dict[str, torch.Tensor]]:
        """Return int4 stacks of gate and up, and of down, as views of the kernel's memory; nothing in other schemes."""
        kernel: Any = self.moe_kernel
        gate_up, down = self.kernel.in_layout(kernel.fused_experts.prepared)
        return [dict(gate_up), dict(down)]

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel: Any = self.moe_kernel
        names = (
            "activation global_num_experts expert_map apply_router_weight_on_input num_expert_group topk_group "
            "e_score_correction_bias routed_scaling_factor"
        )
        settings = {name: getattr(layer, name) for name in names.split()}
        y: torch.Tensor = kernel.apply_monolithic(x, None, None, router_logits, **settings)
        return y


def _own_tiles(stack: Tensors) -> Tensors:
    """Return `stack` with a copy of its tiles, if it has any. The kernel keeps them, and the trainer's are its own."""
    codes = vllm_linears.TILES.codes
    return stack if codes not in stack else {**stack, codes: stack[codes].clone()}


class QaRLCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config, except that experts in one of QaRL's schemes get `LowBitExpertsMethod`."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            request = requested()
            scheme = scheme_of_experts(self, layer, prefix, request)
            if scheme is not None:
                return LowBitExpertsMethod(layer.moe_config, scheme, request)
        return super().get_quant_method(layer, prefix)


class RepairedUnquantizedMethod(UnquantizedFusedMoEMethod):
    """BF16 experts that report their routing, whose outputs are right after a reload, and that run beside adapters.

    vLLM packs weights for its CPU operator only at the first load. After any later load the operator reads
    unpacked weights as if they were packed, and returns wrong outputs without an error. In an engine with adapters it
    chooses Triton's experts on a CPU too, whose routing does not exist there. No adapter of QaRL's is on experts."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        moe = copy.copy(moe)
        moe.is_lora_enabled = False
        super().__init__(moe)
        if self.experts_cls is not None and issubclass(self.experts_cls, CPUUnquantizedExperts):
            chosen = self.experts_cls
            self.experts_cls = type(f"QaRL{chosen.__name__}", (_ShowsRouting, chosen), {})

    def _setup_kernel(self, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        again = self.moe_kernel is not None
        super()._setup_kernel(layer, w13, w2)
        if again and self.moe_kernel is not None:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)
