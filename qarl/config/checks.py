"""Find keys that are each valid but do not fit together.

The checks read a flat dict of dotted keys, not a `Config`. So they can also check the valid keys of an invalid config,
and one error reports all problems. A check is skipped if a key that it needs is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qarl.config.errors import Problem
from qarl.config.ignore import is_ignored
from qarl.config.objective_checks import CHECKS

_Check = Callable[..., Problem | None]
_CHECKS: list[tuple[tuple[str, ...], _Check]] = [*CHECKS]
_TRIED = 2000
"""`divisors` tries every number up to this one. This finds all divisors of numbers up to its square."""


def check(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[Problem]:
    """Return every problem between keys of `values`. `sources` maps dotted keys to the place where each was given."""
    sources = sources or {}
    problems = []
    for keys, function in _CHECKS:
        if all(key in values for key in keys):
            problem = function(*(values[key] for key in keys))
            if problem is not None:
                problems.append(replace(problem, source=sources.get(problem.key)))
    return problems


def _between(*keys: str) -> Callable[[_Check], _Check]:
    def register(function: _Check) -> _Check:
        _CHECKS.append((keys, function))
        return function

    return register


@_between("data.train_batch_size", "actor.ppo_mini_batch_size")
def _whole_mini_batches(train: int, mini: int) -> Problem | None:
    if train % mini == 0:
        return None
    reason = f"data.train_batch_size = {train} prompts per step do not split into whole mini-batches of {mini} prompts"
    fix = f"choose a divisor of {train} ({divisors(train)}), or make data.train_batch_size a multiple of {mini}"
    return Problem("actor.ppo_mini_batch_size", mini, reason, fix)


@_between("actor.ppo_mini_batch_size", "rollout.n", "actor.ppo_micro_batch_size_per_gpu")
def _whole_micro_batches(mini: int, n: int, micro: int | None) -> Problem | None:
    if micro is None or (mini * n) % micro == 0:
        return None
    reason = (
        f"a mini-batch is actor.ppo_mini_batch_size * rollout.n = {mini} * {n} = {mini * n} responses, "
        f"which do not split into whole micro-batches of {micro} responses"
    )
    fix = f"choose a divisor of {mini * n}: {divisors(mini * n)}"
    return Problem("actor.ppo_micro_batch_size_per_gpu", micro, reason, fix)


def _one_kind_of_micro_batch(key: str, by_tokens: str) -> None:
    """Register the check that `key` is null if, and only if, micro-batches are limited by tokens (key `by_tokens`)."""

    @_between("actor.use_dynamic_bsz", f"actor.{key}")
    def _check(dynamic: bool, size: int | None) -> Problem | None:
        if dynamic == (size is None):
            return None
        if dynamic:
            fix = f"set it to null, or set actor.use_dynamic_bsz=false and actor.{by_tokens}=null"
            return Problem(f"actor.{key}", size, "actor.use_dynamic_bsz=true limits tokens, not responses", fix)
        fix = f"set it, or set actor.use_dynamic_bsz=true and actor.{by_tokens}"
        return Problem(f"actor.{key}", None, "actor.use_dynamic_bsz=false requires a size of micro-batches", fix)


_one_kind_of_micro_batch("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
_one_kind_of_micro_batch("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")


def _tokens_hold_a_row(key: str) -> None:
    """Register a check: `key` requires actor.use_dynamic_bsz=true and must allow a row of full length."""

    @_between(f"actor.{key}", "actor.use_dynamic_bsz", "data.max_prompt_length", "data.max_response_length")
    def _check(limit: int | None, dynamic: bool, prompt: int, response: int) -> Problem | None:
        if limit is None:
            if not dynamic or key != "ppo_max_token_len_per_gpu":
                return None
            reason = "actor.use_dynamic_bsz=true fills micro-batches up to this number of tokens"
            fix = f"set it to {prompt + response} or more, or set actor.use_dynamic_bsz=false"
            return Problem(f"actor.{key}", None, reason, fix)
        if not dynamic:
            reason = "actor.use_dynamic_bsz=false limits responses, not tokens"
            return Problem(f"actor.{key}", limit, reason, "set it to null, or set actor.use_dynamic_bsz=true")
        if limit >= prompt + response:
            return None
        reason = (
            "a row can have data.max_prompt_length + data.max_response_length = "
            f"{prompt} + {response} = {prompt + response} tokens, and a row is never split"
        )
        fix = f"set it to {prompt + response} or more, or lower data.max_response_length"
        return Problem(f"actor.{key}", limit, reason, fix)


_tokens_hold_a_row("ppo_max_token_len_per_gpu")
_tokens_hold_a_row("log_prob_max_token_len_per_gpu")


@_between("model.use_remove_padding", "actor.use_dynamic_bsz")
def _tokens_are_counted_without_padding(packed: bool, dynamic: bool) -> Problem | None:
    if packed or not dynamic:
        return None
    reason = "actor.use_dynamic_bsz=true limits the tokens of a micro-batch, but padding takes memory too"
    return Problem("model.use_remove_padding", packed, reason, "leave it at true, or set actor.use_dynamic_bsz=false")


@_between("quant.scheme", "quant.group_size")
def _int4_group(scheme: str, group_size: int) -> Problem | None:
    if scheme not in ("w4a16", "w4a8") or group_size % 8 == 0:
        return None
    reason = f"{scheme} packs eight int4 values into an int32 word, so a group must have whole words"
    return Problem("quant.group_size", group_size, reason, "choose a multiple of 8: 128, or 32 for tiny models")


@_between("quant.kernels", "quant.scheme", "backend")
def _kernels_have_something_to_do(kernels: str, scheme: str, backend: str) -> Problem | None:
    if kernels == "engine":
        return None
    fix = "set it to engine"
    if scheme == "bf16":
        return Problem("quant.kernels", kernels, "quant.scheme=bf16 has no quantized layers", fix)
    if backend == "verl":
        reason = "QaRL gives its own kernels only to the engine of backend=local"
        return Problem("quant.kernels", kernels, reason, f"{fix}, or set backend=local")
    if kernels == "dequantized" and scheme != "w4a16":
        reason = f"{scheme} rounds the activations to 8 bits, and a BF16 product would not"
        fix = "set it to qarl" if scheme == "w4a8" else fix
        return Problem("quant.kernels", kernels, reason, f"{fix}, or set quant.scheme=w4a16")
    return None


@_between("quant.scheme", "quant.ignore")
def _lm_head_stays(scheme: str, ignore: list[str] | str) -> Problem | None:
    patterns = [ignore] if isinstance(ignore, str) else ignore
    if scheme == "bf16" or is_ignored("lm_head", patterns):
        return None
    reason = "lm_head would be quantized, but with a quantized lm_head vLLM returns wrong results without an error"
    return Problem("quant.ignore", ignore, reason, "add lm_head to the list")


@_between("data.val_files", "trainer.test_freq", "trainer.val_before_train")
def _something_to_evaluate(val_files: list[str], test_freq: int, val_before_train: bool) -> Problem | None:
    if val_files or not (test_freq > 0 or val_before_train):
        return None
    when = "before training (trainer.val_before_train)"
    if test_freq > 0:
        when = f"every {test_freq} steps (trainer.test_freq)"
    fix = "name a file, or set trainer.test_freq=-1 and trainer.val_before_train=false"
    return Problem("data.val_files", val_files, f"an evaluation is due {when}, but no file is given", fix)


@_between("rollout.max_num_batched_tokens", "rollout.max_num_seqs")
def _room_for_every_sequence(tokens: int | None, seqs: int) -> Problem | None:
    if tokens is None or tokens >= seqs:
        return None
    reason = f"vLLM needs at least rollout.max_num_seqs = {seqs} tokens per step, one for each sequence"
    fix = f"choose {seqs} or more, lower rollout.max_num_seqs, or leave it null for vLLM's default"
    return Problem("rollout.max_num_batched_tokens", tokens, reason, fix)


@_between("backend", "trainer.nnodes", "trainer.n_gpus_per_node", "rollout.tensor_model_parallel_size")
def _local_is_one_process(backend: str, nodes: int, gpus: int, parallel: int) -> Problem | None:
    if backend != "local" or (nodes, gpus, parallel) == (1, 1, 1):
        return None
    given = {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": gpus,
        "rollout.tensor_model_parallel_size": parallel,
    }
    key = next(key for key, value in given.items() if value != 1)
    reason = "backend=local is one process on one device"
    return Problem(key, given[key], reason, "set it to 1, or set backend=verl")


@_between("backend", "verl")
def _verl_keys_need_verl(backend: str, verl: dict[str, Any]) -> Problem | None:
    if backend == "verl" or not verl:
        return None
    return Problem("verl", verl, "backend=local does not use verl's keys", "remove them, or set backend=verl")


@_between("trainer.resume_mode", "trainer.resume_from_path")
def _a_path_to_resume_from(mode: str, path: str | None) -> Problem | None:
    if (mode == "resume_path") == (path is not None):
        return None
    if path is None:
        fix = "set trainer.resume_from_path=RUN/checkpoints/step_N, or use trainer.resume_mode=auto"
        return Problem("trainer.resume_mode", mode, "no checkpoint to resume from is given", fix)
    reason = f"trainer.resume_mode = {mode} does not use it"
    return Problem(
        "trainer.resume_from_path",
        path,
        reason,
        "set trainer.resume_mode=resume_path, or remove trainer.resume_from_path",
    )


@_between("backend", "rollout.val_temperature")
def _local_evaluates_greedily(backend: str, temperature: float) -> Problem | None:
    if backend != "local" or temperature == 0:
        return None
    reason = "backend=local evaluates with one greedy response per prompt"
    return Problem("rollout.val_temperature", temperature, reason, "set it to 0, or set backend=verl")


@_between("backend", "quant.align", "rollout.top_p", "rollout.top_k")
def _both_sides_keep_the_same_tokens(backend: str, align: str, top_p: float, top_k: int) -> Problem | None:
    if top_p == 1 and top_k <= 0:
        return None
    key, value, off = ("rollout.top_p", top_p, 1) if top_p < 1 else ("rollout.top_k", top_k, -1)
    reason = "the engine samples only from the likeliest tokens, but the log-probs of "
    if backend == "verl":
        reason += "verl's trainer are over the whole vocabulary"
        return Problem(key, value, reason, f"set it to {off}, or set backend=local")
    if align in ("model", "exact"):
        return None
    reason += f"a trainer at quant.align={align} are too inexact to identify these tokens"
    return Problem(key, value, reason, f"set it to {off}, or set quant.align=model")


@_between("model.dtype", "quant.scheme", "backend", "optim.master_dtype")
def _fp16_is_unquantized(dtype: str, scheme: str, backend: str, masters: str) -> Problem | None:
    if dtype != "fp16":
        return None
    fix = "set it to bf16, or set "
    if scheme != "bf16":
        reason = f"the quantizer and the layers of {scheme} take BF16 weights and activations"
        return Problem("model.dtype", dtype, reason, fix + "quant.scheme=bf16 (no quantization)")
    if backend == "verl":
        return Problem("model.dtype", dtype, "backend=verl trains in BF16", fix + "backend=local")
    if masters != "fp32":
        reason = "stochastic rounding of masters is from FP32 to BF16"
        return Problem("model.dtype", dtype, reason, fix + "optim.master_dtype=fp32")
    return None


@_between("actor.old_log_probs", "rollout.top_p", "rollout.top_k")
def _kept_tokens_come_from_the_pass(source: str, top_p: float, top_k: int) -> Problem | None:
    if source == "recompute" or (top_p == 1 and top_k <= 0):
        return None
    key = "rollout.top_p below 1" if top_p < 1 else "rollout.top_k"
    reason = f"with {key}, the pass that recomputes old log-probs is needed to find the tokens that both sides keep"
    return Problem("actor.old_log_probs", source, reason, "set it to recompute")


MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this value. A test compares it with vLLM's own constant."""


@_between("rollout.temperature")
def _temperature_is_taken_as_it_is(temperature: float) -> Problem | None:
    if temperature >= MIN_TEMPERATURE or temperature <= 0:
        return None
    reason = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would be for {temperature}"
    return Problem("rollout.temperature", temperature, reason, f"set it to {MIN_TEMPERATURE} or more")


@_between("rollout.val_temperature")
def _val_temperature_is_taken_as_it_is(temperature: float) -> Problem | None:
    if temperature >= MIN_TEMPERATURE or temperature <= 0:
        return None
    reason = f"vLLM samples at {MIN_TEMPERATURE} instead"
    return Problem("rollout.val_temperature", temperature, reason, f"set it to 0 (greedy) or {MIN_TEMPERATURE} or more")


def divisors(number: int) -> str:
    """Return the divisors of `number` as text. If there are more than 12, show only the first and the last five."""
    small = [divisor for divisor in range(1, min(number, _TRIED) + 1) if number % divisor == 0]
    found = [str(divisor) for divisor in sorted({*small, *(number // divisor for divisor in small)})]
    return ", ".join(found if len(found) <= 12 else [*found[:5], "...", *found[-5:]])
