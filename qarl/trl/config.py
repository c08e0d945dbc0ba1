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
from dataclasses import asdict, dataclass, field
from typing import Any

from trl import GRPOConfig

from qarl.config import Config, build_config
from qarl.config.errors import ConfigError
from qarl.config.unread import problems
from qarl.errors import UserError
from qarl.tbpo import TBPOConfig

_BANDS: dict[str, Any] = {key: value for key, value in asdict(TBPOConfig()).items() if key != "loss_agg_mode"}

RUN_KEYS = {
    "model.trust_remote_code": "trust_remote_code",
    "data.max_response_length": "max_completion_length",
    "rollout.n": "num_generations",
    "rollout.temperature": "temperature",
    "rollout.max_num_seqs": "vllm_max_num_seqs",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.cpu_kvcache_space_gib": "vllm_cpu_kvcache_space_gib",
    "rollout.enforce_eager": "vllm_enforce_eager",
    "rollout.free_cache_engine": "vllm_enable_sleep_mode",
    "quant.scheme": "quant_scheme",
    "quant.group_size": "quant_group_size",
    "quant.ignore": "quant_ignore",
    "quant.kernels": "quant_kernels",
    "quant.align": "quant_align",
    "quant.mismatch_limit": "quant_mismatch_limit",
    "publish.delta": "publish_delta",
    "optim.lr": "learning_rate",
    "optim.weight_decay": "weight_decay",
    "optim.master_dtype": "master_dtype",
    **{f"actor.{name}": name for name in _BANDS},
    "seed": "seed",
}
"""Maps QaRL's keys to the fields of `QaRLConfig` that contain their values."""
_WORDS = {key: name for key, name in RUN_KEYS.items() if "." in key} | {"actor.loss": "loss_type"}
_KEYS = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, _WORDS)) + r")(?!\w|\.\w)")


@dataclass
class QaRLConfig(GRPOConfig):
    """Settings of a `QaRLTrainer`. `RUN_KEYS` maps QaRL's keys (docs/config_reference.md) to these fields."""

    loss_type: str = field(default="tbpo", metadata={"help": "tbpo, or one of TRL's losses on quantized rollouts."})
    bf16: bool = field(default=False, metadata={"help": "Must be False: the model is BF16 without autocast."})
    vllm_enable_sleep_mode: bool = field(default=True, metadata={"help": "On a GPU, free memory between rollouts."})
    quant_scheme: str = field(default="w4a16", metadata={"help": "w4a16, w8a8, fp8, w4a8 or bf16."})
    quant_group_size: int = field(default=128, metadata={"help": "Weights that share a scale in w4a16."})
    quant_kernels: str = field(default="engine", metadata={"help": "engine, qarl (for w4a8) or dequantized."})
    quant_ignore: list[str] = field(default_factory=lambda: ["lm_head"], metadata={"help": "Modules that stay BF16."})
    quant_align: str = field(default="model", metadata={"help": "off, linears, model or exact."})
    quant_mismatch_limit: float | None = field(default=None, metadata={"help": "Largest mean |delta| in nats."})
    publish_delta: str = field(default="off", metadata={"help": "auto or off; trainer and engine share a process."})
    master_dtype: str = field(default="fp32", metadata={"help": "Dtype of the weights that AdamW updates."})
    vllm_max_num_seqs: int = field(default=256, metadata={"help": "Sequences that vLLM decodes at once."})
    vllm_enforce_eager: bool | None = field(default=None, metadata={"help": "No CUDA graphs; None: only on a CPU."})
    vllm_cpu_kvcache_space_gib: float = field(default=1.0, metadata={"help": "KV cache in GiB, on a CPU."})
    seq_clip_ratio_high: float = _BANDS["seq_clip_ratio_high"]
    seq_clip_ratio_low: float = _BANDS["seq_clip_ratio_low"]
    neg_seq_clip_ratio_low: float = _BANDS["neg_seq_clip_ratio_low"]
    neg_seq_clip_ratio_high: float = _BANDS["neg_seq_clip_ratio_high"]
    seq_tis_imp_ratio_cap: float = _BANDS["seq_tis_imp_ratio_cap"]
    mismatch_outside_cap: str = _BANDS["mismatch_outside_cap"]
    positive_band: str = _BANDS["positive_band"]
    band_scaling: str = _BANDS["band_scaling"]
    band_reference_length: int = _BANDS["band_reference_length"]

    def tbpo(self) -> TBPOConfig:
        return TBPOConfig(**{name: getattr(self, name) for name in _BANDS})


def run_config(args: QaRLConfig, model: str, max_prompt_length: int) -> Config:
    """Return QaRL's config of the run that `args` describes. For a bad value raise UserError, which names TRL's field.

    `max_prompt_length`: tokens of the longest prompt. TRL loads the data, so the data keys are placeholders."""
    values: dict[str, Any] = {
        "name": "trl",
        "model": {"path": model},
        "data": {"train_files": ["dataset"], "train_batch_size": 1, "max_prompt_length": max_prompt_length},
        "rollout": {},
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
        fields = {key: getattr(args, name) for key, name in RUN_KEYS.items()} | {"actor.loss": args.loss_type}
        defaults = {key: getattr(QaRLConfig, name, None) for key, name in RUN_KEYS.items()}
        if found := problems(fields, defaults):
            raise ConfigError(found)
        return config

    return in_trls_words(build)


def trls_words(text: str) -> str:
    """Return `text` with the fields of `QaRLConfig` instead of QaRL's keys."""
    return _KEYS.sub(lambda found: _WORDS[found[0]], text)


def in_trls_words(call: Any) -> Any:
    """Return `call()`. If it raises UserError, raise it with the fields of `QaRLConfig` instead of QaRL's keys."""
    try:
        return call()
    except UserError as error:
        what, where, why, fix = (text and trls_words(text) for text in (error.what, error.where, error.why, error.fix))
        kind = UserError if isinstance(error, ConfigError) else type(error)
        raise kind(what or "", where=where, why=why, fix=fix) from None
