"""The settings of a rollout engine and of its sampling, the arguments that vLLM gets from them, and what vLLM does on a
GPU to the process and the memory that it shares with the trainer (backend `local`, TRL).

Batch invariance. With VLLM_BATCH_INVARIANT=1 vLLM (`enable_batch_invariant_mode`) replaces softmax,
log_softmax, mean and bmm by its own operators for every CUDA tensor of the process, and on capability 8.0 also all
matrix products. Its operators have no backward. The trainer would run them too, and lose gradients.

Memory. While the trainer works, the engine sleeps (vLLM's sleep level 1): its weights are in host memory, and its KV
cache is freed. Level 2 would also discard the kernels' workspaces, which no publish writes. vLLM starts after the
trainer has loaded its weights, and refuses to start if less than its share of the GPU is free. Otherwise a share that
is too large would end the run later, when the engine wakes up for the first time.

CUDA graphs. vLLM's default is to compile the model too. Compiled models round differently from vLLM's own operators,
which the trainer follows at level `model`, and whose 8-bit activations it follows at every level. There only decode
steps are captured, and nothing is compiled. W4A16 and BF16 below `model` follow no operator around the linears, so
vLLM's default stays.
"""

from __future__ import annotations

import gc
import math
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qarl.config import Config
from qarl.config.schema import BATCHED_TOKENS, RolloutConfig
from qarl.errors import UserError
from qarl.kernels.cpu.layer_ops import BLOCK_SIZE
from qarl.kernels.cuda.layer_ops import ENGINE_ARGUMENTS
from qarl.kernels.registry import least_rows
from qarl.process import configure_vllm_process
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.kernel_request import engine_arguments, kernel_request
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.vllm_versions import FP32_HEAD, import_flashinfer, is_refusal


@dataclass(frozen=True)
class EngineConfig:
    """`model`: folder with config and tokenizer. `max_model_len`: limit on the tokens of prompt and response together.
    `kv_cache_gib`: size of the KV cache, used only on CPU. `direct_writes`: write published weights directly into
    vLLM's storage if possible, not through its layerwise reload. `trust_remote_code`: run Python code from the model's
    folder. `return_routed_experts`: also return the experts that each token was routed to. `head_dtype`: fp32
    for FP32 logits, else model. `dtype`: a value of `model.dtype`. `kernels`: a value of `quant.kernels`.
    `enforce_eager`: None is true only on a CPU. `free_cache_engine`: on a GPU, `sleep` frees memory. `aligned`: on a
    GPU, run the operators that the trainer follows at `quant.align=model`. `adapters`: the adapters that it serves on
    the published weights (`RolloutEngine.publish_adapter`), or None. `enable_prefix_caching`: prefill the common start
    of prompts once. None is false on a CPU, and vLLM's default on a GPU."""

    model: str
    scheme: Scheme
    ignore: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float = 1.0
    enforce_eager: bool | None = None
    free_cache_engine: bool = True
    direct_writes: bool = True
    trust_remote_code: bool = False
    return_routed_experts: bool = False
    head_dtype: str = "model"
    dtype: str = "bf16"
    aligned: bool = False
    kernels: KernelChoice = KernelChoice.ENGINE
    adapters: AdapterSpec | None = None
    enable_prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, Scheme) or isinstance(self.ignore, str):
            raise UserError(
                f"scheme is {self.scheme!r} and ignore is {self.ignore!r}",
                where="EngineConfig",
                fix='write scheme=get_scheme("w4a16", group_size=128), ignore=("lm_head",)',
            )


CACHED_BLOCK = 32
"""Tokens of a block of the prefix cache on a CPU, which shares whole blocks: the smallest number that vLLM's attention
takes. vLLM's default, 128, is longer than many prompts. The bits do not depend on it."""


@dataclass(frozen=True)
class SamplingConfig:
    """`temperature`: 0 is greedy. `max_tokens`: limit on the response's length. `top_k`: -1 or 0 is no limit.
    `top_tokens`: also return the likeliest token at each position. `stop`, `stop_token_ids`, `min_tokens`: as the keys
    of the section `rollout`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    top_tokens: bool = False
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @classmethod
    def of_run(cls, config: Config, *, top_tokens: bool = False) -> SamplingConfig:
        """Return the sampling settings of training responses."""
        rollout = config.rollout
        return cls(
            config.data.max_response_length,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            top_tokens,
            **ends_of(rollout),
        )

    @classmethod
    def of_evaluation(cls, config: Config) -> SamplingConfig:
        """Return the sampling settings of evaluations."""
        rollout = config.rollout
        return cls(config.data.max_response_length, rollout.val_temperature, **ends_of(rollout))


def ends_of(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the fields of `SamplingConfig` that say where responses end."""
    return {
        "stop": tuple(rollout.stop),
        "stop_token_ids": tuple(rollout.stop_token_ids),
        "min_tokens": rollout.min_tokens,
    }


def may_preempt(config: EngineConfig, hf_config: Any) -> bool:
    """Return whether vLLM may free a response's KV cache for other requests. On a CPU it cannot if the cache is large
    enough for `max_num_seqs` sequences of full length. `hf_config`: the model's transformers config, in
    which all heads have one size."""
    if torch.cuda.is_available():
        return True
    return sequences_in_cache(config, hf_config) < config.max_num_seqs


def sequences_in_cache(config: EngineConfig, hf_config: Any) -> int:
    """Return how many sequences of full length the KV cache on a CPU holds."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    block = BLOCK_SIZE * text.num_hidden_layers * 2 * heads * size * 2
    blocks = int(config.kv_cache_gib * 2**30 // block) - 1  # vLLM keeps one
    return max(blocks, 0) // math.ceil(config.max_model_len / BLOCK_SIZE)


def llm_arguments(config: EngineConfig, *, statistics: bool = True) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. `statistics`: whether vLLM counts preemptions, and much else. That costs
    several percent of the rollout of a tiny model."""
    arguments: dict[str, Any] = {
        "model": config.model,
        "trust_remote_code": config.trust_remote_code,
        "dtype": {"bf16": "bfloat16", "fp16": "float16"}[config.dtype],
        "load_format": "dummy",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": eager(config.enforce_eager),
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": not statistics,
    }
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # Without this, vLLM would wait for other ranks to join its groups. Each rank has an engine.
        arguments["distributed_executor_backend"] = "external_launcher"
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if config.adapters is not None:
        arguments |= config.adapters.arguments()
    if config.return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.scheme.quantized:
        arguments["hf_overrides"] = {
            "quantization_config": config.scheme.quantization_config(list(config.ignore))
        }
    if config.head_dtype == "fp32":
        arguments["hf_overrides"] = arguments.get("hf_overrides", {}) | FP32_HEAD
    if torch.cuda.is_available():
        if config.enable_prefix_caching is not None:
            arguments["enable_prefix_caching"] = config.enable_prefix_caching
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.free_cache_engine
        arguments |= operator_arguments(
            config.scheme,
            aligned=config.aligned,
            eager=eager(config.enforce_eager),
            max_num_seqs=config.max_num_seqs,
            kernels=config.kernels,
        )
    else:
        arguments |= engine_arguments(kernel_request(config.kernels, config.scheme.name))
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        # A chunked prefill does not give the same bits as a whole one. Also, on a CPU a request with a seed
        # crashes if its prefill is chunked ("CPU Generator does not use offset").
        # A request with a cached prefix prefills only the rest. In long prompts that changes bits, too.
        arguments["enable_chunked_prefill"] = False
        arguments["enable_prefix_caching"] = bool(config.enable_prefix_caching)
        if config.enable_prefix_caching:
            arguments["block_size"] = CACHED_BLOCK
        arguments["max_num_batched_tokens"] = max(
            config.max_num_batched_tokens or BATCHED_TOKENS["local"], config.max_model_len
        )
    return arguments


def sampling_params(sampling: SamplingConfig, seed: int | None = None) -> Any:
    """Return vLLM's `SamplingParams`. Raise UserError if vLLM refuses a value or would replace it (vLLM increases a
    temperature between 0 and 0.01 and only warns), because the trainer would then compute log-probs of a different
    distribution."""
    configure_vllm_process()
    from vllm import SamplingParams

    top_k = max(sampling.top_k, 0)
    asked: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k,
    }
    where = ", ".join(f"rollout.{name}={value}" for name, value in asked.items())
    ends: dict[str, Any] = {}
    if sampling.stop or sampling.stop_token_ids or sampling.min_tokens:
        ends = {"stop": [*sampling.stop], "stop_token_ids": [*sampling.stop_token_ids]}
        ends["min_tokens"] = min(sampling.min_tokens, sampling.max_tokens)
    try:
        params = SamplingParams(
            **asked,
            max_tokens=sampling.max_tokens,
            seed=seed,
            logprobs=int(sampling.top_tokens),
            flat_logprobs=True,  # lists of numbers, instead of a dict and an object for each token
            skip_clone=True,  # nobody else has these parameters
            detokenize=bool(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            **ends,
        )
    except Exception as error:
        if not is_refusal(error):
            raise
        why = " ".join(str(error).split())
        raise UserError(
            "vLLM refuses these sampling values", where=where, why=why, fix="change that key"
        ) from error
    if sampling.temperature == 0:
        return params  # for greedy sampling vLLM resets top_p and top_k, which have no effect
    changed = {
        name: value_read
        for name, value in asked.items()
        if (value_read := getattr(params, name)) != value
    }
    if changed:
        raise UserError(
            "vLLM would sample with different values",
            where=where,
            why="it would use "
            + ", ".join(f"{name}={value_read}" for name, value_read in changed.items()),
            fix="set "
            + ", ".join(f"rollout.{name}={value_read}" for name, value_read in changed.items()),
        )
    return params


def request_params(
    sampling: SamplingConfig,
    count: int,
    seeds: Sequence[int] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> list[Any]:
    """Return vLLM's `SamplingParams` of each of `count` requests. Greedy ones need no `seeds`."""
    used = [None] * count if seeds is None or sampling.temperature == 0 else seeds
    if max_tokens is None:
        return [sampling_params(sampling, seed) for seed in used]
    return [
        sampling_params(replace(sampling, max_tokens=most), seed)
        for most, seed in zip(max_tokens, used, strict=True)
    ]


GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""vLLM's arguments for CUDA graphs of decode steps without compilation (mode 0). Both supported releases have them."""


def operator_arguments(
    scheme: Scheme,
    *,
    aligned: bool,
    eager: bool,
    max_num_seqs: int,
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> dict[str, Any]:
    """Return vLLM's arguments on a GPU that decide which operators it runs. `aligned`: whether the trainer follows the
    engine's operators (levels `model` and `exact`). `eager`: whether it runs without CUDA graphs and compilation.
    `kernels`: a value of `quant.kernels`; the compiler does not know QaRL's own."""
    least = least_rows(kernels, scheme.operands) if aligned else 1
    request = kernel_request(kernels, scheme.name)
    arguments = engine_arguments(request, followed=aligned, least_rows=least)
    compilation = dict(GRAPHS["compilation_config"])
    if aligned:
        arguments |= ENGINE_ARGUMENTS
    if least > 1:
        compilation |= capture_sizes(least, max_num_seqs)
    if eager or compiles(scheme, aligned=aligned, kernels=kernels):
        return arguments
    return {**arguments, "compilation_config": compilation}


def compiles(scheme: Scheme, *, aligned: bool, kernels: KernelChoice) -> bool:
    """Return whether vLLM compiles the model of an engine on a GPU that is not eager: its default stays where the
    trainer follows none of its operators."""
    return scheme.input_activations is None and kernels.by_engine and not aligned


def capture_sizes(least: int, requests: int) -> dict[str, list[int]]:
    """Return vLLM's setting for CUDA graphs of steps of `least` to `requests` tokens, spaced as vLLM does. A step of
    fewer tokens runs in the smallest graph. If there is none, return nothing."""
    if requests < least:
        return {}
    first = -(-least // 8) * 8
    spaced = [*range(first, 256, 8), *range(256, requests, 16)]
    return {"cudagraph_capture_sizes": [size for size in spaced if size < requests] + [requests]}


_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def check_not_batch_invariant() -> None:
    """Raise UserError if vLLM would replace operators of the trainer, which is in the same process, on a GPU."""
    if os.environ.get(_BATCH_INVARIANT, "0").strip() in ("", "0") or not torch.cuda.is_available():
        return
    raise UserError(
        "vLLM's batch-invariant mode cannot be used in the trainer's process",
        where=f"environment variable {_BATCH_INVARIANT}={os.environ[_BATCH_INVARIANT]}",
        why="its torch.bmm and softmax, for the whole process, have no backward, so gradients would be wrong",
        fix=f"unset {_BATCH_INVARIANT}, or set backend=verl, whose engines are processes of their own",
    )


def eager(enforce_eager: bool | None) -> bool:
    """Return whether vLLM runs without CUDA graphs and compilation. The default (None) is true only without a GPU."""
    return not torch.cuda.is_available() if enforce_eager is None else enforce_eager


def release_unused_memory() -> None:
    """Return the memory that PyTorch reserves but does not use to the driver. vLLM wakes up with `cuMemCreate`, which
    cannot use reserved memory. The older supported release does not empty PyTorch's cache first."""
    gc.collect()
    torch.cuda.empty_cache()


def drop_frames(error: BaseException | None) -> None:
    """Clear the local variables of the functions that raised `error` and its causes. Otherwise they keep the tensors of
    a lost engine, and vLLM's sleep mode refuses to start another engine in this process."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def explain(error: BaseException, share: float) -> None:
    """Raise a UserError that says what to do, if vLLM did not start on a GPU for want of memory.

    vLLM takes its weights, its activations and CUDA graphs from its share, and the KV cache gets the rest. It measures
    these by the GPU's free memory, which other processes change too."""
    text = str(error)
    if not torch.cuda.is_available():
        return
    if "Error in memory profiling" in text:
        what = "vLLM could not measure how much of the GPU's memory it needs"
        why = "another process freed memory of this GPU meanwhile"
        fix = "start the run again, and let no other run start or end on this GPU in that minute"
    elif "No available memory for the cache blocks" in text or "KV cache is needed" in text:
        what = "vLLM finds no room for its KV cache"
        why = f"vLLM says: {text.splitlines()[0].split(' See https')[0]}"
        fix = (
            "raise rollout.gpu_memory_utilization, end other processes on this GPU (vLLM counts their memory too), or "
            "lower data.max_prompt_length and data.max_response_length"
        )
    else:
        return
    raise UserError(
        what, where=f"rollout.gpu_memory_utilization={share:g}", why=why, fix=fix
    ) from error


def before_start(share: float) -> None:
    """Prepare the process for an engine on a GPU. Raise UserError if vLLM's share of the GPU is not free."""
    import_flashinfer()
    check_free_memory(share)


def check_free_memory(share: float) -> None:
    """Raise UserError if vLLM's share of the GPU is not free. (vLLM would raise a ValueError that does not know the
    trainer.) PyTorch's unused memory is returned to the driver first."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free >= math.ceil(share * total):
        return
    largest = math.floor(100 * free / total) / 100
    raise UserError(
        f"vLLM needs {share * total / 2**30:.1f} GiB of the GPU, but only {free / 2**30:.1f} GiB are free",
        where=f"rollout.gpu_memory_utilization={share:g}",
        why=f"the trainer holds {torch.cuda.memory_allocated() / 2**30:.1f} GiB of {total / 2**30:.1f} GiB",
        fix=f"set rollout.gpu_memory_utilization={largest:g} or less; the optimizer's state also needs room",
    )
