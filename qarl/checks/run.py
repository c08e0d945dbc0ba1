"""The registry of checks that a run makes before it starts, and what a check says.

Each check has a name, needs some inputs of the run (`qarl.checks.registry`), and yields findings or raises `UserError`.
Both backends and TRL stop at the first error (`check_run`, `make_checks`). A dry run and the doctor make every check
and print all findings (`examine`). The doctor adds checks of its own (`qarl.doctor`).
"""

from __future__ import annotations

import sys

import torch

from qarl.align.families import FAMILIES, check_family, check_rows, shown_mismatch
from qarl.checks import layers, machine
from qarl.checks.kernels import check_dense, check_int8_experts, check_kernels, check_scheme
from qarl.checks.memory import check_kv_cache
from qarl.checks.model import check_head, check_length, check_not_quantized, level_notes, refuse_hidden_code
from qarl.checks.model_folder import check_tied
from qarl.checks.registry import (
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
from qarl.checks.sampling import check_sampling
from qarl.checks.tensor_parallel import split_problems
from qarl.config import Config
from qarl.console import note as print_note
from qarl.data.prompts import check_disjoint, check_vocabulary
from qarl.data.rewards import check_reward_fn
from qarl.data.run_prompts import report_data
from qarl.errors import UserError
from qarl.metrics.tracker import check_loggers
from qarl.rollout import vllm_plugin
from qarl.rollout.gpu import check_not_batch_invariant, eager


def make_checks(config: Config, *, data: bool = True) -> RunInputs:
    """Make all checks of `config.backend`, and return the loaded inputs. Raise the UserError of the first check that
    fails. `data`: whether to check prompts, rewards and loggers too."""
    run = RunInputs(config)
    for check in CHECKS:
        if not check.applies(run) or (check.topic == "data" and not data):
            continue
        try:
            for finding in check.findings(run):
                if finding.status == "error":
                    raise finding.error
        except NotCheckedError:  # the engine will say it
            continue
    return run


def check_run(config: Config) -> RunInputs:
    """Make all checks before a run starts, and print its notes and warnings to stderr."""
    run = make_checks(config)
    for text in level_notes(config, run.hf_config):
        print_note(text)
    for text in run.eos_warnings:
        print(f"warning: {text}", file=sys.stderr)
    report_data(run.train_prompts, run.val_prompts)
    return run


def model_errors(config: Config) -> list[UserError]:
    """Return the errors of the checks that read only the config and the model's folder, so they hold on any machine."""
    about = {"hf_config", "tokenizer", "model", "linears", "quantized"}
    checks = [check for check in CHECKS if check.needs and about.issuperset(check.needs)]
    return [finding.error for finding in examine(RunInputs(config), checks) if finding.status == "error"]


def _cpu(run: RunInputs) -> Findings:
    machine.check_cpu(run.config)
    if torch.cpu._is_amx_tile_supported():
        yield note(
            "this CPU has AMX tiles",
            why="vLLM chooses different kernels with AMX. quant.align=exact stays exact, but at quant.align=model one "
            "attention output in 10,000 differs by a BF16 step, even for the first tokens",
            fix="set quant.align=exact if δ must be 0",
        )


def _kernels(run: RunInputs) -> Findings:
    check_kernels(run.config, run.machine.device, here=run.machine.here)
    if run.config.quant.kernels != "engine" and not run.machine.here:
        raise NotCheckedError("QaRL's own kernels depend on the machine of the run", "run the doctor there too")
    if run.config.quant.kernels == "dequantized":
        yield note(
            "quant.kernels=dequantized is no low-bit rollout: both sides multiply dequantized weights in BF16",
            fix="use it for debugging and on small machines, and report no low-bit figures",
        )


def _config(run: RunInputs) -> Findings:
    if run.no_model is not None:
        yield Finding.of(run.no_model, "error" if run.machine.here else "note")
        yield warning(
            f"QaRL's own copy of the config of {run.config.model.path} is used instead",
            why="sizes, memory and kernels are those of the public model; your own config may differ",
            fix="run the doctor where the model is, or give its folder",
        )


def _model(run: RunInputs) -> Findings:
    count = sum(parameter.numel() for parameter in run.model.parameters())
    in_words = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"
    tied = "tied to the input embedding" if run.hf_config.tie_word_embeddings else "a separate tensor"
    yield ok(f"{run.hf_config.model_type} with {in_words} parameters; lm_head is {tied} and stays in BF16")


def _family(run: RunInputs) -> Findings:
    check_family(run.hf_config)
    if shown := shown_mismatch(run.hf_config):
        yield warning(
            shown,
            why=f"only {', '.join(FAMILIES)} models are aligned, and tested against a fresh vLLM after an export",
            fix="watch mismatch/k3 in the first steps, and compare an export with the run before you rely on it",
        )


def _experts(run: RunInputs) -> None:
    vllm_plugin.check_installed(run.hf_config)
    if run.config.backend == "local":  # `verl_keys` makes verl's engines eager on a CPU
        vllm_plugin.check_eager(run.hf_config, eager(run.config.rollout.enforce_eager))


def _vocabulary(run: RunInputs) -> Findings:
    vocabulary = run.hf_config.vocab_size
    if unused := check_vocabulary(run.tokenizer, vocabulary, max_unused=vocabulary // 100):
        yield note(
            f"{unused} of the model's {vocabulary} token ids are not in the tokenizer",
            why="verl masks these ids in vLLM but not in its trainer. A trained model gives them little probability, "
            "but the log-probs of an untrained model are shifted",
            fix="nothing to do for a trained model; for an untrained one, resize the embeddings to the tokenizer",
        )


def _eos(run: RunInputs) -> Findings:
    for text in run.eos_warnings:
        yield warning(
            text,
            where="eos_token of tokenizer_config.json; eos_token_id of generation_config.json and config.json",
            why="vLLM stops at the tokenizer's EOS and at the EOS ids of the model's config",
            fix="take these files from the same model",
        )


def _ignore(run: RunInputs) -> None:
    if run.scheme.quantized:
        layers.check_fused_layers(run.linears, run.config.quant.ignore)


def _routers(run: RunInputs) -> None:
    if run.scheme.quantized:
        layers.check_routers(run.linears, run.config.quant.ignore)


def _engine_shapes(run: RunInputs) -> None:
    if run.scheme.name == "w4a16" and run.config.quant.kernels == "engine":
        layers.check_engine_shapes(run.quantized)
    if run.scheme.name == "w8a8" and torch.cpu._is_amx_tile_supported():
        layers.check_tile_shapes(run.quantized)


def _tensor_parallel(run: RunInputs) -> Findings:
    on_cpu = run.machine.on_cpu
    problems = split_problems(run.config, run.hf_config, run.linears, run.quantized, on_cpu=on_cpu)
    yield from map(Finding.of, problems)


def _sampling(run: RunInputs) -> None:
    level, confirmed = run.level[0], run.unconfirmed is None
    check_sampling(run.config, level=level, vocabulary=run.hf_config.vocab_size, confirmed=confirmed)


def _train_prompts(run: RunInputs) -> Findings:
    prompts, steps = run.train_prompts, run.config.trainer.total_training_steps
    epochs = steps / run.sampler.batches_per_epoch
    if prompts.num_filtered:
        what = f"{prompts.num_filtered} training prompts are longer than data.max_prompt_length and are left out"
        yield note(what, fix="raise data.max_prompt_length to train on them")
    yield ok(f"{len(prompts)} training prompts; {steps} steps are {epochs:.3g} epochs")


def _val_prompts(run: RunInputs) -> Findings:
    if not run.val_prompts:
        yield note("nothing is evaluated", fix="set data.val_files and trainer.test_freq")
    elif shared := check_disjoint(run.train_prompts, run.val_prompts):
        yield warning(
            f"{shared} of the evaluation prompts are also in the training data",
            where="data.val_files",
            why="accuracy on them says nothing about new prompts",
            fix="remove them from data.val_files or from data.train_files",
        )


_MODEL = ("hf_config",)
CHECKS = (
    Check("packages", "all loggers are installed", lambda run: check_loggers(run.config.trainer.logger), here=True),
    Check("machine", "no NVIDIA driver is too old for PyTorch", lambda run: machine.check_driver(), here=True),
    Check("machine", "Triton can compile, if this machine has a GPU", lambda run: machine.check_compiler(), here=True),
    Check("packages", "vLLM is installed", lambda run: machine.check_engine_installed(), here=True),
    Check("packages", "vLLM runs on a CPU", lambda run: machine.check_engine_device(), here=True, device="cpu"),
    Check("packages", "verl finds QaRL", lambda run: machine.check_plugin_installed(), here=True, backend="verl"),
    Check("packages", "no TRL is in verl's way", lambda run: machine.check_no_new_trl(), here=True, backend="verl"),
    Check("machine", "this CPU can run quant.scheme", _cpu, device="cpu"),
    Check("machine", "vLLM replaces no operator", lambda run: check_not_batch_invariant(), here=True, backend="local"),
    Check(
        "machine",
        "vLLM has quant.scheme here",
        lambda run: check_scheme(run.config, run.machine.device, run.machine.capability),
    ),
    Check("kernels", "quant.kernels has kernels for quant.scheme", _kernels),
    Check("model", "the model's config can be read", _config, (*_MODEL, "machine")),
    Check("model", "the tokenizer can be read", lambda run: None, ("tokenizer", "machine")),
    Check("model", "the weights are not quantized", lambda run: check_not_quantized(run.config, run.hf_config), _MODEL),
    Check("model", "trainer and engine build the same model", _model, ("model",)),
    Check("model", "the model's family was measured", _family, _MODEL),
    Check("model", "lm_head has model.head_dtype", lambda run: check_head(run.config, run.hf_config), _MODEL),
    Check(
        "model",
        "rows can be packed",
        lambda run: check_rows(run.hf_config, packed=run.config.model.use_remove_padding),
        _MODEL,
    ),
    Check("kernels", "vLLM can run experts", _experts, (*_MODEL, "machine"), device="cpu"),
    Check(
        "kernels",
        "vLLM can run experts",
        lambda run: check_int8_experts(run.config, run.hf_config),
        (*_MODEL, "machine"),
        device="cuda",
    ),
    Check(
        "kernels",
        "quant.kernels can run this model",
        lambda run: check_dense(run.config, run.hf_config),
        (*_MODEL, "machine"),
    ),
    Check("model", "model and tokenizer have the same token ids", _vocabulary, (*_MODEL, "tokenizer")),
    Check(
        "backend",
        "verl runs no code of the model's folder",
        lambda run: refuse_hidden_code(run.config, run.tokenizer, run.hf_config),
        (*_MODEL, "tokenizer", "machine"),
        backend="verl",
    ),
    Check("model", "model and tokenizer agree where a response ends", _eos, ("eos_warnings",)),
    Check("model", "responses fit the positions", lambda run: check_length(run.config, run.hf_config), _MODEL),
    Check(
        "memory",
        "a sequence fits vLLM's KV cache",
        lambda run: check_kv_cache(run.config, run.size),
        ("size", "machine"),
        device="cpu",
    ),
    Check("ignore list", "quant.ignore treats fused layers as a whole", _ignore, ("linears",)),
    Check("ignore list", "routers stay in BF16", _routers, ("linears",)),
    Check(
        "layer sizes",
        "quant.group_size divides all layers",
        lambda run: layers.check_group_size(run.quantized, run.scheme),
        ("quantized",),
    ),
    Check("layer sizes", "the engine's kernels have all sizes", _engine_shapes, ("quantized",), device="cpu"),
    Check("layer sizes", "engines can be split", _tensor_parallel, ("quantized", "machine"), backend="verl"),
    Check("kernels", "the trainer's log-probs apply the engine's sampling", _sampling, (*_MODEL, "machine")),
    Check("data", "there is a reward function", lambda run: None, ("reward_fn",)),
    Check("data", "there are training prompts", _train_prompts, ("train_prompts",)),
    Check("data", "evaluation prompts are new", _val_prompts, ("val_prompts",)),
    Check(
        "data",
        "the reward function scores a row",
        lambda run: check_reward_fn(run.reward_fn, run.train_prompts, timeout_s=run.config.reward.timeout_s),
        ("reward_fn", "train_prompts"),
    ),
    Check("model", "all weight files can be opened", lambda run: None, ("weight_files",)),
    Check(
        "model",
        "tied embeddings are equal",
        lambda run: check_tied(run.weight_files, run.model),
        ("weight_files", "model"),
    ),
)
"""All checks of a run, in the order in which they are made: the cheapest first."""
