"""The section `lora` of the config: adapters on a frozen base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qarl.config.types import Section, Text, as_list

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
CONFIG_FILE = "adapter_config.json"
"""peft's name for the file of an adapter's settings."""
Rank = Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512]
"""vLLM's ranks, and 0 for no adapters."""
PEFT_NAMES = {"lora_dropout": "dropout", "lora_bias": "bias", "lora_alpha": "alpha", "rank": "r"}
"""Other names of keys, most of them peft's, and QaRL's."""


class LoraConfig(Section):
    """Adapters (LoRA) on a frozen base: only two small matrices per linear are trained and published.

    docs/do/lora.md has the gain in memory and bytes, and the learning rate."""

    r: Rank | None = 0
    """Rank of the adapters, one of vLLM's. 0 or null: no adapters, all weights are trained."""

    alpha: int | None = Field(default=None, ge=1)
    """The product of A and B is multiplied by alpha / r, which must be a power of two, so that the engine's product
    B * alpha / r is exact. null means r."""

    target_modules: Annotated[list[Text], BeforeValidator(as_list), Field(min_length=1)] = [
        ALL_LINEAR
    ]
    """Linears that get an adapter, by the last part of their name, such as [q_proj, v_proj]. `all-linear`: all but
    lm_head, routers and experts. In a mixture of experts these are mostly those of attention."""

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

    @field_validator("r", mode="before")
    @classmethod
    def _rank_of_vllm(cls, rank: Any) -> Any:
        ranks = [known for known in get_args(Rank) if known]
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or rank in ranks:
            return rank
        larger = [known for known in ranks if known > rank]
        fix = f"use {larger[0]}, the next larger one" if larger else f"use {ranks[-1]}, the largest"
        reason = f"vLLM serves adapters only of the ranks {', '.join(map(str, ranks))}"
        raise PydanticCustomError("rank", "{reason}", {"reason": reason, "fix": fix})

    @field_validator("target_modules")
    @classmethod
    def _names_and_no_patterns(cls, targets: list[str]) -> list[str]:
        for target in targets:
            if target == ALL_LINEAR or re.fullmatch(r"\w+", target):
                continue
            reason = (
                f"{target} is no name: linears are chosen by the last part of their names, "
                "without dots or patterns"
            )
            fix = f"list the names, such as [q_proj, v_proj], or write {ALL_LINEAR}"
            raise PydanticCustomError("target", "{reason}", {"reason": reason, "fix": fix})
        return targets

    @property
    def factor(self) -> float:
        """alpha / r, by which the product of A and B is multiplied."""
        return (self.alpha or self.r or 1) / (self.r or 1)
