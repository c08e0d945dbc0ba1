"""The doctor's checks of the model: weights, the ignore list as vLLM reads it, kernels, a publish, and its memory."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qarl.align.applied_level import AppliedLevel
from qarl.checks import layers, memory
from qarl.checks.check import (
    Check,
    Finding,
    Findings,
    NotCheckedError,
    Status,
    error,
    note,
    ok,
    warning,
)
from qarl.checks.exactness import exceptions
from qarl.checks.gpu_memory_decides import MEAN_RESPONSE, sequences_at_once
from qarl.checks.machine import Machine
from qarl.checks.memory import OFFLOAD, TIGHT, MemoryEstimate, estimate, readable, recomputes
from qarl.checks.memory_parts import adapter_parameters, ranks
from qarl.checks.model_size import ModelSize, Shape
from qarl.config import Config
from qarl.config.ignored_layers import is_ignored, resolve_ignored
from qarl.errors import UserError
from qarl.kernels.base import Kernel
from qarl.kernels.registry import Choice
from qarl.process import vllm_unusable
from qarl.rollout.chosen_kernel import chosen_kernel
from qarl.rollout.publish.manifest import expected_manifest, quantized_layers
from qarl.schemes import Scheme

_SHARD = (
    "set optim.master_dtype=bf16, or verl's param_offload and optimizer_offload (backend=verl, "
    f"verl.{OFFLOAD[0]}=true), or shard over more GPUs (trainer.n_gpus_per_node)"
)
_ADAPTED = "lower lora.r, on a CPU also rollout.max_num_batched_tokens, or train a smaller model"
"""In place of `_SHARD` with adapters, whose base is in BF16 or fewer bits and whole on each GPU."""
REMEDIES = {
    "rollout": f"lower rollout.gpu_memory_utilization (on CPU rollout.cpu_kvcache_space_gib), {_SHARD}",
    "old_log_prob": "lower actor.log_prob_micro_batch_size_per_gpu (by tokens: log_prob_max_token_len_per_gpu), "
    f"{_SHARD}",
    "update": "lower actor.ppo_micro_batch_size_per_gpu (by tokens: ppo_max_token_len_per_gpu), "
    f"set model.gradient_checkpointing=true, {_SHARD}",
    "step": "shard over more GPUs (backend=verl, trainer.n_gpus_per_node), or train a smaller model",
}
"""Advice for the phase that needs the most memory."""


def weights(config: Config, model: nn.Module, weight_files: list[Path]) -> Findings:
    """Say what the run reads, whose checks of the files are in the registry (`qarl.checks.registry`)."""
    if not weight_files:
        size = readable(2 * sum(parameter.numel() for parameter in model.parameters()))
        why = f"{config.model.path} holds no safetensors here; the weights have {size}"
        raise NotCheckedError(why, "run the doctor where they are, stored as safetensors")
    yield ok(f"the weights are in {len(weight_files)} safetensors files")


def ignored_layers(
    config: Config, scheme: Scheme, linears: layers.Shapes, quantized: layers.Shapes
) -> Findings:
    """Say which layers stay in BF16, and which entries of quant.ignore match no layer."""
    if not scheme.quantized:
        yield ok("scheme bf16: nothing is quantized, quant.ignore is not used")
        return
    entries = config.quant.ignore
    routers = layers.routers(linears)
    resolved = resolve_ignored(linears, entries)
    in_bf16 = layers.name_layers(resolved.ignored) or "none"
    yield ok(f"{len(quantized)} of {len(linears)} linears are quantized; in BF16: {in_bf16}")
    # These entries may match nothing: lm_head, which may be tied, and routers, which are linears only in vLLM.
    of_routers = set()
    for entry in entries:
        if any(is_ignored(name, [entry]) for name in routers):
            of_routers.add(entry)
    if unmatched := set(resolved.unmatched) - {"lm_head"} - of_routers:
        yield warning(
            f"entries of quant.ignore that match no linear: {', '.join(sorted(unmatched))}",
            where="quant.ignore",
            why="a name must be complete (model.layers.0.mlp.down_proj), and a re: pattern must match a name's start",
            fix="correct them, or remove them",
        )


def trainer_kernels(
    config: Config,
    scheme: Scheme,
    machine: Machine,
    quantized: layers.Shapes,
    kernels: dict[tuple[int, int], Choice | UserError],
    experts_kernel: Choice | None,
) -> Findings:
    """Say which kernels the trainer has. On a CPU vLLM uses the same one for experts. On GPUs it has its own."""
    if config.quant.kernels.own_low_bit and not machine.on_cpu and not machine.here:
        raise NotCheckedError(
            "QaRL's own kernels depend on the machine of the run", "run the doctor there too"
        )
    if not scheme.quantized or not config.quant.align.low_bit:
        yield ok(
            "trainer: every layer multiplies in BF16"
            + (" (quant.align=off)" if scheme.quantized else "")
        )
        return
    yield from (
        Finding.of(refusal) for refusal in kernels.values() if isinstance(refusal, UserError)
    )
    names_of: dict[Choice, list[str]] = {}
    for name, shape in quantized.items():
        choice = kernels.get(shape)
        if isinstance(choice, Choice) and not layers.of_expert(name):
            names_of.setdefault(choice, []).append(name)
    for choice, names in names_of.items():
        yield _kernel(machine, choice, f"{len(names)} layers", layer_lines(names, quantized))
    if experts_kernel is not None:
        experts = [name for name in quantized if layers.of_expert(name)]
        weights = f"{len(experts)} matrices of experts"
        yield _kernel(machine, experts_kernel, weights, layer_lines(experts, quantized))


def _kernel(machine: Machine, choice: Choice, weights: str, lines: tuple[str, ...]) -> Finding:
    """Return a finding on the trainer's kernel for some weights. The reference is exact, but slow."""
    what = f"trainer: {choice.kernel.name} multiplies {weights}"
    why = "; ".join(choice.passed_over)
    if not choice.kernel.reference:
        return ok(what + (f" (not {why})" if why else ""), lines=lines)
    if machine.here:
        return warning(
            what, why=why, fix="expect slow steps: this machine has no faster kernel", lines=lines
        )
    what = f"not checked: which kernel of the trainer multiplies {weights}"
    return note(
        what,
        why=f"this machine lacks what {machine.name} runs",
        fix="run the doctor there too",
        lines=lines,
    )


def engine_kernels(
    config: Config, scheme: Scheme, machine: Machine, quantized: layers.Shapes
) -> Findings:
    if not scheme.quantized:
        return
    if not machine.here:
        raise NotCheckedError(
            "vLLM's choice depends on the machine of the run", "run the doctor there too"
        )
    if why_not := vllm_unusable():
        raise NotCheckedError(why_not, "make setup")

    @functools.cache
    def asked(part: tuple[int, int], whole: tuple[int, int]) -> tuple[bool, str]:
        try:
            return True, chosen_kernel(scheme, part, whole, config.quant.kernels)
        except ValueError as refusal:
            return False, " ".join(str(refusal).split())

    experts = {name for name in quantized if layers.of_expert(name)}
    dense = {name: shape for name, shape in quantized.items() if name not in experts}
    workers = config.rollout.tensor_model_parallel_size
    parts = {}
    answers: dict[tuple[bool, str], list[str]] = {}
    for fused, members in layers.fused_groups(dense).items():
        n = sum(dense[name][0] for name in members)
        k = dense[members[0]][1]
        parts[fused] = (
            (n, k // workers) if fused.endswith(layers.ROW_PARALLEL) else (n // workers, k)
        )
        answer_of_part = asked(parts[fused], (n, k))
        answers.setdefault(answer_of_part, []).append(fused)
    for (supported, answer), names in answers.items():
        if supported:
            what = f"vLLM: {answer} multiplies {len(names)} layers, counted after fusing"
            yield ok(what, lines=layer_lines(names, parts))
        else:
            yield error(
                f"vLLM has no kernel for {len(names)} layers",
                where=layers.name_layers(names),
                why=answer,
                fix="add these layers to quant.ignore, or choose another quant.scheme or quant.group_size",
            )


def compiled_kernels(scheme: Scheme, machine: Machine, experts_kernel: Choice | None) -> Findings:
    """Launch what the driver compiles at its first launch, so that the run finds it compiled."""
    if experts_kernel is None:
        return
    name = experts_kernel.kernel.name
    began = time.monotonic()
    try:
        compiles = experts_kernel.kernel.warm(scheme, torch.device(machine.device))
    except RuntimeError as failure:
        yield warning(
            f"{name} was not launched",
            why=str(failure).partition("\n")[0],
            fix="nothing, if other processes fill the GPU; the run's first step may then take a minute longer",
        )
        return
    if compiles:
        seconds = time.monotonic() - began
        yield ok(f"the driver has compiled {name} ({seconds:.0f} s), and caches it for the run")


def layer_lines(names: Sequence[str], shapes: layers.Shapes) -> tuple[str, ...]:
    """Return lines with name and [N, K]. Layers whose names differ only in numbers share a line."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name in names:
        by_shape.setdefault(shapes[name], []).append(name)
    lines = []
    for shape, alike in by_shape.items():
        for name in layers.name_layers(alike).split(", "):
            lines.append(f"{name}  {list(shape)}")
    return tuple(lines)


def alignment(
    config: Config, level: AppliedLevel, unconfirmed: str | None, hf_config: Any
) -> Findings:
    asked = level.asked
    applied = level.level
    if level.why_lower:
        yield warning(
            f"quant.align={asked} will fall back to {applied}",
            why="; ".join(level.why_lower),
            fix=f"set quant.align={applied} if you accept that, and watch mismatch/abs_mean",
        )
    else:
        state = "applies" if applied == asked else f"is {applied} on this machine"
        yield ok(f"quant.align={asked} {state}")
    if applied.zero_mismatch:
        yield from map(note, exceptions(config, hf_config))
    if unconfirmed:
        yield warning(
            f"quant.align={applied} is unconfirmed on GPUs",
            why=unconfirmed.removeprefix("unconfirmed: "),
            fix="watch mismatch/abs_mean; while it is unconfirmed, the limit on the mismatch is that of linears",
        )


def published(config: Config, scheme: Scheme, hf_config: Any, quantized: layers.Shapes) -> Findings:
    """Say how many tensors one publish sends to the engine, and their bytes."""
    manifest = expected_manifest(hf_config, scheme, tuple(config.quant.ignore))
    size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in manifest.values())
    often = "per publish"
    if adapters := adapter_parameters(ModelSize.from_config(hf_config), config):
        often = f"at the start, and adapters of {readable(2 * adapters)} per publish"
    yield ok(
        f"{len(manifest)} tensors, {readable(size)} {often}; {len(quantized_layers(manifest))} low-bit layers"
    )


def planned_memory(
    config: Config,
    machine: Machine,
    size: ModelSize,
    hf_config: Any,
    level: AppliedLevel,
    trainer_kernels: dict[Shape, type[Kernel]],
) -> Findings:
    """Compare the memory estimate with the memory of the machine."""
    if not machine.on_cpu and machine.gpu_memory_bytes is None:
        raise NotCheckedError(
            "the GPU's memory is not known", "set doctor.gpu_memory_gib, for example to 80"
        )
    plan = estimate(
        size,
        config,
        device=machine.device,
        gpu_memory_bytes=machine.gpu_memory_bytes or 0,
        level=level.level,
        kernels=trainer_kernels,
    )
    phase, needed = plan.peak
    remedy = REMEDIES[phase].replace(_SHARD, _ADAPTED) if config.lora.r else REMEDIES[phase]
    if machine.on_cpu:
        here = min(config.trainer.n_gpus_per_node, ranks(config))
        owner = f"{here} rank{'s' if here > 1 else ''} on this CPU"
        limit = memory.available_memory()
        needed *= here
    else:
        owner = f"one GPU of {ranks(config)}"
        limit = machine.gpu_memory_bytes or 0
    kl = any(part.name.startswith("reference policy") for part in plan.parts)
    yield compared(
        f"{owner}: {readable(needed)} needed at the peak (phase {phase}), of {readable(limit)}",
        needed,
        limit,
        fix=("leave out the KL term, " if kl else "") + remedy,
        lines=plan.table(),
    )
    at_once = sequences_at_once(
        config, hf_config, device=machine.device, gpu_memory_bytes=machine.gpu_memory_bytes
    )
    if not machine.on_cpu and config.rollout.max_num_seqs is None:
        yield ok(f"vLLM decodes up to {at_once} sequences at once (rollout.max_num_seqs is null)")
    if not machine.on_cpu and config.model.gradient_checkpointing is None:
        yield recomputation(recomputes(size, config, machine.device, limit))
    if plan.host:
        yield host_memory(plan, memory.available_memory() if machine.here else None)
    yield from kv_cache(config, machine, plan, at_once)


def compared(what: str, needed: int, limit: int, *, fix: str, lines: list[str]) -> Finding:
    """Return an error if more is needed than there is, and a warning if it is tight."""
    status: Status = "error" if needed > limit else "warning" if needed > TIGHT * limit else "ok"
    return Finding(
        status, what, why="the estimate counts no fragmentation", fix=fix, lines=tuple(lines)
    )


def recomputation(needed: bool) -> Finding:
    """Say what `model.gradient_checkpointing=null` means on this GPU."""
    if needed:
        return note(
            "activations are recomputed in the backward",
            why="the update would not fit otherwise",
            fix="smaller micro-batches may do without; model.gradient_checkpointing=false forbids it",
        )
    return ok("activations are not recomputed: the update fits without")


def host_memory(plan: MemoryEstimate, limit: int | None) -> Finding:
    """Compare the bytes that the GPUs' processes keep in host memory with the free bytes of the machine.

    `limit`: the free bytes, or None if the run is for a different machine, whose memory is not known."""
    what = f"host memory of one machine: {readable(plan.host_total)} for tensors beside the GPUs"
    fix = "turn off verl's offloading or its KL term"
    if limit is None:
        return note(
            what, fix=f"if the other machine has less, {fix}", lines=tuple(plan.host_lines())
        )
    what += f", of {readable(limit)} that are free"
    return compared(what, plan.host_total, limit, fix=fix, lines=plan.host_lines())


def kv_cache(config: Config, machine: Machine, plan: MemoryEstimate, most_at_once: int) -> Findings:
    """Say how many sequences the KV cache holds, and from which mean length on vLLM preempts some.

    vLLM begins a sequence as long as its prompt fits. If the cache is full later, it frees the cache of a sequence and
    computes it again."""
    key = "rollout.cpu_kvcache_space_gib" if machine.on_cpu else "rollout.gpu_memory_utilization"
    prompt = config.data.max_prompt_length
    longest = config.data.max_response_length
    responses = config.data.train_batch_size * config.rollout.n
    per_engine = -(-responses * config.rollout.tensor_model_parallel_size // ranks(config))
    at_once = max(min(most_at_once, per_engine), 1)
    each = plan.kv_tokens / at_once
    sequences = plan.kv_tokens / (prompt + longest)
    what = (
        f"vLLM's KV cache holds {plan.kv_tokens:,} tokens, {sequences:.1f} sequences of full length"
    )
    why = (
        f"each of {at_once} sequences at a time has room for {each:,.0f} tokens. If prompts and responses together are "
        "longer on average, vLLM preempts sequences and computes them again"
    )
    fix = f"raise {key} if there is memory left, or lower rollout.max_num_seqs"
    if sequences < 1:
        if not machine.on_cpu:  # a check of the run says it for CPUs
            yield error(
                what,
                where=key,
                why="vLLM does not start if no full sequence fits",
                fix=f"raise {key}",
            )
    elif each < prompt + longest:
        few = each < prompt + MEAN_RESPONSE * longest
        yield Finding("warning" if few else "note", what, where=key, why=why, fix=fix)
    else:
        yield ok(what)


CHECKS = (
    Check("weights", "the weights are here", weights),
    Check("ignore list", "entries of quant.ignore match layers", ignored_layers),
    Check("kernels", "the trainer has kernels", trainer_kernels),
    Check("kernels", "vLLM has kernels", engine_kernels),
    Check(
        "kernels",
        "the driver has compiled what it must",
        compiled_kernels,
        here=True,
        device="cuda",
    ),
    Check("kernels", "quant.align applies", alignment),
    Check("published tensors", "a publish", published),
    Check("memory", "the run fits into memory", planned_memory),
)
