"""The classes for experts that the plugin gives to vLLM on a CPU, and their registration.

    QaRLCompressedTensorsConfig   vLLM's compressed-tensors config, but low-bit experts get LowBitExpertsMethod
    LowBitExpertsMethod           loads W4A16, W8A8 and FP8 experts, and multiplies them with the trainer's function
    RepairedUnquantizedMethod     BF16 experts, packed again after each reload

The parameters of low-bit experts have the same names and shapes as vLLM's own: `w13_*` [E, 2I, ...], gate before up,
and `w2_*` [E, H, ...], in checkpoint format. After loading they are emptied, because the kernel uses its own packed
copy. vLLM's layerwise reload restores their shapes before it loads new weights.

The plugin runs with the vLLM of requirements/cpu.lock. `qarl.vllm_versions` says why an older one cannot import this
module. These internals of vLLM are used:

    register_quantization_config, get_quantization_config
        a config registered under a built-in name replaces vLLM's
    CompressedTensorsConfig.get_quant_method(layer, prefix), get_scheme_dict(layer, name),
    _add_fused_moe_to_target_scheme_map()
        vLLM's CompressedTensorsMoEMethod.get_moe_method calls these to find the scheme of a layer's experts
    RoutedExperts
        the module of a layer's experts (`mlp.experts.routed_experts`): `moe_config`, `weight_loader`, and
        the routing settings (`use_grouped_topk`, `renormalize`, `scoring_func`, `custom_routing_function`). Its loader
        splits a parameter according to the attributes `is_transposed` and, for scales, `quant_method` ("group",
        "channel").
    FusedMoEMethodBase
        `create_weights`, `process_weights_after_loading`, `apply_monolithic`, `is_monolithic`, `moe_kernel`
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
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    MoEActivation,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.utils import set_weight_attrs

from qarl.errors import UserError
from qarl.kernels.base import ExpertsShape
from qarl.kernels.cpu import vllm_linears
from qarl.kernels.cpu.vllm_experts import CpuExperts, PreparedExperts
from qarl.quant.wire_specs import wire_specs
from qarl.rollout.publish.experts import STORED
from qarl.schemes import QuantArgs, Scheme, engine_scheme_names, get_scheme

Tensors = Mapping[str, torch.Tensor]


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

    prepared: PreparedExperts | None = None

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
        return CpuExperts.forward(hidden_states, weights, ids, self.prepared)


class LowBitExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer, quantized with `scheme`: W4A16, W8A8 or FP8."""

    def __init__(self, moe: FusedMoEConfig, scheme: Scheme) -> None:
        super().__init__(moe)
        self.scheme = scheme
        self.group_size = scheme.group_size
        self.names = ("weight_packed" if self.group_size else "weight", "weight_scale")

    @property
    def is_monolithic(self) -> bool:
        return True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register empty parameters. Raise UserError if the kernel cannot multiply experts of these sizes."""
        shape = ExpertsShape(
            num_experts, self.moe.experts_per_token, hidden_size, intermediate_size_per_partition
        )
        self._check(layer, shape)
        sizes = ((2 * shape.intermediate, hidden_size), (hidden_size, shape.intermediate))
        kind = "group" if self.group_size else "channel"
        for stack, (rows, columns) in zip(STORED.values(), sizes, strict=True):
            wire = wire_specs(self.scheme, rows, columns)
            for name in self.names:
                dtype, size = wire[name]
                parameter = nn.Parameter(
                    torch.empty(num_experts, *size, dtype=dtype), requires_grad=False
                )
                layer.register_parameter(f"{stack}_{name}", parameter)
                set_weight_attrs(
                    parameter, {**extra_weight_attrs, "quant_method": kind, "is_transposed": False}
                )
            if self.group_size:
                # `weight_shape` arrives twice per expert of w13. vLLM's reload would count the second as a new weight.
                unused = nn.Parameter(torch.empty(0, dtype=torch.int64), requires_grad=False)
                layer.register_parameter(f"{stack}_weight_shape", unused)
                set_weight_attrs(unused, {"weight_loader": _ignore_weight})

    def _check(self, layer: Any, shape: ExpertsShape) -> None:
        why_not = CpuExperts.unavailable(self.scheme, torch.device("cpu"), shape)
        if (
            layer.activation != MoEActivation.SILU
            or layer.apply_router_weight_on_input
            or self.moe.has_bias
        ):
            why_not = (
                "the kernel supports only SiLU experts without biases and without router weights on the input; "
                f"this layer has the activation {layer.activation}"
            )
        if self.moe.moe_parallel_config.use_ep:
            why_not = "expert parallelism is not supported, because each worker needs all experts of a layer"
        if self.group_size is not None and shape.intermediate % self.group_size:
            columns = f"{shape.intermediate} columns of down_proj"
            why_not = f"{columns} are not a multiple of the group size {self.group_size}"
        if why_not is not None:
            raise UserError(
                f"no kernel supports these {self.scheme.name} experts on a CPU",
                where=f"{layer.layer_name}: {shape}",
                why=why_not,
                fix="choose a different quant.scheme, or add the experts to quant.ignore",
            )

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG  # QaRL's kernel applies the scales, so vLLM does not need them

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pass the loaded parameters to the kernel, and empty them."""
        loaded = [
            {name: getattr(layer, f"{stack}_{name}").data for name in self.names}
            for stack in STORED.values()
        ]
        self.write(layer, *loaded)

    def write(self, layer: Any, gate_up: Tensors, down: Tensors) -> None:
        """Replace the weights by published tensors, stacked over experts: gate_up [E, 2I, ...], down [E, H, ...].

        Both may have the tiles that the trainer's kernel has made (`weight_tiles`), which are copied."""
        prepared = CpuExperts.prepare(_own_tiles(gate_up), _own_tiles(down))
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
        experts.prepared = prepared
        for stack in STORED.values():
            for name in self.names:
                old = getattr(layer, f"{stack}_{name}")
                old.data = old.data.new_empty(0)

    def storage(self) -> list[dict[str, torch.Tensor]]:
        """Return int4 stacks of gate and up, and of down, as views of the kernel's memory; nothing in other schemes."""
        kernel: Any = self.moe_kernel
        products = kernel.fused_experts.prepared
        return [
            vllm_linears.stack_of(product.experts) if self.group_size else {}
            for product in products
        ]

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


def _ignore_weight(
    param: nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Ignore a loaded `weight_shape`, because the shape is known from the config."""
    return True if return_success else None


class QaRLCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config, except that experts in one of QaRL's schemes get `LowBitExpertsMethod`."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            names = (f"{prefix}.0.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj"))
            first, *others = (self.get_scheme_dict(layer, name) for name in names)
            scheme = (
                scheme_of_weights(first)
                if first is not None and all(other == first for other in others)
                else None
            )
            if scheme is not None:
                return LowBitExpertsMethod(layer.moe_config, scheme)
        return super().get_quant_method(layer, prefix)


def scheme_of_weights(operand_args: Mapping[str, Any]) -> Scheme | None:
    """Return the QaRL scheme that a compressed-tensors layer uses, or None for other schemes."""
    try:
        operands = [
            None
            if operand_args.get(part) is None
            else QuantArgs.from_compressed_tensors(operand_args[part])
            for part in ("weights", "input_activations")
        ]
    except ValueError:  # no scheme of QaRL has these settings
        return None
    group_size = (operands[0] and operands[0].group_size) or 128
    names = engine_scheme_names(quantized=True)
    schemes = (get_scheme(name, group_size) for name in names)
    return next(
        (
            candidate
            for candidate in schemes
            if [candidate.weights, candidate.input_activations] == operands
        ),
        None,
    )


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
