"""Checks of the actor's engine: settings that QaRL's forward does not support, and those that vLLM has otherwise.

Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl.utils.device import get_device_name

from qarl.config.lora import chooses_by_name, engine_rank
from qarl.errors import UserError
from qarl.rollout.adapter_spec import TARGETS_KEY
from qarl.rollout.kernel_request import REQUEST_KEY, kernel_request
from qarl.rollout.vllm_plugin import experts_of
from qarl.schemes import Scheme, get_scheme
from qarl.verl.config_classes import QuantFSDPEngineConfig, QuantSettings, as_dict
from qarl.verl.keys import (
    ACTOR,
    MODEL,
    OVERRIDES,
    PLUGIN,
    QUANT,
    RECEIVER,
    REFERENCE,
    ROLLOUT,
    SHARDS,
    VLLM,
)
from qarl.verl.refusals import Conflict, attempt, raise_all


def check_engine_config(model: Any, engine: Any) -> None:
    """Raise UserError that says all of `engine_errors`."""
    raise_all(engine_errors(model, engine))


def engine_errors(model: Any, engine: Any) -> list[UserError]:
    """Return an error for each of verl's settings that QaRL's forward does not support.

    `engine`: the actor's `fsdp_config`. If it is not quantized, only attention is QaRL's."""
    errors: list[UserError] = []
    conflicts = list(_sharding_conflicts(engine))
    if isinstance(engine, QuantFSDPEngineConfig):
        if get_device_name() == "cuda":
            from qarl.checks.machine import check_this_gpu

            scheme = get_scheme(engine.quant.scheme)
            attempt(lambda: check_this_gpu(scheme, engine.quant.kernels), errors)
            errors += _refused_experts(model, engine, scheme)
        conflicts += _quantized_conflicts(engine)
        conflicts += _adapter_conflicts(model, engine)
        wraps = "it replaces or wraps layers that QaRL computes as vLLM does"
        for name in ("use_fused_kernels", "enable_activation_offload", "use_liger"):
            if getattr(model, name):
                conflicts.append(Conflict(f"{MODEL}.{name}", True, False, wraps))
    return [*errors, *(conflict.error() for conflict in conflicts)]


def _sharding_conflicts(engine: Any) -> Iterator[Conflict]:
    """Yield how the actor would be spread over ranks, or rounded, without QaRL's attention seeing it."""
    ranks = engine.ulysses_sequence_parallel_size
    if ranks > 1:
        # verl exchanges heads between ranks only in Flash Attention.
        rows = "each rank would compute attention only within its own part of a row"
        yield Conflict(f"{ACTOR}.ulysses_sequence_parallel_size", ranks, 1, rows)
    if engine.strategy != "fsdp2":
        hooks = (
            "low-bit weights are sent through hooks of FSDP2, and FSDP1 does not run without GPUs"
        )
        yield Conflict(f"{ACTOR}.strategy", engine.strategy, "fsdp2", hooks)
    precision = engine.mixed_precision or {}
    known = {"param_dtype", "reduce_dtype", "buffer_dtype"}  # the keys that QaRL's engine follows
    if set(precision) - known:
        good = f"keys of {known}"
        yield Conflict(f"{SHARDS}.mixed_precision", precision, good, "others would be ignored")


def _quantized_conflicts(engine: QuantFSDPEngineConfig) -> Iterator[Conflict]:
    """Yield settings of FSDP's that a quantized forward does not follow."""
    precision = engine.mixed_precision or {}
    dtype = str(precision.get("param_dtype", "bf16"))
    if dtype not in ("bf16", "bfloat16"):
        yield Conflict(f"{SHARDS}.mixed_precision.param_dtype", dtype, "bf16", "vLLM uses BF16")
    if engine.offload_policy:
        why = "shards are quantized on the GPU"
        yield Conflict(f"{SHARDS}.offload_policy", True, False, why)
    if engine.forward_only:
        yield Conflict(
            key=f"{REFERENCE}.fsdp_config._target_",
            value="it",
            good="verl.workers.config.FSDPEngineConfig",
            why="a reference is not quantized",
        )
    if engine.qat.enable:
        why = "qat would quantize the weights a second time"
        yield Conflict(f"{SHARDS}.qat.enable", True, False, why)


def _refused_experts(
    model: Any, engine: QuantFSDPEngineConfig, scheme: Scheme
) -> Iterator[UserError]:
    """Yield why experts on a GPU cannot have adapters beside them."""
    experts = bool(experts_of(getattr(model, "hf_config", None)))
    if not (experts and engine.quant.lora.r):
        return
    refusal = scheme.gpu_adapted_experts_refusal(f"{QUANT}.scheme={scheme.name}")
    if refusal is not None:
        yield refusal


def _adapter_conflicts(model: Any, engine: QuantFSDPEngineConfig) -> Iterator[Conflict]:
    """Yield adapters of verl's, and what QaRL's adapters do not go with."""
    if model.lora_rank > 0:
        yield Conflict(
            key=f"{MODEL}.lora_rank",
            value=model.lora_rank,
            good="0, and QaRL's lora.r to the rank",
            why="verl's adapters are peft's modules, which do not compute as vLLM does",
        )
    if not engine.quant.lora.r:
        return
    stored = str(engine.model_dtype or "fp32")
    if stored != "bf16":
        yield Conflict(f"{SHARDS}.model_dtype", stored, "bf16", "the base is frozen")


def disagreements(composed: Any, quant: QuantSettings) -> Iterator[UserError]:
    """Yield an error for each setting of vLLM that is not what the actor (`quant`) computes with. `composed`: verl's
    whole config."""
    yield from _other_quantization(composed, quant)
    yield from _other_kernels(composed, quant)
    for conflict in _other_settings(composed, quant):
        yield conflict.error()


def _other_quantization(composed: Any, quant: QuantSettings) -> Iterator[UserError]:
    from omegaconf import OmegaConf

    overrides = as_dict(OmegaConf.select(composed, OVERRIDES))
    scheme = get_scheme(quant.scheme, group_size=quant.group_size)
    actors = _arithmetic(scheme.quantization_config(quant.ignore) if scheme.quantized else {})
    engines = _arithmetic(as_dict(overrides.get("quantization_config")))
    differing = [name for name in actors | engines if actors.get(name) != engines.get(name)]
    if not differing:
        return

    def shown(config: Mapping[str, Any]) -> str:
        settings = [f"{name}={config[name]}" for name in differing if name in config]
        return ", ".join(settings) or "nothing quantized"

    keys = ("scheme", "group_size", "ignore")
    settings = ", ".join(f"{QUANT}.{key}={getattr(quant, key)}" for key in keys)
    yield UserError(
        "the actor and the rollout engine would have different quantization",
        where=f"{QUANT}, {OVERRIDES}.quantization_config",
        why=f"{settings} gives {shown(actors)}, but {OVERRIDES}.quantization_config has {shown(engines)}",
        fix=f"change the scheme by the group +qarl={quant.scheme} or by QaRL's quant.*, which set both",
    )


def _other_kernels(composed: Any, quant: QuantSettings) -> Iterator[UserError]:
    from omegaconf import OmegaConf

    asked = as_dict(as_dict(OmegaConf.select(composed, VLLM)).get("additional_config"))
    request = kernel_request(quant.kernels, quant.scheme)
    engines = [str(part) for part in asked.get(REQUEST_KEY) or ()]
    actors = [] if request is None else [request.kernels.value, request.scheme]
    if engines == actors:
        return
    key = f"+{VLLM}.additional_config.{REQUEST_KEY}"
    yield UserError(
        "the actor and the rollout engine would run different kernels",
        where=f"{QUANT}.kernels={quant.kernels}, {key}={engines or None}",
        why="the engine gets QaRL's kernels only by that entry, which QaRL's own config writes for quant.kernels",
        fix=f"set {key}=[{','.join(actors)}]" if actors else f"remove {key}",
    )


def _other_settings(composed: Any, quant: QuantSettings) -> Iterator[Conflict]:
    from omegaconf import OmegaConf

    overrides = as_dict(OmegaConf.select(composed, OVERRIDES))
    vllm = as_dict(OmegaConf.select(composed, VLLM))
    rollout = composed.actor_rollout_ref.rollout
    on_cpu = composed.trainer.device == "cpu"  # where every engine is eager
    of_engine = {
        "head_dtype": "fp32" if overrides.get("head_dtype") == "float32" else "model",
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "enforce_eager": quant.enforce_eager if on_cpu else rollout.enforce_eager,
        "lora.r": vllm.get("max_lora_rank") or 0,
    }
    of_actor = {
        "head_dtype": quant.head_dtype,
        "tensor_model_parallel_size": quant.tensor_model_parallel_size,
        "enforce_eager": quant.enforce_eager,
        "lora.r": engine_rank(quant.lora.r) if quant.lora.r else 0,
    }
    why = f"{ROLLOUT} makes it that in the engine, and the actor computes as the engine only if both are equal"
    for name, value in of_engine.items():
        if of_actor[name] != value:
            yield Conflict(f"{QUANT}.{name}", of_actor[name], value, why)
    if quant.lora.r:
        yield from _adapted_rollout(rollout, vllm, quant)
    receiver = str(OmegaConf.select(composed, RECEIVER) or "verl.")
    if receiver.startswith("verl."):
        yield Conflict(
            key=RECEIVER,
            value=receiver,
            good=f"{PLUGIN}.worker_extension.QaRLWorkerExtension",
            why="it is no receiver for what QaRL publishes: verl's does not know the records of a publish",
        )


def _adapted_rollout(
    rollout: Any, vllm: Mapping[str, Any], quant: QuantSettings
) -> Iterator[Conflict]:
    """Yield settings of a rollout that would not get, or not use, the adapters."""
    targets = tuple(quant.lora.target_modules)
    told = as_dict(vllm.get("additional_config")).get(TARGETS_KEY) or []
    if chooses_by_name(targets) and tuple(map(str, told)) != targets:
        yield Conflict(
            key=f"+{VLLM}.additional_config.{TARGETS_KEY}",
            value=list(told) or None,
            good=f"[{','.join(targets)}]",
            why="vLLM knows linears with adapters only by the last parts of their names",
        )
    adapts = "the engine gets an adapter, which is compared with the layers of its one worker"
    enabled = vllm.get("enable_lora", False)
    if not enabled:
        yield Conflict(f"{VLLM}.enable_lora", enabled, True, adapts)
    workers = rollout.tensor_model_parallel_size
    if workers != 1:
        yield Conflict(f"{ROLLOUT}.tensor_model_parallel_size", workers, 1, adapts)
    backend = rollout.checkpoint_engine.backend
    if backend != "naive":
        yield Conflict(
            key=f"{ROLLOUT}.checkpoint_engine.backend",
            value=backend,
            good="naive",
            why="separate rollout workers do not tell the actor whether they have the adapter's base",
        )


def _arithmetic(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what decides the arithmetic of a `quantization_config`. {}: nothing is quantized."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            settings |= _arithmetic(value, f"{name}.")
        elif name in ("num_bits", "type", "strategy", "group_size", "ignore") and value is not None:
            settings[prefix + name] = sorted(value) if name == "ignore" else value
    return settings
