"""Find keys that are each valid but do not fit together.

The checks read a flat dict of dotted keys, not a `Config`. So they can also check the valid keys of an invalid config,
and one error reports all problems. A check ends at the first key that is missing because its value is invalid. If a
different key is invalid, the values are raw: a key that should be a list may be a single value. Keys that have no
effect are in `qarl.config.unused_keys`, and values that are probably mistakes in `qarl.config.hints`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from qarl.config import response_checks, staleness_checks
from qarl.config.adapter_start import start_of
from qarl.config.errors import Problem, bad, items
from qarl.config.ignored_layers import is_ignored
from qarl.config.level import Level
from qarl.config.lora import ALL_LINEAR
from qarl.config.objectives import get_objective
from qarl.config.optimizers import get_optimizer
from qarl.config.unused_keys import STEPS, WARMUP, warmup_exceeds
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice

Values = Mapping[str, Any]
Problems = Iterator[Problem]
VERLS_KL_KEYS = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
"""Keys of the section `verl` that need a reference policy."""
LEAST_TOP_P = 0.01
LEAST_TEMPERATURE = 0.05
"""Below them sampling is greedy but for rare ties. A model can be less sure than that of single tokens."""
_BYPASS, _IS, _RS = (
    f"rollout_correction.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs")
)


def has_reference_in_verl(verl: Any) -> bool:
    """Return whether the section `verl` asks for a reference policy."""
    if not isinstance(verl, Mapping):
        return False
    return any(verl.get(plus + key) for key in VERLS_KL_KEYS for plus in ("", "+"))


def check(values: Values) -> list[Problem]:
    """Return every problem between keys of `values`."""
    problems: list[Problem] = []
    for function in _CHECKS:
        with suppress(KeyError):
            problems.extend(function(values))
    return problems


def averages_over_responses(v: Values) -> Problems:
    key = "actor.loss_agg_mode"
    loss = v["actor.loss"]
    if get_objective(loss).mean_over_responses and v[key] != "seq-mean-token-mean":
        reason = f"actor.loss={loss} is defined with the mean seq-mean-token-mean"
        yield bad(v, key, reason, "set it to seq-mean-token-mean, or choose another actor.loss")


def advantages_suit_the_loss(v: Values) -> Problems:
    key = "algorithm.adv_estimator"
    loss = v["actor.loss"]
    if v[key] == "dr_grpo" and get_objective(loss).mean_over_responses:
        reason = (
            f"dr_grpo does not average over the tokens of a response, but actor.loss={loss} does"
        )
        fix = "set actor.loss=grpo; or, to change only the advantages, set algorithm.norm_adv_by_std_in_grpo=false"
        yield bad(v, key, reason, fix)
    elif v[key] == "dr_grpo" and v["actor.loss_agg_mode"] not in (
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ):
        reason = "with algorithm.adv_estimator=dr_grpo, token losses are summed and divided by a constant"
        yield bad(
            v, "actor.loss_agg_mode", reason, "remove it, or set it to seq-mean-token-sum-norm"
        )


def one_weight_for_the_mismatch(v: Values) -> Problems:
    loss = v["actor.loss"]
    level = v[_IS]
    objective = get_objective(loss)
    if objective.weights_mismatch and (level is not None or v[_BYPASS]):
        reason = f"actor.loss={loss} already weights each response by the mismatch, and this would be a second weight"
        key, fix = (_BYPASS, "false") if level is None else (_IS, "null")
        yield bad(v, key, reason, f"set it to {fix}, or choose another actor.loss")
    elif v[_BYPASS] and (not objective.has_ratio or level is not None):
        reason = f"the ratio to the rollout contains the mismatch, and rollout_is={level} would apply it a second time"
        yield bad(
            v,
            _BYPASS,
            f"actor.loss={loss} has no ratio" if level is None else reason,
            "set it to false",
        )


def rollouts_log_probs_hide_the_mismatch(v: Values) -> Problems:
    """The old log-probs are the rollout's, so the ratio r_corr is always 1."""
    key = "actor.old_log_probs"
    loss = v["actor.loss"]
    veto = "rollout_correction.veto_threshold"
    if v[key] != "rollout":
        return
    rejects = v[_RS] and v[f"{_RS}_ratio"] == "corr"
    if get_objective(loss).weights_mismatch:
        reason = f"actor.loss={loss} weights each response by the mismatch, and that weight would always be 1"
        yield bad(v, key, reason, "set it to auto or recompute, or choose another actor.loss")
    for other, used in (
        (_BYPASS, v[_BYPASS]),
        (veto, v[veto] is not None),
        (_IS, v[_IS]),
        (_RS, rejects),
    ):
        if used:
            reason = "it has no effect, because the old log-probs are the rollout's"
            yield bad(
                v, other, reason, "remove it, or set actor.old_log_probs to recompute or auto"
            )


def rejections_have_thresholds(v: Values) -> Problems:
    loss = v["actor.loss"]
    key = f"{_RS}_threshold"
    options = items(v[_RS])
    upper = items(v[key])
    lower = v[f"{key}_lower"]
    of_tokens = any(option.startswith("token_") for option in options)
    if of_tokens and get_objective(loss).ratio_of_response:
        reason = f"actor.loss={loss} has one ratio per response, and single tokens cannot be removed from this ratio"
        yield bad(v, _RS, reason, "choose a rejection of whole responses: seq_*")
    if options and len(upper) not in (1, len(options)):
        reason = f"rollout_rs has {len(options)} entries ({', '.join(options)})"
        yield Problem(
            key, upper, reason, "give one threshold for each entry, or one for all entries"
        )
    elif (
        options
        and lower is not None
        and (lower >= min(upper) or not any(option.endswith("k1") for option in options))
    ):
        reason = f"it is only for k1, and must be below the upper threshold, {min(upper)}"
        yield bad(v, f"{key}_lower", reason, "set it to null, or to a smaller value")


def whole_mini_batches(v: Values) -> Problems:
    key = "actor.ppo_mini_batch_size"
    train = v["data.train_batch_size"]
    if train % v[key]:
        reason = f"data.train_batch_size = {train} prompts per step do not split into whole mini-batches of {v[key]} "
        fix = f"choose a divisor of {train}, or make data.train_batch_size a multiple of {v[key]}"
        yield bad(v, key, reason + "prompts", fix)


def whole_micro_batches(v: Values) -> Problems:
    key = "actor.ppo_micro_batch_size_per_gpu"
    mini = v["actor.ppo_mini_batch_size"]
    n = v["rollout.n"]
    micro = v[key]
    if micro is not None and (mini * n) % micro:
        reason = (
            f"a mini-batch is actor.ppo_mini_batch_size * rollout.n = {mini} * {n} = {mini * n} responses, "
            f"which do not split into whole micro-batches of {micro} responses"
        )
        yield bad(v, key, reason, f"choose a divisor of {mini * n}")


def micro_batches_have_a_size(kind: str, v: Values) -> Problems:
    """`kind`: ppo or log_prob. Micro-batches are limited by responses, or by tokens, which must allow a full row."""
    by_rows = f"actor.{kind}_micro_batch_size_per_gpu"
    by_tokens = f"actor.{kind}_max_token_len_per_gpu"
    dynamic = v["actor.use_dynamic_bsz"]
    limit = v[by_tokens]
    longest = v["data.max_prompt_length"] + v["data.max_response_length"]
    if not dynamic and v[by_rows] is None:
        fix = f"set it, or set actor.use_dynamic_bsz=true and {by_tokens}"
        yield bad(v, by_rows, "actor.use_dynamic_bsz=false requires a size of micro-batches", fix)
    elif dynamic and limit is None and kind == "ppo":
        reason = "actor.use_dynamic_bsz=true fills micro-batches up to this number of tokens"
        yield bad(
            v, by_tokens, reason, f"set it to {longest} or more, or set actor.use_dynamic_bsz=false"
        )
    elif dynamic and limit is not None and limit < longest:
        reason = f"a row can have data.max_prompt_length + data.max_response_length = {longest} tokens, and a row is "
        yield bad(
            v,
            by_tokens,
            reason + "never split",
            f"set it to {longest} or more, or lower the lengths",
        )


def kernels_have_something_to_do(v: Values) -> Problems:
    key = "quant.kernels"
    scheme = get_scheme(v["quant.scheme"])
    kernels = KernelChoice(v[key])
    fix = "set it to engine"
    if kernels.by_engine:
        return
    if not scheme.quantized:
        yield bad(v, key, f"quant.scheme={scheme.name} has no quantized layers", fix)
    elif kernels.dequantizes and scheme.rounds_activations:
        reason = f"{scheme.name} rounds the activations to 8 bits, and a BF16 product would not"
        fix = "set it to qarl" if scheme.engine_refusal(KernelChoice.ENGINE) else fix
        yield bad(v, key, reason, f"{fix}, or set quant.scheme=w4a16")


def lm_head_stays(v: Values) -> Problems:
    key = "quant.ignore"
    if get_scheme(v["quant.scheme"]).quantized and not is_ignored("lm_head", items(v[key])):
        reason = "lm_head would be quantized, but with a quantized lm_head vLLM returns wrong results without an error"
        yield bad(v, key, reason, "add lm_head to the list")


def something_to_evaluate(v: Values) -> Problems:
    key = "data.val_files"
    if not v[key] and (v["trainer.test_freq"] > 0 or v["trainer.val_before_train"]):
        reason = "an evaluation is due (trainer.test_freq, trainer.val_before_train), but no file is given"
        yield bad(
            v,
            key,
            reason,
            "name a file, or set trainer.test_freq=-1 and trainer.val_before_train=false",
        )


def local_is_one_process(v: Values) -> Problems:
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", "rollout.tensor_model_parallel_size")
    for key in keys if v["backend"] == "local" else ():
        if v[key] != 1:
            yield bad(
                v,
                key,
                "backend=local is one process on one device",
                "set it to 1, or set backend=verl",
            )
    if v["backend"] == "local" and v["verl"]:
        yield bad(
            v, "verl", "backend=local does not use verl's keys", "remove them, or set backend=verl"
        )


def a_path_to_resume_from(v: Values) -> Problems:
    key = "trainer.resume_mode"
    path = "trainer.resume_from_path"
    if v[key] == "resume_path" and v[path] is None:
        fix = "set trainer.resume_from_path=RUN/checkpoints/step_N, or use trainer.resume_mode=auto"
        yield bad(v, key, "no checkpoint to resume from is given", fix)


def one_token_is_left(temperature: float, top_p: float, top_k: int) -> tuple[str, Any, str] | None:
    """Return name, smallest good value and reason of a setting that leaves the sampler one token, or None."""
    equal = "all responses to a prompt would be the same, and their advantages 0"
    if top_k == 1:
        return "top_k", -1, f"the engine would sample only the likeliest token, so {equal}"
    if top_p < LEAST_TOP_P:
        why = (
            f"the likeliest token alone nearly always has a probability above {top_p:g}, so {equal}"
        )
        return "top_p", 1, why
    if temperature < LEAST_TEMPERATURE:
        factor = math.exp(0.5 / temperature)
        why = f"a token whose logit is 0.5 larger would be {factor:.0e} times as likely, so {equal}"
        return "temperature", 1.0, why
    return None


def sampling_leaves_a_choice(v: Values) -> Problems:
    left = one_token_is_left(v["rollout.temperature"], v["rollout.top_p"], v["rollout.top_k"])
    if left is not None:
        name, good, reason = left
        yield bad(v, f"rollout.{name}", reason, f"set it to {good}")


def both_sides_sample_from_the_same_tokens(v: Values) -> Problems:
    backend = v["backend"]
    align = Level(v["quant.align"])
    top_p = v["rollout.top_p"]
    top_k = v["rollout.top_k"]
    all_tokens = top_p == 1 and top_k <= 0
    if all_tokens or one_token_is_left(1.0, top_p, top_k):
        return
    key, off = ("rollout.top_p", 1) if top_p < 1 else ("rollout.top_k", -1)
    reason = "the engine samples only from the likeliest tokens, but the log-probs of "
    if backend == "verl":
        reason += "verl's trainer are over the whole vocabulary"
        yield bad(v, key, reason, f"set it to {off}, or set backend=local")
    elif not align.follows_engine:
        reason += f"a trainer at quant.align={align} are too inexact to identify these tokens"
        yield bad(v, key, reason, f"set it to {off}, or set quant.align=model")
    elif v["actor.old_log_probs"] == "rollout":
        reason = f"with {key}, the pass that recomputes old log-probs is needed to find the tokens that both sides keep"
        yield bad(v, "actor.old_log_probs", reason, "set it to auto or recompute")


def the_schedule_fits_the_run(v: Values) -> Problems:
    steps = v[STEPS]
    if warmup_exceeds(v):
        reason = (
            f"the run has {steps} steps ({STEPS}), so no step would have the full learning rate"
        )
        yield bad(
            v,
            WARMUP,
            reason,
            f"set it below {steps}, such as {steps // 20}, or train for more steps",
        )


def fp16_is_unquantized(v: Values) -> Problems:
    key = "model.dtype"
    scheme = get_scheme(v["quant.scheme"])
    fix = "set it to bf16, or set "
    if v[key] != "fp16":
        return
    if scheme.quantized:
        reason = f"the quantizer and the layers of {scheme.name} take BF16 weights and activations"
        yield bad(v, key, reason, fix + "quant.scheme=bf16 (no quantization)")
    elif v["backend"] == "verl":
        yield bad(v, key, "backend=verl trains in BF16", fix + "backend=local")
    elif v["optim.master_dtype"] != "fp32":
        reason = "stochastic rounding of masters is from FP32 to BF16"
        yield bad(v, key, reason, fix + "optim.master_dtype=fp32")


def bf16_masters_are_rounded(v: Values) -> Problems:
    key = "optim.master_dtype"
    name = v["optim.name"]
    if v[key] == "bf16" and not get_optimizer(name).rounds_bf16:
        reason = f"optim.name={name} updates only FP32 parameters"
        yield bad(v, key, reason, "set it to fp32, or choose another optim.name")


def the_start_is_as_the_config_says(v: Values) -> Problems:
    """An adapter to begin from has a rank, an alpha and linears of its own."""
    path = v["lora.path"]
    if not path:
        return
    start = start_of(path)
    found = {"r": start.r, "alpha": start.alpha, "target_modules": list(start.targets)}
    for key, value in found.items():
        given = v[f"lora.{key}"]
        of_targets = key == "target_modules"
        if given == value or (of_targets and set(items(given)) == set(start.targets)):
            continue  # the order of targets decides nothing
        reason = f"the adapter in {path} has {key}={value}"
        free = f"[{ALL_LINEAR}]" if of_targets else "null"
        yield bad(v, f"lora.{key}", reason, f"set lora.{key}={free}, or lora.path=null")


def verls_reference_has_no_start(v: Values) -> Problems:
    """verl's reference is the BF16 model of `model.path`, whatever adapter the run begins from."""
    asked = has_reference_in_verl(v["verl"])
    if v["lora.path"] and v["backend"] == "verl" and (asked or v["actor.use_kl_loss"]):
        reason = "the reference of verl's KL term is the base without the adapter, so the term would pull the policy "
        fix = "remove the KL term, or set backend=local, whose reference has the adapter"
        yield bad(v, "lora.path", f"{reason}away from its start", fix)


def adapters_are_served(v: Values) -> Problems:
    """Adapters need an engine without tensor parallelism, and a quantized base that the trainer multiplies by, too."""
    rank = v["lora.r"]
    scheme = get_scheme(v["quant.scheme"])
    alpha = v["lora.alpha"]
    if not rank:
        return
    needs = (
        (
            "rollout.tensor_model_parallel_size",
            1,
            "the bits of A and B are compared with those of a whole engine",
        ),
        ("model.dtype", "bf16", "A and B are rounded to BF16 for the forward and the engine"),
        (
            "optim.master_dtype",
            "fp32",
            "A and B are small, and their FP32 masters take little memory",
        ),
    )
    for key, value, reason in needs:
        if v[key] != value:
            yield bad(
                v,
                key,
                f"lora.r={rank}: {reason}",
                f"set {key}={value}, or lora.r=0 to train all weights",
            )
    if not Level(v["quant.align"]).low_bit and scheme.quantized:
        reason = f"lora.r={rank}: the base exists only in {scheme.name}, and this level multiplies by BF16 weights"
        yield bad(v, "quant.align", reason, "set it to model")
    if alpha is not None and math.frexp(alpha / rank)[0] != 0.5:
        reason = f"alpha / r = {alpha / rank:g} is not a power of two, so vLLM would round B * alpha / r to BF16"
        yield bad(v, "lora.alpha", reason, f"set it to {rank}, or to {rank} times a power of two")
    targets = items(v["lora.target_modules"])
    for name in ("lm_head", "embed_tokens"):
        if name in targets:
            reason = f"vLLM leaves adapters of {name} out of some log-probs (vllm#51594)"
            yield bad(v, "lora.target_modules", reason, f"remove {name}")


_CHECKS: tuple[Callable[[Values], Problems], ...] = (
    averages_over_responses,
    advantages_suit_the_loss,
    one_weight_for_the_mismatch,
    rollouts_log_probs_hide_the_mismatch,
    rejections_have_thresholds,
    whole_mini_batches,
    whole_micro_batches,
    *(partial(micro_batches_have_a_size, kind) for kind in ("ppo", "log_prob")),
    kernels_have_something_to_do,
    lm_head_stays,
    something_to_evaluate,
    local_is_one_process,
    a_path_to_resume_from,
    sampling_leaves_a_choice,
    both_sides_sample_from_the_same_tokens,
    the_schedule_fits_the_run,
    fp16_is_unquantized,
    bf16_masters_are_rounded,
    the_start_is_as_the_config_says,
    verls_reference_has_no_start,
    adapters_are_served,
    *response_checks.CHECKS,
    *staleness_checks.CHECKS,
)
