"""`QaRLConfig` adds QaRL's keys to TRL's `GRPOConfig`. `run_config` converts it to QaRL's own config.

Keys of the section `quant` have the prefix `quant_`. Keys of the engine have the prefix `vllm_`, which TRL uses too.
Other keys have no prefix. QaRL's own config checks the values, so they mean the same as in `python -m
qarl.train`, and bad values give the same errors.

TRL's defaults are kept, except for three. `loss_type` is `tbpo`. `bf16` is False, because the model is already BF16,
and autocast would round differently from the engine. `vllm_enable_sleep_mode` is True, because the engine shares its
GPU with the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from trl import GRPOConfig

from qarl.config import Config, build_config
from qarl.config.errors import ConfigError
from qarl.config.schema import sections
from qarl.config.unused_keys import problems
from qarl.errors import UserError
from qarl.tbpo.config import KEYS
from qarl.trl.fields import check_names, check_values, refused_by_trl

ENGINE_KEYS = (
    "max_num_seqs",
    "gpu_memory_utilization",
    "cpu_kvcache_space_gib",
    "enforce_eager",
    "enable_prefix_caching",
)
QUANT_KEYS = ("scheme", "group_size", "ignore", "kernels", "align", "mismatch_limit")
TURN_KEYS = ("max_turn_length", "max_tool_response_length", "tool_response_truncate_side")
RUN_KEYS = {
    "model.trust_remote_code": "trust_remote_code",
    "data.max_response_length": "max_completion_length",
    "rollout.n": "num_generations",
    "rollout.temperature": "temperature",
    **{f"rollout.{name}": f"vllm_{name}" for name in ENGINE_KEYS},
    "rollout.free_cache_engine": "vllm_enable_sleep_mode",
    **{f"quant.{name}": f"quant_{name}" for name in QUANT_KEYS},
    "optim.lr": "learning_rate",
    "optim.weight_decay": "weight_decay",
    "optim.master_dtype": "master_dtype",
    **{f"actor.{name}": name for name in KEYS},
    **{f"reward.{name}": f"reward_{name}" for name in ("timeout_s", "workers")},
    "multi_turn.timeout_s": "turn_timeout_s",
    "multi_turn.workers": "environment_workers",
    **{f"multi_turn.{name}": name for name in TURN_KEYS},
    "seed": "seed",
}
"""Maps QaRL's keys to the fields of `QaRLConfig` that contain their values."""
_PEFT = {"r": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
_WORDS = {key: name for key, name in RUN_KEYS.items() if "." in key} | {"actor.loss": "loss_type"}
_WORDS |= {f"lora.{key}": f"peft_config.{name}" for key, name in _PEFT.items()}
_WORDS |= {"reward.function": "reward_funcs", "rollout.environment": "environment"}
_OTHER_NAMES = {key.rpartition(".")[2]: name for key, name in _WORDS.items()}
_OTHER_NAMES |= {key.replace(".", "_"): name for key, name in _WORDS.items()} | _WORDS
"""What the fields are called in QaRL's config, with and without their sections -> the fields."""
_KEYS = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _WORDS)) + r")(?!\w|\.\w)")


def _own_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and field of each key in `RUN_KEYS` that TRL does not have. Default and help are the key's."""
    for key, name in RUN_KEYS.items():
        if name in GRPOConfig.__dataclass_fields__:
            continue
        section, _, leaf = key.partition(".")
        info = sections()[section].model_fields[leaf]
        metadata = {"help": " ".join((info.description or "").split()).replace("%", "%%")}
        if isinstance(info.default, list):
            yield name, list[str], field(default_factory=info.default.copy, metadata=metadata)
        else:
            yield name, info.annotation, field(default=info.default, metadata=metadata)


_OwnKeys: Any = make_dataclass("_OwnKeys", _own_fields(), bases=(GRPOConfig,))


@dataclass
class QaRLConfig(_OwnKeys):
    """Settings of a `QaRLTrainer`. `RUN_KEYS` maps QaRL's keys (docs/lookup/config_reference.md) to these fields."""

    loss_type: str = field(
        default="tbpo", metadata={"help": "tbpo, or one of TRL's losses on quantized rollouts."}
    )
    bf16: bool = field(
        default=False, metadata={"help": "Must be False: the model is BF16 without autocast."}
    )
    vllm_enable_sleep_mode: bool = field(
        default=True, metadata={"help": "On a GPU, free memory between rollouts."}
    )

    def __new__(cls, *_: Any, **given: Any) -> QaRLConfig:
        check_names(cls, given, _OTHER_NAMES)
        config: QaRLConfig = super().__new__(cls)
        return config

    def __post_init__(self) -> None:
        check_values(self)
        try:
            super().__post_init__()
        except (ValueError, TypeError, ArithmeticError) as error:
            raise refused_by_trl(self, error) from None


def run_config(
    args: QaRLConfig,
    model: str,
    max_prompt_length: int,
    lora: Mapping[str, Any] | None = None,
    environment: str | None = None,
) -> Config:
    """Return QaRL's config of the run that `args` describes. For a bad value raise UserError, which names TRL's field.

    `max_prompt_length`: tokens of the longest prompt. TRL loads the data, so the data keys are placeholders.
    `lora`: the section of that name, which `peft_config` sets. `environment`: what answers turns, or None."""
    values: dict[str, Any] = {
        "name": "trl",
        "model": {"path": model, "gradient_checkpointing": False},  # TRL does it by its own key
        "data": {
            "train_files": ["dataset"],
            "train_batch_size": 1,
            "max_prompt_length": max_prompt_length,
        },
        "rollout": {"environment": environment},
        "lora": dict(lora or {}),
        "actor": {
            "ppo_mini_batch_size": 1,
            "ppo_micro_batch_size_per_gpu": 1,
            "log_prob_micro_batch_size_per_gpu": 1,
        },
        "trainer": {"total_training_steps": 1, "val_before_train": False},
    }
    for key, name in RUN_KEYS.items():
        section, _, leaf = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = getattr(args, name)

    def build() -> Config:
        config = build_config(values)
        # TRL's losses are no values of `actor.loss`, so the bands of TBPO are compared with `loss_type` here.
        fields = {key: getattr(args, name) for key, name in RUN_KEYS.items()} | {
            "actor.loss": args.loss_type,
            "rollout.environment": environment,
        }
        defaults = {key: getattr(QaRLConfig, name, None) for key, name in RUN_KEYS.items()}
        if misfits := problems(fields, defaults):
            raise ConfigError(misfits)
        return config

    return in_trls_words(build)


def trls_words(text: str) -> str:
    """Return `text` with the fields of `QaRLConfig` instead of QaRL's keys."""
    return _KEYS.sub(lambda match: _WORDS[match[0]], text)


def in_trls_words(call: Any) -> Any:
    """Return `call()`. If it raises UserError, raise it with the fields of `QaRLConfig` instead of QaRL's keys."""
    try:
        return call()
    except UserError as error:
        what, where, why, fix = (
            text and trls_words(text) for text in (error.what, error.where, error.why, error.fix)
        )
        kind = UserError if isinstance(error, ConfigError) else type(error)
        raise kind(what or "", where=where, why=why, fix=fix) from None
