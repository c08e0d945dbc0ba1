"""The registry of checks that a run makes before it starts, and what a check says.

Each check has a name, needs some inputs of the run (`qarl.checks.check`), and yields findings or raises `UserError`.
Both backends and TRL stop at the first error (`check_run`, `make_checks`). A dry run and the doctor make every check
and print all findings (`examine`). The doctor adds checks of its own (`qarl.doctor`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qarl.align.applied_level import AppliedLevel
from qarl.align.rotary import head_size_of
from qarl.checks import environment, layers, machine, suspect_prompts
from qarl.checks.check import (
    Check,
    Finding,
    Findings,
    NotCheckedError,
    RunInputs,
    examine,
    note,
    ok,
    warning,
)
from qarl.checks.generation import check_sampling, check_stops, check_template, eos_warnings
from qarl.checks.machine import Machine, check_capability
from qarl.checks.memory import check_kv_cache
from qarl.checks.model import (
    check_head,
    check_length,
    level_notes,
    refuse_hidden_code,
)
from qarl.checks.model_folder import check_tied
from qarl.checks.published_base import check_quantized
from qarl.checks.special_tokens import special_tokens_unseen
from qarl.checks.stored_weights import stored_weights
from qarl.config import Config
from qarl.console import note as print_note
from qarl.console import say
from qarl.data.dated_template import fixed_date, written_dates
from qarl.data.ground_truths import SECONDS, judge, refusal
from qarl.data.prompts import PromptDataset, PromptSampler, check_disjoint, check_vocabulary
from qarl.data.reward_workers import Reward
from qarl.data.rewards import BUILTIN
from qarl.data.scoring import compares_answers, refuse_batches, score_responses
from qarl.errors import UserError, alternatives
from qarl.families import ALIGNED, check_adapters, check_family, check_rows, shown_mismatch
from qarl.kernels.cpu import layer_ops
from qarl.kernels.registry import check_experts_registered, check_registered, kernels_of
from qarl.lora.layers import target_linears
from qarl.lora.start import check_start, other_base
from qarl.metrics.tracker import check_loggers
from qarl.process import vllm_unusable
from qarl.rollout import vllm_plugin
from qarl.rollout.engine_config import check_not_batch_invariant, eager
from qarl.schemes import Scheme, engine_scheme_names, get_scheme
from qarl.schemes.kernel_choice import KernelChoice


def make_checks(config: Config, *, data: bool = True) -> RunInputs:
    """Make all checks of `config.backend`, and return the loaded inputs. Raise the UserError of the first check that
    fails. `data`: whether to check prompts and rewards too."""
    run = RunInputs(config)
    for finding in examine(run, [check for check in CHECKS if data or check.topic != "data"]):
        if finding.status == "error":
            raise finding.error
        if finding.status != "ok":
            run.reported.append(finding)
    return run


def check_run(config: Config) -> RunInputs:
    """Make all checks before a run starts, and print its notes and warnings to stderr."""
    run = make_checks(config)
    notes = level_notes(config, run.hf_config)
    for text in notes:
        print_note(text)
    for finding in run.reported:
        if finding.what not in notes:
            say(f"{finding.status}: {finding.what}")
    return run


def model_errors(config: Config) -> list[UserError]:
    """Return the errors of the checks that read only the config and the model's files, but for its weights."""
    checks = [check for check in CHECKS if check.topic in ("model", "ignore list", "layer sizes")]
    return [
        finding.error for finding in examine(RunInputs(config), checks) if finding.status == "error"
    ]


_LAYER = (64, 64)
"""A shape [N, K] that every kernel supports."""


def check_scheme(config: Config, machine: Machine) -> None:
    """Raise UserError if the engine would not multiply by `quant.scheme` on such a machine."""
    scheme = get_scheme(config.quant.scheme)
    refusal = scheme.engine_refusal(config.quant.kernels)
    if refusal is not None:
        raise refusal
    if not machine.on_cpu and machine.capability is not None:
        check_capability(scheme, config.quant.kernels, machine.capability)


def check_operands(config: Config) -> None:
    """Raise UserError if no kernel multiplies the operands of `quant.scheme`, as of one from a plugin."""
    scheme = get_scheme(config.quant.scheme)
    if scheme.quantized:
        check_registered(scheme, config.quant.kernels)


def check_kernels(config: Config, machine: Machine) -> None:
    """Raise UserError if `quant.kernels` asks for kernels that do not run on `machine`."""
    scheme = get_scheme(config.quant.scheme, config.quant.group_size)
    kernels = config.quant.kernels
    device = machine.device
    if kernels.by_engine:
        return
    only_cpus = "these kernels run only on a CPU"
    if device == "cuda" and kernels.dequantizes:
        raise _no_kernel(config, "GPUs", only_cpus)
    if device == "cuda" and scheme.no_gpu_kernel:
        raise _no_kernel(config, "GPUs", f"{only_cpus}; {scheme.no_gpu_kernel}")
    if not machine.here:
        raise NotCheckedError(
            "QaRL's own kernels depend on the machine of the run", "run the doctor there too"
        )
    kind = torch.device(device)
    why_not = {
        kernel.name: kernel.refusal(scheme, kind, _LAYER)
        for kernel in kernels_of(kernels, scheme.operands)
    }
    if None not in why_not.values():
        raise _no_kernel(
            config, "this machine", "; ".join(f"{name} {why}" for name, why in why_not.items())
        )


def _no_kernel(config: Config, machines: str, why: str) -> UserError:
    scheme = get_scheme(config.quant.scheme)
    what = f"quant.kernels={config.quant.kernels} does not support quant.scheme={scheme.name} on {machines}"
    fix = "set quant.kernels=engine"
    if scheme.engine_refusal(KernelChoice.ENGINE):
        fix = f"set quant.scheme={alternatives(engine_scheme_names(quantized=True))}"
    return UserError(what, where="quant.kernels", why=why, fix=fix)


def check_experts(config: Config, machine: Machine, hf_config: Any) -> None:
    """Raise UserError if vLLM lacks QaRL's plugin, or if vLLM or QaRL's kernels cannot run the model's experts."""
    if machine.on_cpu:
        vllm_plugin.check_installed(hf_config)
    if not vllm_plugin.experts_of(hf_config):
        return
    scheme = get_scheme(config.quant.scheme)
    if scheme.quantized:
        check_experts_registered(scheme, config.quant.kernels)
    if machine.on_cpu:
        if config.backend == "local":  # `verl_keys` makes verl's engines eager on a CPU
            vllm_plugin.check_eager(hf_config, eager(config.rollout.enforce_eager))
        return
    where = f"quant.scheme={scheme.name} with {config.model.path}"
    refusal = scheme.gpu_experts_refusal(where, config.quant.kernels)
    if config.lora.r and refusal is None:
        where = f"lora.r={config.lora.r} with {config.model.path}"
        refusal = scheme.gpu_adapted_experts_refusal(where)
    if refusal is not None:
        raise refusal


def _config(
    config: Config, machine: Machine, hf_config: Any, no_model: UserError | None
) -> Findings:
    if no_model is not None:
        yield Finding.of(no_model, "error" if machine.here else "note")
        what = f"QaRL's own copy of the config of {config.model.path} is used instead"
        yield warning(what, fix="run the doctor where the model is, or give its folder")


def _model(hf_config: Any, model: nn.Module) -> Findings:
    count = sum(parameter.numel() for parameter in model.parameters())
    tied = "tied to the input embedding" if hf_config.tie_word_embeddings else "a separate tensor"
    yield ok(
        f"{hf_config.model_type} with {count / 1e9:.3g} billion parameters; lm_head is {tied} and stays in BF16"
    )


def _family(config: Config, hf_config: Any) -> Findings:
    check_family(hf_config)
    check_rows(hf_config, packed=config.model.use_remove_padding)
    if shown := shown_mismatch(hf_config):
        yield warning(
            shown,
            why=f"only {', '.join(ALIGNED)} models are aligned, and tested against a fresh vLLM after an export",
            fix="watch mismatch/k3 in the first steps, and compare an export with the run before you rely on it",
        )


def _vocabulary(config: Config, hf_config: Any, tokenizer: Any) -> Findings:
    """verl masks the ids that the tokenizer lacks in the rollout alone. The local engine and TRL's mask nothing."""
    padding = hf_config.vocab_size // 100
    largest = padding if config.backend == "verl" else hf_config.vocab_size
    unused = check_vocabulary(tokenizer, hf_config.vocab_size, max_unused=largest)
    if unused > padding:
        yield warning(
            f"the model has {unused} token ids that the tokenizer lacks",
            where="model.path: vocab_size in config.json",
            why="they are sampled like all others, and stand for no text",
            fix="use the tokenizer that belongs to the model, unless it gives these ids almost no probability",
        )


def _head_size(hf_config: Any) -> None:
    """vLLM says so only as its engine builds the first layer, after the trainer has loaded its weights."""
    if why := vllm_unusable():
        raise NotCheckedError(why, "make setup")
    size = head_size_of(hf_config)
    sizes = layer_ops.head_sizes()
    if size not in sizes:
        raise UserError(
            f"vLLM has no attention for heads of {size} on a CPU",
            where="model.path: head_dim in config.json, or else hidden_size / num_attention_heads",
            why=f"its backend for CPUs has the head sizes {', '.join(map(str, sizes))}",
            fix="train a model with one of these head sizes, or use a GPU",
        )


def _eos(config: Config, tokenizer: Any, hf_config: Any) -> Findings:
    for text in eos_warnings(config.model.path, tokenizer, hf_config):
        yield warning(
            text,
            where="eos_token of tokenizer_config.json; eos_token_id of generation_config.json and config.json",
            why="vLLM stops at the tokenizer's EOS and at the EOS ids of the model's config",
            fix="take these files from the same model",
        )


def _stops(config: Config, tokenizer: Any) -> None:
    check_stops(config.rollout, tokenizer)


def _ignore(config: Config, scheme: Scheme, linears: layers.Shapes) -> None:
    if scheme.quantized:
        layers.check_fused_layers(linears, config.quant.ignore)
        layers.check_routers(linears, config.quant.ignore)


def _engine_shapes(config: Config, scheme: Scheme, quantized: layers.Shapes) -> None:
    if config.quant.kernels.by_engine:
        layers.check_engine_shapes(scheme, quantized)


def _tensor_parallel(config: Config, hf_config: Any, quantized: layers.Shapes) -> Findings:
    yield from map(Finding.of, layers.split_errors(config, hf_config, quantized))


def _sampling(config: Config, machine: Machine, hf_config: Any, level: AppliedLevel) -> None:
    check_sampling(
        config, level=level.level, vocabulary=hf_config.vocab_size, on_cpu=machine.on_cpu
    )


def _train_prompts(
    config: Config, train_prompts: PromptDataset, sampler: PromptSampler
) -> Findings:
    steps = config.trainer.total_training_steps
    yield ok(
        f"{len(train_prompts)} training prompts; {steps} steps are {steps / sampler.batches_per_epoch:.3g} epochs"
    )
    if train_prompts.num_filtered:
        yield note(
            f"{train_prompts.num_filtered} training prompts over data.max_prompt_length are left out"
        )


def _date(config: Config, tokenizer: Any, train_prompts: PromptDataset) -> Findings:
    messages = (prompt.messages for prompt in train_prompts)
    if dates := written_dates(tokenizer, messages, config.data.apply_chat_template_kwargs):
        today = ", ".join(dates.values())
        yield warning(
            f"the chat template writes today's date into the prompts ({today}): tomorrow the prompts are others, and a "
            "resume is refused",
            where="model.path: chat template",
            why="the rest of the run would be trained on other prompts than its beginning",
            fix=fixed_date(dates),
        )


def _val_prompts(val_prompts: PromptDataset | list[Any], train_prompts: PromptDataset) -> Findings:
    if shared := check_disjoint(train_prompts, val_prompts):
        yield warning(
            f"{shared} of the evaluation prompts are also in the training data",
            where="data.val_files",
            why="accuracy on them says nothing about new prompts",
            fix="remove them from data.val_files or from data.train_files",
        )


def _reward(config: Config, reward_fn: Reward, train_prompts: PromptDataset) -> None:
    """Call the function once, on the first prompt with an empty response, to find bugs before the training starts."""
    with _rows_of("data.train_files"):
        score_responses(reward_fn, train_prompts[:1], [""], timeout_s=config.reward.timeout_s)


@contextmanager
def _rows_of(key: str) -> Iterator[None]:
    """Let an error of the reward function in the `with` block say that its row is one of the files of `key`."""
    try:
        yield
    except UserError as error:
        where = f"{error.where} of {key}" if error.where else key
        raise UserError(error.what, where=where, why=error.why, fix=error.fix) from error


def _ground_truths(
    config: Config,
    reward_fn: Reward,
    train_prompts: PromptDataset,
    val_prompts: PromptDataset | list[Any],
) -> Findings:
    """Score ground truths as answers. Only a built-in function is sure to compare answers with them."""
    limit = config.reward.timeout_s
    compared = compares_answers(config.reward, reward_fn)
    if not config.reward.check_ground_truths or compared is None:
        return
    function, reward = compared
    end = time.monotonic() + SECONDS
    for key, prompts in (("data.train_files", train_prompts), ("data.val_files", val_prompts)):
        with _rows_of(key):
            judged = judge(reward, prompts, timeout_s=limit, seconds=end - time.monotonic())
        if refused := refusal(judged, function, key):
            is_error = function in BUILTIN and key == "data.train_files"
            yield Finding.of(refused, "error" if is_error else "warning")


def _adapters(config: Config, model: nn.Module) -> Findings:
    """Say what is trained if adapters are asked for. Raise UserError if a target is unknown, or vLLM serves none."""
    if not config.lora.r:
        return
    check_adapters(model.config)
    targets = target_linears(model, config.lora.target_modules)
    if path := config.lora.path:
        check_start(path, targets)
        if told := other_base(path, config.model.path):
            yield warning(
                told,
                where="lora.path",
                why="A and B fit this base by their shapes, and by nothing else",
                fix="make sure that this base, or its quantized form, is the one that the adapter belongs to",
            )
    trained = config.lora.r * sum(map(sum, targets.values()))
    total = sum(parameter.numel() for parameter in model.parameters())
    yield ok(
        f"{len(targets)} linears have adapters: {trained:,} weights are trained, {trained / total:.2%} of the model",
        lines=(layers.name_layers(targets),),
    )


CHECKS = (
    Check(
        "packages",
        "all loggers are installed",
        lambda config: check_loggers(config.trainer.logger),
        here=True,
    ),
    Check(
        "packages",
        "vLLM can run",
        lambda config: machine.check_engine_installed(config.backend),
        here=True,
    ),
    Check("packages", "verl finds QaRL", machine.check_plugin_installed, here=True, backend="verl"),
    Check(
        "packages", "no TRL is in verl's way", machine.check_no_new_trl, here=True, backend="verl"
    ),
    Check("kernels", "a kernel multiplies the operands of quant.scheme", check_operands),
    Check("machine", "vLLM has quant.scheme here", check_scheme),
    Check("machine", "this CPU can run quant.scheme", machine.check_cpu, device="cpu"),
    Check(
        "machine",
        "vLLM replaces no operator",
        check_not_batch_invariant,
        here=True,
        backend="local",
    ),
    Check("kernels", "quant.kernels has kernels for quant.scheme", check_kernels),
    Check("model", "the model's config can be read", _config),
    Check("model", "the tokenizer can be read", lambda tokenizer: None),
    Check("model", "the weights are in BF16, or a base for adapters", check_quantized),
    Check("model", "trainer and engine build the same model", _model),
    Check("model", "the model's family was measured", _family),
    Check("model", "lm_head has model.head_dtype", check_head),
    Check("kernels", "vLLM and quant.kernels can run experts", check_experts),
    Check("model", "the engine serves adapters of lora.target_modules", _adapters),
    Check("model", "model and tokenizer have the same token ids", _vocabulary),
    Check("backend", "verl runs no code of the model's folder", refuse_hidden_code, backend="verl"),
    Check("model", "model and tokenizer agree where a response ends", _eos),
    Check("model", "rollout.stop and rollout.stop_token_ids can end a response", _stops),
    Check("model", "the chat template has all variables that it is given", check_template),
    Check("model", "responses fit the positions", check_length),
    Check("memory", "a sequence fits vLLM's KV cache", check_kv_cache, device="cpu"),
    Check("ignore list", "quant.ignore treats fused layers as a whole", _ignore),
    Check("layer sizes", "quant.group_size divides all layers", layers.check_group_size),
    Check("layer sizes", "the engine's kernels have all sizes", _engine_shapes, device="cpu"),
    Check(
        "layer sizes",
        "the engine's attention has the head size",
        _head_size,
        here=True,
        device="cpu",
    ),
    Check("layer sizes", "engines can be split", _tensor_parallel, backend="verl"),
    Check("kernels", "the trainer's log-probs apply the engine's sampling", _sampling),
    Check("data", "there is a reward function", lambda reward_fn: None),
    Check("data", "there are training prompts", _train_prompts),
    *suspect_prompts.CHECKS,
    Check("data", "the prompts are the same every day", _date),
    Check("data", "evaluation prompts are new", _val_prompts),
    Check("data", "the reward function scores a row", _reward),
    Check("data", "verl scores each response by itself", refuse_batches, backend="verl"),
    *environment.CHECKS,
    Check("data", "ground truths are right answers", _ground_truths),
    Check("data", "the reward sees the special tokens that it names", special_tokens_unseen),
    Check("weights", "the weights are complete", stored_weights),
    Check("weights", "tied embeddings are equal", check_tied),
)
"""All checks of a run, in the order in which they are made: the cheapest first."""
