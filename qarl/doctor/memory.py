"""Compares the memory estimate with the available memory."""

from __future__ import annotations

import math

from qarl.checks.lengths import check_kv_cache
from qarl.checks.machine import available_memory
from qarl.checks.memory import OFFLOAD, MemoryEstimate, estimate, readable
from qarl.checks.memory_terms import ranks
from qarl.doctor.context import Context, NotCheckedError
from qarl.doctor.findings import Topic

TIGHT = 0.9
"""An estimate above this share of the memory gives a warning, because estimates do not count fragmentation."""
MEAN_RESPONSE = 0.25
"""Assumed mean length of responses, as a share of `data.max_response_length`. Only responses that run into the limit
have its length."""
_SHARD = (
    "set optim.master_dtype=bf16, or verl's param_offload and optimizer_offload (backend=verl, "
    f"verl.{OFFLOAD[0]}=true), or shard over more GPUs (trainer.n_gpus_per_node)"
)
REMEDIES = {
    "rollout": f"lower rollout.gpu_memory_utilization (on CPU rollout.cpu_kvcache_space_gib), {_SHARD}",
    "old_log_prob": "lower actor.log_prob_micro_batch_size_per_gpu (by tokens: log_prob_max_token_len_per_gpu), "
    f"{_SHARD}",
    "update": "lower actor.ppo_micro_batch_size_per_gpu (by tokens: ppo_max_token_len_per_gpu), "
    f"set model.gradient_checkpointing=true, {_SHARD}",
    "step": "shard over more GPUs (backend=verl, trainer.n_gpus_per_node), or train a smaller model",
}
"""Advice for the phase that needs the most memory."""


def check_memory(context: Context, topic: Topic) -> None:
    """Add findings that say whether the run fits into memory, by an estimate."""
    size, config, target = context.size.get(), context.config, context.target
    if target.device == "cuda" and target.gpu_memory_bytes is None:
        raise NotCheckedError("the GPU's memory is not known", "set doctor.gpu_memory_gib, for example to 80")
    found = estimate(
        size,
        config,
        device=target.device,
        gpu_memory_bytes=target.gpu_memory_bytes or 0,
        align=context.align_level()[0],
        kernels=context.kernel_names,
        offload=all(config.verl.get(key) for key in OFFLOAD),
    )
    if target.device == "cuda":
        _compare(topic, found, found.peak, target.gpu_memory_bytes or 0, f"one GPU of {ranks(config)}")
        _host(topic, found, available_memory() if target.here else None)
    else:
        here = min(config.trainer.n_gpus_per_node, ranks(config))
        phase, peak = found.peak
        _compare(topic, found, (phase, peak * here), available_memory(), f"{here} rank{'s' * (here > 1)} on this CPU")
    _cache(topic, found, context)


def _compare(topic: Topic, found: MemoryEstimate, peak: tuple[str, int], limit: int, where: str) -> None:
    phase, needed = peak
    has_reference = any(part.name.startswith("reference policy") for part in found.parts)
    advice = f"{'leave out the KL term, ' if has_reference else ''}{REMEDIES[phase]}"
    what = f"{where}: {readable(needed)} needed at the peak (phase {phase}), of {readable(limit)}"
    if needed > limit:
        topic.error(what, fix=advice, lines=found.table())
    elif needed > TIGHT * limit:
        topic.warning(what, why="the estimate counts no fragmentation", fix=advice, lines=found.table())
    else:
        topic.ok(what, lines=found.table())


def _host(topic: Topic, found: MemoryEstimate, limit: int | None) -> None:
    """Compare the bytes that the GPUs' processes keep in host memory with the free bytes of the machine.

    `limit`: the free bytes, or None if the run is for a different machine, whose memory is not known."""
    if not found.host:
        return
    lines, needed = found.host_lines(), found.host_total
    what = f"host memory of one machine: {readable(needed)} for tensors beside the GPUs"
    fix = "turn off verl's offloading, its KL term, or publish.delta"
    if limit is None:
        topic.note(
            what, why="the doctor cannot see the other machine's memory", fix=f"if it has less, {fix}", lines=lines
        )
        return
    what += f", of {readable(limit)} that are free"
    if needed > limit:
        topic.error(what, fix=fix, lines=lines)
    elif needed > TIGHT * limit:
        topic.warning(what, why="the processes' own memory is not counted", fix=fix, lines=lines)
    else:
        topic.ok(what, lines=lines)


def _cache(topic: Topic, found: MemoryEstimate, context: Context) -> None:
    """Report how many sequences the KV cache holds, and from which mean length on vLLM preempts some.

    vLLM begins a sequence as long as its prompt fits. If the cache is full later, it frees the cache of a sequence and
    computes it again."""
    config = context.config
    if context.target.device == "cpu" and not topic.passes(check_kv_cache, config, context.hf_config.get()):
        return
    key = "rollout.gpu_memory_utilization" if context.target.device == "cuda" else "rollout.cpu_kvcache_space_gib"
    prompt, longest = config.data.max_prompt_length, config.data.max_response_length
    responses = config.data.train_batch_size * config.rollout.n
    wanted = responses * config.rollout.tensor_model_parallel_size / ranks(config)
    at_once = max(min(config.rollout.max_num_seqs, math.ceil(wanted)), 1)
    each = found.kv_tokens / at_once
    sequences = found.kv_tokens / (prompt + longest)
    what = f"vLLM's KV cache holds {found.kv_tokens:,} tokens, {sequences:.1f} sequences of full length"
    why = (
        f"each of {at_once} sequences at a time has room for {each:,.0f} tokens. If prompts and responses together are "
        "longer on average, vLLM preempts sequences and computes them again"
    )
    if sequences < 1:
        topic.error(what, where=key, why="vLLM does not start if no full sequence fits", fix=f"raise {key}")
    elif each < prompt + MEAN_RESPONSE * longest:
        begins = f"from a mean response of {each - prompt:,.0f} tokens on, with prompts of {prompt}"
        if each < prompt:
            begins = f"even for {at_once} prompts of {prompt} tokens at a time"
        fix = f"raise {key} if there is memory left, or lower rollout.max_num_seqs"
        topic.warning(f"{what}: too few {begins}", where=key, why=why, fix=fix)
    elif each < prompt + longest:
        topic.note(what, why=why, fix=f"raise {key} if there is memory left")
    else:
        topic.ok(what)


CHECKS = (check_memory,)
