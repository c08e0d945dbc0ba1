"""All internals of vLLM that the plugin uses. No other file of the plugin imports vLLM's layers.

The list below is for vLLM 0.29.0, with which the plugin was run. The source of vLLM 0.24.0 has the same RoutedExperts,
but no class CPUUnquantizedExperts. So `register` refuses vLLM 0.24.0 on a CPU.

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
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.utils import set_weight_attrs

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "CPUUnquantizedExperts",
    "CompressedTensorsConfig",
    "FusedMoEConfig",
    "FusedMoEKernel",
    "FusedMoEMethodBase",
    "MoEActivation",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "get_quantization_config",
    "maybe_make_prepare_finalize",
    "register_quantization_config",
    "set_weight_attrs",
]

MEMBERS = {
    CompressedTensorsConfig: ("get_quant_method", "get_scheme_dict", "_add_fused_moe_to_target_scheme_map"),
    CPUUnquantizedExperts: ("_select_experts", "apply", "routing_replay_capture_fn", "supports_routing_replay_capture"),
    FusedMoEMethodBase: ("create_weights", "apply_monolithic", "is_monolithic", "get_fused_moe_quant_config"),
    UnquantizedFusedMoEMethod: ("register_oot", "_setup_kernel", "process_weights_after_loading"),
    RoutedExperts: ("weight_loader", "load_weights"),
}
"""The members of each class that the plugin overrides or calls."""


def changed() -> str | None:
    """Return a sentence with the names of all `MEMBERS` that this vLLM lacks, or None if it lacks none."""
    missing = [
        f"{kind.__name__}.{name}" for kind, names in MEMBERS.items() for name in names if not hasattr(kind, name)
    ]
    return f"this vLLM has no {', '.join(missing)}" if missing else None
