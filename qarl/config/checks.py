"""Find keys that are each valid but do not fit together.

The checks read a flat dict of dotted keys, not a `Config`. So they can also check the valid keys of an invalid config,
and one error reports all problems. A check ends at the first key that is missing because its value is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from qarl.config.errors import Problem
from qarl.config.ignore import is_ignored
from qarl.config.objective_checks import CHECKS, Problems, Values, bad

_TRIED = 2000
"""`divisors` tries every number up to this one. This finds all divisors of numbers up to its square."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this value. A test compares it with vLLM's own constant."""


def check(values: Values, sources: Mapping[str, str] | None = None) -> list[Problem]:
    """Return every problem between keys of `values`. `sources` maps dotted keys to the place where each was given."""
    problems: list[Problem] = []
    for function in (*CHECKS, *_CHECKS):
        with suppress(KeyError):
            problems.extend(function(values))
    return [replace(problem, source=(sources or {}).get(problem.key)) for problem in problems]


def whole_mini_batches(v: Values) -> Problems:
    key, train = "actor.ppo_mini_batch_size", v["data.train_batch_size"]
    if train % v[key]:
        reason = f"data.train_batch_size = {train} prompts per step do not split into whole mini-batches of {v[key]} "
        fix = f"choose a divisor of {train} ({divisors(train)}), or make data.train_batch_size a multiple of {v[key]}"
        yield bad(v, key, reason + "prompts", fix)


def whole_micro_batches(v: Values) -> Problems:
    key = "actor.ppo_micro_batch_size_per_gpu"
    mini, n, micro = v["actor.ppo_mini_batch_size"], v["rollout.n"], v[key]
    if micro is not None and (mini * n) % micro:
        reason = (
            f"a mini-batch is actor.ppo_mini_batch_size * rollout.n = {mini} * {n} = {mini * n} responses, "
            f"which do not split into whole micro-batches of {micro} responses"
        )
        yield bad(v, key, reason, f"choose a divisor of {mini * n}: {divisors(mini * n)}")


def one_kind_of_micro_batch(kind: str, v: Values) -> Problems:
    """`kind`: ppo or log_prob. The size in responses is null if, and only if, micro-batches are limited by tokens."""
    key, by_tokens = f"actor.{kind}_micro_batch_size_per_gpu", f"actor.{kind}_max_token_len_per_gpu"
    dynamic = v["actor.use_dynamic_bsz"]
    if dynamic and v[key] is not None:
        fix = f"set it to null, or set actor.use_dynamic_bsz=false and {by_tokens}=null"
        yield bad(v, key, "actor.use_dynamic_bsz=true limits tokens, not responses", fix)
    elif not dynamic and v[key] is None:
        fix = f"set it, or set actor.use_dynamic_bsz=true and {by_tokens}"
        yield bad(v, key, "actor.use_dynamic_bsz=false requires a size of micro-batches", fix)


def tokens_hold_a_row(kind: str, v: Values) -> Problems:
    """`kind`: ppo or log_prob. A limit of tokens requires actor.use_dynamic_bsz and must allow a row of full length."""
    key, dynamic = f"actor.{kind}_max_token_len_per_gpu", v["actor.use_dynamic_bsz"]
    prompt, response = v["data.max_prompt_length"], v["data.max_response_length"]
    limit, longest = v[key], prompt + response
    if limit is None and dynamic and kind == "ppo":
        reason = "actor.use_dynamic_bsz=true fills micro-batches up to this number of tokens"
        yield bad(v, key, reason, f"set it to {longest} or more, or set actor.use_dynamic_bsz=false")
    elif limit is not None and not dynamic:
        reason = "actor.use_dynamic_bsz=false limits responses, not tokens"
        yield bad(v, key, reason, "set it to null, or set actor.use_dynamic_bsz=true")
    elif limit is not None and limit < longest:
        reason = (
            "a row can have data.max_prompt_length + data.max_response_length = "
            f"{prompt} + {response} = {longest} tokens, and a row is never split"
        )
        yield bad(v, key, reason, f"set it to {longest} or more, or lower data.max_response_length")


def tokens_are_counted_without_padding(v: Values) -> Problems:
    key = "model.use_remove_padding"
    if not v[key] and v["actor.use_dynamic_bsz"]:
        reason = "actor.use_dynamic_bsz=true limits the tokens of a micro-batch, but padding takes memory too"
        yield bad(v, key, reason, "leave it at true, or set actor.use_dynamic_bsz=false")


def int4_group(v: Values) -> Problems:
    key, scheme = "quant.group_size", v["quant.scheme"]
    if scheme in ("w4a16", "w4a8") and v[key] % 8:
        reason = f"{scheme} packs eight int4 values into an int32 word, so a group must have whole words"
        yield bad(v, key, reason, "choose a multiple of 8: 128, or 32 for tiny models")


def kernels_have_something_to_do(v: Values) -> Problems:
    key, scheme, fix = "quant.kernels", v["quant.scheme"], "set it to engine"
    if v[key] == "engine":
        return
    if scheme == "bf16":
        yield bad(v, key, "quant.scheme=bf16 has no quantized layers", fix)
    elif v["backend"] == "verl":
        reason = "QaRL gives its own kernels only to the engine of backend=local"
        yield bad(v, key, reason, f"{fix}, or set backend=local")
    elif v[key] == "dequantized" and scheme != "w4a16":
        reason = f"{scheme} rounds the activations to 8 bits, and a BF16 product would not"
        fix = "set it to qarl" if scheme == "w4a8" else fix
        yield bad(v, key, reason, f"{fix}, or set quant.scheme=w4a16")


def lm_head_stays(v: Values) -> Problems:
    key = "quant.ignore"
    patterns = [v[key]] if isinstance(v[key], str) else v[key]
    if v["quant.scheme"] != "bf16" and not is_ignored("lm_head", patterns):
        reason = "lm_head would be quantized, but with a quantized lm_head vLLM returns wrong results without an error"
        yield bad(v, key, reason, "add lm_head to the list")


def something_to_evaluate(v: Values) -> Problems:
    key, test_freq = "data.val_files", v["trainer.test_freq"]
    if not v[key] and (test_freq > 0 or v["trainer.val_before_train"]):
        when = "before training (trainer.val_before_train)"
        if test_freq > 0:
            when = f"every {test_freq} steps (trainer.test_freq)"
        fix = "name a file, or set trainer.test_freq=-1 and trainer.val_before_train=false"
        yield bad(v, key, f"an evaluation is due {when}, but no file is given", fix)


def room_for_every_sequence(v: Values) -> Problems:
    key, seqs = "rollout.max_num_batched_tokens", v["rollout.max_num_seqs"]
    if v[key] is not None and v[key] < seqs:
        reason = f"vLLM needs at least rollout.max_num_seqs = {seqs} tokens per step, one for each sequence"
        fix = f"choose {seqs} or more, lower rollout.max_num_seqs, or leave it null for vLLM's default"
        yield bad(v, key, reason, fix)


def local_is_one_process(v: Values) -> Problems:
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", "rollout.tensor_model_parallel_size")
    key = next((key for key in keys if v[key] != 1), None)
    if v["backend"] == "local" and key:
        yield bad(v, key, "backend=local is one process on one device", "set it to 1, or set backend=verl")


def verl_keys_need_verl(v: Values) -> Problems:
    if v["backend"] != "verl" and v["verl"]:
        yield bad(v, "verl", "backend=local does not use verl's keys", "remove them, or set backend=verl")


def a_path_to_resume_from(v: Values) -> Problems:
    key, path = "trainer.resume_mode", "trainer.resume_from_path"
    if v[key] == "resume_path" and v[path] is None:
        fix = "set trainer.resume_from_path=RUN/checkpoints/step_N, or use trainer.resume_mode=auto"
        yield bad(v, key, "no checkpoint to resume from is given", fix)
    elif v[key] != "resume_path" and v[path] is not None:
        fix = "set trainer.resume_mode=resume_path, or remove trainer.resume_from_path"
        yield bad(v, path, f"trainer.resume_mode = {v[key]} does not use it", fix)


def local_evaluates_greedily(v: Values) -> Problems:
    key = "rollout.val_temperature"
    if v["backend"] == "local" and v[key] != 0:
        reason = "backend=local evaluates with one greedy response per prompt"
        yield bad(v, key, reason, "set it to 0, or set backend=verl")


def both_sides_sample_from_the_same_tokens(v: Values) -> Problems:
    backend, align, top_p, top_k = v["backend"], v["quant.align"], v["rollout.top_p"], v["rollout.top_k"]
    if top_p == 1 and top_k <= 0:
        return
    key, off = ("rollout.top_p", 1) if top_p < 1 else ("rollout.top_k", -1)
    reason = "the engine samples only from the likeliest tokens, but the log-probs of "
    if backend == "verl":
        reason += "verl's trainer are over the whole vocabulary"
        yield bad(v, key, reason, f"set it to {off}, or set backend=local")
    elif align not in ("model", "exact"):
        reason += f"a trainer at quant.align={align} are too inexact to identify these tokens"
        yield bad(v, key, reason, f"set it to {off}, or set quant.align=model")


def fp16_is_unquantized(v: Values) -> Problems:
    key, scheme, fix = "model.dtype", v["quant.scheme"], "set it to bf16, or set "
    if v[key] != "fp16":
        return
    if scheme != "bf16":
        reason = f"the quantizer and the layers of {scheme} take BF16 weights and activations"
        yield bad(v, key, reason, fix + "quant.scheme=bf16 (no quantization)")
    elif v["backend"] == "verl":
        yield bad(v, key, "backend=verl trains in BF16", fix + "backend=local")
    elif v["optim.master_dtype"] != "fp32":
        reason = "stochastic rounding of masters is from FP32 to BF16"
        yield bad(v, key, reason, fix + "optim.master_dtype=fp32")


def likeliest_tokens_come_from_the_pass(v: Values) -> Problems:
    key, top_p, top_k = "actor.old_log_probs", v["rollout.top_p"], v["rollout.top_k"]
    if v[key] != "recompute" and (top_p < 1 or top_k > 0):
        cause = "rollout.top_p below 1" if top_p < 1 else "rollout.top_k"
        reason = f"with {cause}, the pass that recomputes old log-probs is needed to find the tokens that both sides "
        yield bad(v, key, reason + "keep", "set it to recompute")


def temperature_is_taken_as_it_is(v: Values) -> Problems:
    key = "rollout.temperature"
    if 0 < v[key] < MIN_TEMPERATURE:
        reason = f"vLLM samples at {MIN_TEMPERATURE} instead, but the trainer's log-probs would be for {v[key]}"
        yield bad(v, key, reason, f"set it to {MIN_TEMPERATURE} or more")


def val_temperature_is_taken_as_it_is(v: Values) -> Problems:
    key = "rollout.val_temperature"
    if 0 < v[key] < MIN_TEMPERATURE:
        reason = f"vLLM samples at {MIN_TEMPERATURE} instead"
        yield bad(v, key, reason, f"set it to 0 (greedy) or {MIN_TEMPERATURE} or more")


_CHECKS: tuple[Callable[[Values], Problems], ...] = (
    whole_mini_batches,
    whole_micro_batches,
    *(partial(one_kind_of_micro_batch, kind) for kind in ("ppo", "log_prob")),
    *(partial(tokens_hold_a_row, kind) for kind in ("ppo", "log_prob")),
    tokens_are_counted_without_padding,
    int4_group,
    kernels_have_something_to_do,
    lm_head_stays,
    something_to_evaluate,
    room_for_every_sequence,
    local_is_one_process,
    verl_keys_need_verl,
    a_path_to_resume_from,
    local_evaluates_greedily,
    both_sides_sample_from_the_same_tokens,
    fp16_is_unquantized,
    likeliest_tokens_come_from_the_pass,
    temperature_is_taken_as_it_is,
    val_temperature_is_taken_as_it_is,
)


def divisors(number: int) -> str:
    """Return the divisors of `number` as text. If there are more than 12, show only the first and the last five."""
    small = [divisor for divisor in range(1, min(number, _TRIED) + 1) if number % divisor == 0]
    found = [str(divisor) for divisor in sorted({*small, *(number // divisor for divisor in small)})]
    return ", ".join(found if len(found) <= 12 else [*found[:5], "...", *found[-5:]])
