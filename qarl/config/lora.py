"""The section `lora` of the config: adapters on a frozen base.

`path` names an adapter of peft's to begin from. Its adapter_config.json fills `r`, `alpha` and `target_modules`
(`qarl.config.adapter_start`), so that the whole config of the run is known before any work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qarl.config.adapter_start import CONFIG_FILE as CONFIG_FILE
from qarl.config.adapter_start import start_of
from qarl.config.types import PathText, Section, Text, as_list

ALL_LINEAR = "all-linear"
_ADAPTER_ONLY = "the engine adds only the product of A and B to the output of a linear"
REFUSED = {
    "use_dora": "vLLM does not serve DoRA",
    "bias": f"{_ADAPTER_ONLY}, and no trained bias",
    "dropout": "the engine has no dropout, so the trainer's log-probs would be of another model",
    "modules_to_save": f"{_ADAPTER_ONLY}, so modules that are trained whole would never arrive",
    "use_rslora": "the factor of the adapter is alpha / r; set alpha to choose it",
    "rank_pattern": "all adapters have one rank",
    "alpha_pattern": "all adapters have one alpha",
    "layers_to_transform": "vLLM chooses the layers of an adapter by the last part of their name",
    "exclude_modules": "target_modules lists what gets an adapter",
    "init_lora_weights": "A starts at random and B at zero, so that the first rollouts are those of the base",
}
"""Settings of peft's LoraConfig that QaRL refuses, and why."""
FOLDER = "adapter"
"""The folder of the adapter in an export."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's ranks (`MaxLoRARanks` in vllm/config/lora.py)."""
PEFT_NAMES = {"lora_dropout": "dropout", "lora_bias": "bias", "lora_alpha": "alpha", "rank": "r"}
"""Other names of keys, most of them peft's, and QaRL's."""
_NOT_CHOSEN = (None, ALL_LINEAR, [ALL_LINEAR])
"""Values of keys that leave the choice to the adapter of `path`."""
_NAME = re.compile(r"\w+([.]\w+)*")


def engine_rank(rank: int) -> int:
    """Return the rank with which the engine computes an adapter of `rank`: the next one that vLLM has."""
    return next(known for known in RANKS if known >= rank)


def is_pattern(target: str) -> bool:
    """Return whether an entry of `lora.target_modules` is a regular expression."""
    return target != ALL_LINEAR and _NAME.fullmatch(target) is None


def chooses_by_name(targets: Sequence[str]) -> bool:
    """Return whether `targets` choose linears by more than the last parts of their names."""
    return any("." in entry or is_pattern(entry) for entry in targets)


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether `targets` choose the linear `name`, as in peft 0.21.2 (`check_target_module_exists`): an entry is
    the name or its last parts, and a regular expression must match the whole name."""
    return any(
        entry == ALL_LINEAR
        or name == entry
        or name.endswith(f".{entry}")
        or (is_pattern(entry) and re.fullmatch(entry, name) is not None)
        for entry in targets
    )


def with_start(values: Any) -> Any:
    """Return the section `lora` with `r`, `alpha` and `target_modules` of the adapter of `path`. What is given stays,
    for the checks to compare."""
    path = values.get("path") if isinstance(values, Mapping) else None
    if not isinstance(path, str) or not path:
        return values
    try:
        start = start_of(path)
    except PydanticCustomError:  # that of the field
        return values
    found = {"r": start.r, "alpha": start.alpha, "target_modules": list(start.targets)}
    given = {key: value for key, value in values.items() if value not in _NOT_CHOSEN}
    return {**found, **given}


class LoraConfig(Section):
    """Adapters (LoRA) on a frozen base: only two small matrices per linear are trained and published.

    docs/do/lora.md has the gain in memory and bytes, and the learning rate."""

    path: PathText | None = None
    """Folder of an adapter that peft has saved (adapter_config.json, adapter_model.safetensors), with which training
    starts. It sets r, alpha and target_modules. A run that resumes takes its checkpoint instead."""

    r: Annotated[int, Field(ge=0)] | None = 0
    """Rank of the adapters, at most 512. 0 or null: no adapters, all weights are trained. vLLM has 1, 8, 16, 32, 64,
    128, 256, 320 and 512, and computes any other one as the next of these, with zeros."""

    alpha: int | None = Field(default=None, ge=1)
    """The product of A and B is multiplied by alpha / r, which must be a power of two, so that the engine's product
    B * alpha / r is exact. null means r."""

    target_modules: Annotated[list[Text], BeforeValidator(as_list), Field(min_length=1)] = [
        ALL_LINEAR
    ]
    """Linears that get an adapter, as in peft: the last parts of their names, such as [q_proj, self_attn.v_proj], or
    one regular expression for whole names, such as `.*layers[.][0-3][.].*proj`. `all-linear`: all but lm_head, routers
    and experts. In a mixture of experts these are mostly those of attention."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            name = PEFT_NAMES.get(key, key)
            if name in REFUSED:
                reason = f"lora.{key} is not supported: {REFUSED[name]}"
                raise PydanticCustomError(
                    "lora", "{reason}", {"reason": reason, "fix": f"remove lora.{key}"}
                )
            if name != key:
                reason = f"unknown key lora.{key}"
                raise PydanticCustomError(
                    "lora", "{reason}", {"reason": reason, "fix": f"write lora.{name}"}
                )
        return values

    @model_validator(mode="before")
    @classmethod
    def _begin_from_path(cls, values: Any) -> Any:
        return with_start(values)

    @field_validator("path")
    @classmethod
    def _holds_an_adapter(cls, path: str | None) -> str | None:
        if path is not None:
            start_of(path)
        return path

    @field_validator("r")
    @classmethod
    def _rank_of_vllm(cls, rank: int | None) -> int | None:
        if (rank or 0) <= RANKS[-1]:
            return rank
        reason = f"vLLM serves adapters of at most rank {RANKS[-1]}"
        raise PydanticCustomError(
            "rank", "{reason}", {"reason": reason, "fix": f"use {RANKS[-1]} or less"}
        )

    @field_validator("target_modules")
    @classmethod
    def _names_or_one_pattern(cls, targets: list[str]) -> list[str]:
        for target in filter(is_pattern, targets):
            if why := _no_good_pattern(target, alone=len(targets) == 1):
                fix = (
                    f"list names, such as [q_proj, v_proj], or write {ALL_LINEAR} or one expression"
                )
                raise PydanticCustomError(
                    "target", "{reason}", {"reason": f"{target} is no target: {why}", "fix": fix}
                )
        return targets

    @property
    def factor(self) -> float:
        """alpha / r, by which the product of A and B is multiplied."""
        return (self.alpha or self.r or 1) / (self.r or 1)


def _no_good_pattern(target: str, *, alone: bool) -> str | None:
    """Return why `target` cannot be a regular expression, or None if it can."""
    if re.fullmatch(r"[\w., ]+", target) and "," in target:
        return "several names are a list"
    if target.startswith("re:"):
        return "peft's expressions have no prefix"
    if not alone:
        return "a regular expression stands alone, and not in a list"
    try:
        re.compile(target)
    except re.error as error:
        return f"it is not a regular expression: {error}"
    return None
