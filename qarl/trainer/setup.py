"""Everything a run needs, loaded and checked before training starts, cheapest checks first.

A wrong path, a prompt that is too long or a reward function that raises is one clear error here, not a stack trace
after the engine has started.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.checks import hub
from qarl.checks.layers import (
    check_cpu,
    check_engine_installed,
    check_kv_cache,
    check_linears,
    check_not_quantized,
    check_weight_files,
)
from qarl.checks.model import check_model
from qarl.checks.stops import check_stops
from qarl.checks.weight_files import cannot_build
from qarl.config import ActorConfig, Config
from qarl.data import PromptDataset, PromptSampler, check_disjoint, check_vocabulary, load_prompts
from qarl.data.rewards import RewardFn, check_reward_fn, get_reward_fn
from qarl.errors import UserError
from qarl.metrics.tracker import METRICS_FILE, check_loggers
from qarl.quant.scheme import get_scheme
from qarl.rollout.engine import EngineConfig
from qarl.tbpo import TBPOConfig
from qarl.trainer.guard import check_sampling
from qarl.trainer.policy import Policy

MOST_LAYERS = 10_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass
class RunParts:
    policy: Policy
    tokenizer: Any
    pad_token_id: int
    train_prompts: PromptDataset
    val_prompts: PromptDataset | list[Any]
    sampler: PromptSampler
    reward_fn: RewardFn


def prepare_run(config: Config) -> RunParts:
    """Load and check tokenizer, data, reward function and model.

    Raises:
        UserError: the first thing that is wrong, and what to do about it.
    """
    check_loggers(config.trainer.logger)
    check_engine_installed()
    check_cpu(config)
    tokenizer, hf_config = load_tokenizer(config.model.path, config.model.trust_remote_code)
    check_not_quantized(config, hf_config)
    check_model(hf_config)
    check_vocabulary(tokenizer, hf_config.vocab_size, max_unused=hf_config.vocab_size // 100)
    report_stops(config, tokenizer, hf_config)
    check_length(config, hf_config)
    check_kv_cache(config, hf_config)
    check_linears(config, hf_config)
    reward_fn = get_reward_fn(config.reward.function)
    train_prompts = load_train_prompts(config, tokenizer)
    val_prompts = load_val_prompts(config, tokenizer)
    report_data(train_prompts, val_prompts)
    check_reward_fn(reward_fn, train_prompts, timeout_s=config.reward.timeout_s)
    sampler = prompt_sampler(config, train_prompts)
    check_weight_files(config.model.path)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    policy = load_policy(config)
    check_sampling(config, level=policy.align, vocabulary=policy.model.get_output_embeddings().weight.shape[0])
    return RunParts(policy, tokenizer, pad_token_id or 0, train_prompts, val_prompts, sampler, reward_fn)


def report_stops(config: Config, tokenizer: Any, hf_config: Any) -> None:
    """Say on stderr where tokenizer and model disagree about the end of a response. UserError as `check_stops`."""
    for warning in check_stops(config.model.path, tokenizer, hf_config):
        print(f"warning: {warning}", file=sys.stderr)


def load_train_prompts(config: Config, tokenizer: Any) -> PromptDataset:
    return load_prompts(config.data.train_files, **prompt_options(config, tokenizer))


def load_val_prompts(config: Config, tokenizer: Any) -> PromptDataset | list[Any]:
    """The held-out prompts; none where nothing is ever evaluated."""
    if not (config.trainer.val_before_train or config.trainer.test_freq > 0):
        return []
    limit = config.trainer.val_max_prompts
    return load_prompts(config.data.val_files, limit=limit, **prompt_options(config, tokenizer))


def prompt_options(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Arguments of `load_prompts` that training and evaluation share."""
    return {
        "tokenizer": tokenizer,
        "prompt_key": config.data.prompt_key,
        "max_prompt_length": config.data.max_prompt_length,
        "filter_overlong_prompts": config.data.filter_overlong_prompts,
    }


def prompt_sampler(config: Config, prompts: PromptDataset) -> PromptSampler:
    return PromptSampler(len(prompts), config.data.train_batch_size, seed=config.seed, shuffle=config.data.shuffle)


def report_data(train_prompts: PromptDataset, val_prompts: PromptDataset | list[Any]) -> None:
    """Say on stderr what was filtered out, and whether held-out prompts are trained on."""
    if train_prompts.num_filtered:
        left_out = f"{train_prompts.num_filtered} training prompts over data.max_prompt_length are left out"
        print(f"note: {left_out}", file=sys.stderr)
    shared = check_disjoint(train_prompts, val_prompts)
    if shared:
        print(f"warning: {shared} of the held-out prompts are in the training data too", file=sys.stderr)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The tokenizer and the Hugging Face config of a model folder (or a hub name).

    Code that the folder brings along runs with `trust_remote_code` only; transformers would ask on standard input.
    """
    from transformers import AutoTokenizer

    check_model_folder(path)
    check_tokenizer_files(path)
    try:
        hf_config = load_hf_config(path, trust_remote_code)
        options = hub.loading_options(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options), hf_config
    except UserError:
        raise
    except Exception as error:  # what transformers raises depends on the file and on what is wrong with it
        raise _unreadable(path, error) from error


def load_hf_config(path: str, trust_remote_code: bool = False) -> Any:
    """The Hugging Face config alone: it needs neither tokenizer nor weights."""
    from transformers import AutoConfig

    check_model_folder(path)
    try:
        _check_layers(path)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **hub.loading_options(path))
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error


def hf_config_or_carried(path: str, trust_remote_code: bool = False) -> tuple[Any, UserError | None]:
    """The model's config and None; without a network the copy that comes with QaRL, and the error that it stands for.

    Good for sizes and checks, not for training.
    """
    from transformers import AutoConfig

    try:
        return load_hf_config(path, trust_remote_code), None
    except UserError as error:
        carried = None if Path(path).is_dir() or not hub.why_unreachable() else hub.carried_config(path)
        if carried is None:
            raise
        return AutoConfig.for_model(**carried[1]), error


def _check_layers(path: str) -> None:
    """UserError for a number of layers that no model has: transformers makes a list of them while it reads the file."""
    file = Path(path) / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    layers = content.get("num_hidden_layers") if isinstance(content, dict) else None
    if isinstance(layers, int | float) and layers > MOST_LAYERS:
        raise UserError(
            f"config.json says {layers:.3g} layers",
            where=f"model.path: {file}",
            why=f"no model has more than {MOST_LAYERS}",
            fix="give a config.json as it was published",
        )


def check_model_folder(path: str) -> None:
    looks_local = path.startswith((".", "/", "models/")) or (Path(path).parent.is_dir() and path.count("/") != 1)
    if not Path(path).is_dir() and looks_local:
        raise UserError(
            f"there is no model folder {path!r}",
            where="model.path",
            fix="give a Hugging Face folder; `make quickstart` makes the quickstart's model in models/tiny-qwen3",
        )


def check_tokenizer_files(path: str) -> None:
    for name in (*TOKENIZER_FILES, "tokenizer_config.json", "generation_config.json"):
        if (Path(path) / name).is_dir():  # transformers takes it for missing
            raise UserError(f"{name} is a folder", where=path, fix="put the file there")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        # transformers makes an empty tokenizer of the model's family then.
        raise UserError(
            f"the model folder {path!r} has no tokenizer",
            where="model.path",
            why=f"it has none of {', '.join(TOKENIZER_FILES)}",
            fix="copy the tokenizer of the model it came from into it: tokenizer.json and tokenizer_config.json",
        )


def _unreadable(path: str, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        return needs_code(path)
    if not Path(path).is_dir() and (unreachable := hub.why_unreachable()):
        return UserError(
            f"the model {path!r} is neither on this machine nor to be had from the Hub",
            where="model.path",
            why=f"{unreachable}; there is no such folder, and the Hub's cache has no copy",
            fix="give a folder with config.json and tokenizer.json, or download the model where there is a network",
        )
    return UserError(
        f"config or tokenizer cannot be loaded from {path!r}",
        where="model.path",
        why=" ".join(str(error).split())[:400],
        fix="give a folder with config.json and tokenizer.json, or a hub name that this machine can reach",
    )


def needs_code(path: str) -> UserError:
    return UserError(
        f"the model in {path!r} contains Python code, which is not run",
        where="model.trust_remote_code=false",
        why="its config.json or tokenizer_config.json names Python files (auto_map), and transformers has no class for "
        "it; such code runs with all your rights",
        fix="give a model that transformers knows; or read the code, and set model.trust_remote_code=true",
    )


def load_policy(config: Config) -> Policy:
    try:
        return Policy.load(config)
    except RuntimeError as error:
        raise cannot_build(config.model.path, " ".join(str(error).split())[:400]) from error


def check_length(config: Config, hf_config: Any) -> None:
    """Prompt and response together must fit the model's positions."""
    wanted = config.data.max_prompt_length + config.data.max_response_length
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        raise UserError(
            f"max_prompt_length + max_response_length = {wanted} tokens, the model has {limit} positions",
            where="data.max_prompt_length, data.max_response_length",
            fix=f"lower them to at most {limit} together",
        )


def fresh_run_dir(run_dir: Path) -> None:
    """Move an earlier run out of the way, to `NAME.1`, `NAME.2`, ...: two runs never share a metrics file.

    A folder without metrics (of a dry run, or a run that was refused) is used as it is.
    """
    if not holds_a_run(run_dir):
        return
    numbered = (run_dir.with_name(f"{run_dir.name}.{number}") for number in itertools.count(1))
    target = next(path for path in numbered if not os.path.lexists(path))
    try:
        run_dir.rename(target)
    except OSError as error:
        raise UserError(
            f"the earlier run in {run_dir} cannot be moved to {target}",
            where="output_dir, name",
            why=error.strerror,
            fix="choose another name=... or output_dir=...",
        ) from error
    print(f"note: {run_dir} held an earlier run, which is now in {target}", file=sys.stderr)


def holds_a_run(run_dir: Path) -> bool:
    return (run_dir / METRICS_FILE).exists() or (run_dir / "checkpoints").exists()


def engine_config(config: Config) -> EngineConfig:
    rollout = config.rollout
    return EngineConfig(
        model=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        scheme=get_scheme(config.quant.scheme, group_size=config.quant.group_size),
        ignore=tuple(config.quant.ignore),
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gib=rollout.cpu_kvcache_space_gib,
        enforce_eager=rollout.enforce_eager,
    )


def tbpo_config(actor: ActorConfig) -> TBPOConfig:
    return TBPOConfig(
        seq_clip_ratio_high=actor.seq_clip_ratio_high,
        seq_clip_ratio_low=actor.seq_clip_ratio_low,
        neg_seq_clip_ratio_low=actor.neg_seq_clip_ratio_low,
        neg_seq_clip_ratio_high=actor.neg_seq_clip_ratio_high,
        seq_tis_imp_ratio_cap=actor.seq_tis_imp_ratio_cap,
        mismatch_outside_cap=actor.mismatch_outside_cap,
        positive_band=actor.positive_band,
        loss_agg_mode=actor.loss_agg_mode,
    )
