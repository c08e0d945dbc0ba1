"""Families outside of Llama and Qwen: trained if a mismatch was measured, else refused by name, and told early."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from checkout import ROOT
from cpu_features import needs_vllm_cpu
from engine_helpers import config

from benchmarks.proofs.families import small_config
from qarl.checks.layers import meta_model
from qarl.checks.model import level_notes
from qarl.checks.model_size import ModelSize
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import (
    ALIGNED,
    MEASURED,
    check_adapters,
    check_family,
    family_named,
    shown_mismatch,
)
from qarl.families.base import Family
from qarl.families.measured import LARGEST_SHARE

OTHER_EXPERTS = ("mellum", "olmoe")
"""Mixtures of experts that agreed here. They are refused: nothing else of their routers was compared."""
FILE = ROOT / "benchmarks" / "results" / "families_cpu.json"


def named(family: str) -> Any:
    import transformers

    return transformers.CONFIG_MAPPING[family]()


def test_the_table_is_what_was_measured():
    """Every family that was measured and agreed is in it, with its figure; nothing else is."""
    results = json.loads(FILE.read_text())["results"]
    agreed = {
        name.removesuffix(" w4a16"): row["linears"]["mean"]
        for name, row in results.items()
        if "linears" in row and row["linears"]["mean"] <= LARGEST_SHARE * row["off"]["mean"]
    }
    assert {"mistral", "gemma2", "granite"} <= set(agreed) and not {
        "opt",
        "ministral3",
        "cohere2",
    } & set(agreed)
    shown = {name: family.linears_mismatch or 0.0 for name, family in MEASURED.items()}
    listed = {
        family: mean for family, mean in agreed.items() if family not in (*ALIGNED, *OTHER_EXPERTS)
    }
    assert {family: float(f"{mean:.1e}") for family, mean in listed.items()} == shown
    assert max(shown.values()) < Level.LINEARS.tolerance.mismatch / 5


def test_what_is_neither_aligned_nor_measured_is_refused_by_name():
    """Also for every family that could be measured and disagreed."""
    results = json.loads(FILE.read_text())["results"]
    failed = sorted({name.rpartition(" ")[0] for name in results} - set(MEASURED) - set(ALIGNED))
    assert len(failed) > 50
    for family in failed:
        hf_config = named("mistral")
        hf_config.model_type = family
        with pytest.raises(UserError, match=f"models of the family {family} are refused"):
            check_family(hf_config)
    for family in (*ALIGNED, *MEASURED):
        hf_config = named("mistral")
        hf_config.model_type = family
        check_family(hf_config)


def first_layer(model: Any) -> list[str]:
    """Names of the parameters of the first decoder layer, without the name of the layer."""
    names = [name for name, _ in model.named_parameters()]
    return [re.sub(r"^\w+\.0\.", "", name) for name in names if re.match(r"\w+\.0\.", name)]


@pytest.mark.parametrize("name", [*ALIGNED, *MEASURED])
def test_a_family_says_of_its_layers_what_transformers_builds(name):
    hf_config = small_config(name)
    layers = meta_model(hf_config).base_model
    parts = {part for name, _ in layers.named_parameters() for part in name.split(".")}
    assert ("q_norm" in parts) == family_named(name).head_norms
    assert ("experts" in parts) == family_named(name).experts
    norms = [key for key in first_layer(layers) if re.fullmatch(r"(\w+norm|ln_\w+)\.weight", key)]
    assert len(norms) == family_named(name).layer_norms
    has_key = getattr(hf_config, "attention_bias", False) or getattr(hf_config, "use_bias", False)
    biases = any(name.endswith("k_proj.bias") for name, _ in layers.named_parameters())
    assert biases == (family_named(name).qkv_bias or bool(has_key))


@pytest.mark.parametrize("name", ["qwen3", "gemma", "gemma2", "gemma3_text"])
def test_the_memory_plan_counts_all_parameters(name):
    hf_config = small_config(name)
    parameters = meta_model(hf_config).parameters()
    assert ModelSize.from_config(hf_config).parameters == sum(p.numel() for p in parameters)


def test_a_family_that_is_not_trained_says_nothing_of_itself():
    assert family_named("opt") == Family("opt") and not family_named("opt").trained


@pytest.mark.vllm
@needs_vllm_cpu
def test_vllm_serves_adapters_of_all_families_but_those_that_are_named():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.model_executor.models.registry import ModelRegistry

    served = {
        name
        for name in (*ALIGNED, *MEASURED)
        if supports_lora(ModelRegistry.models[CLASSES[name]].load_model_cls())
    }
    assert served == {name for name in (*ALIGNED, *MEASURED) if family_named(name).adapters}
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
