"""The functions and classes of vLLM that QaRL calls, by the part of QaRL that needs them.

The kernels have their own lists next to their calls (`FUNCTIONS` in `qarl.kernels.cuda.vllm_ops` and
`qarl.kernels.experts.cuda`). The plugin for experts on CPUs has `qarl.rollout.vllm_plugin.cpu_experts`.
"""

from __future__ import annotations

from qarl.vllm_versions.functions import Functions

_LLM = "vllm.entrypoints.llm"
_LINEAR = "vllm.model_executor.kernels.linear"
_RELOAD = "vllm.model_executor.model_loader.reload"
_QUANTIZATION = "vllm.model_executor.layers.quantization"

ENGINE: Functions = {
    (_LLM, "LLM.generate"): ("prompts", "sampling_params", "use_tqdm"),
    (_LLM, "LLM.collective_rpc"): ("method", "args"),
    (_LLM, "LLM.get_metrics"): (),
    (_LLM, "LLM.reset_prefix_cache"): (),
    (_LLM, "LLM.sleep"): ("level",),
    (_LLM, "LLM.wake_up"): (),
    ("vllm.sampling_params", "SamplingParams"): (
        "temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "detokenize", "ignore_eos",
    ),
    ("vllm.engine.arg_utils", "EngineArgs"): (
        "model", "trust_remote_code", "dtype", "load_format", "max_model_len", "max_num_seqs", "enforce_eager",
        "logprobs_mode", "disable_log_stats", "distributed_executor_backend", "max_num_batched_tokens",
        "enable_return_routed_experts", "hf_overrides", "gpu_memory_utilization", "enable_sleep_mode",
        "compilation_config", "kv_cache_memory_bytes", "enable_chunked_prefill", "enable_prefix_caching",
        "attention_config", "additional_config",
    ),
    ("vllm.v1.engine.core_client", "InprocClient.shutdown"): (),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor"): (),
    ("vllm.v1.worker.worker_base", "WorkerBase.get_model"): (),
}  # fmt: skip
"""For `qarl.rollout.engine`, including `loaded_model`."""

PUBLISH: Functions = {
    ("vllm.config", "set_current_vllm_config"): ("vllm_config",),
    (_RELOAD, "initialize_layerwise_reload"): ("model",),
    (_RELOAD, "finalize_layerwise_reload"): (),
    (_RELOAD, "record_metadata_for_reloading"): ("model",),
    (f"{_RELOAD}.layerwise", "initialize_online_processing"): ("layer",),
    ("vllm._custom_ops", "create_onednn_scaled_mm"): (
        "weight", "weight_scales", "output_type", "dynamic_quant", "use_azp", "primitive_cache_size",
    ),
    ("vllm.platforms", "current_platform.is_cpu"): (),
    (f"{_QUANTIZATION}.base_config", "QuantizeMethodBase.process_weights_after_loading"): ("layer",),
}  # fmt: skip
"""For `qarl.rollout.publish`. `record_metadata_for_reloading` is called by vLLM's loader; a reload needs its result."""

RULES: Functions = {
    ("vllm.model_executor.models.registry", "ModelRegistry.models"): (),
    (f"{_QUANTIZATION}.compressed_tensors.utils", "should_ignore_layer"): ("layer_name", "ignore", "fused_mapping"),
    (_LINEAR, "MPLinearLayerConfig"): (
        "full_weight_shape", "partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points",
        "has_g_idx",
    ),
    (_LINEAR, "choose_mp_linear_kernel"): ("config",),
    (_LINEAR, "init_int8_linear_kernel"): (
        "is_channelwise", "is_static_input_scheme", "input_symmetric", "module_name",
    ),
    (_LINEAR, "init_fp8_linear_kernel"): (
        "activation_quant_key", "weight_quant_key", "input_dtype", "out_dtype", "weight_shape",
    ),
    (f"{_QUANTIZATION}.utils.quant_utils", "kFp8DynamicTokenSym"): (),
    (f"{_QUANTIZATION}.utils.quant_utils", "kFp8StaticChannelSym"): (),
    ("vllm.scalar_type", "scalar_types.uint4b8"): (),
}  # fmt: skip
"""For `qarl.rollout.kernel_prediction`."""

USES: dict[str, Functions] = {"engine": ENGINE, "publish": PUBLISH, "rules": RULES}
"""Part of QaRL -> what it calls."""
