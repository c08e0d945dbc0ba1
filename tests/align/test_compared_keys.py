"""Families outside of Llama and Qwen: a value that was never compared between trainer and engine is refused by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

from qarl.align.config_keys import COMPARED, check_config_keys, read_keys
from qarl.align.families import SHOWN
from qarl.checks.model import check_model
from qarl.config import load_config
from qarl.errors import UserError
from qarl.trainer.policy import DROPOUTS, Policy

sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks.proofs.families import VALUES, results, rotary_rows, rows, small_config

YARN = VALUES["types"]["yarn"]
UNVARIED = ("head_dim", "sliding_window_pattern")
"""Keys that follow from others in some families."""
THETA = {"rope_theta": 10000.0}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "granite partial": ("granite", {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "granite factor": ("granite", {"rope_parameters": THETA | YARN | {"attention_factor": 2.0}}),
    "granite layers": ("granite", {"layer_types": ["sliding_attention"] * 2}),
    "mistral partial": ("mistral", {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "mistral mscale": ("mistral", {"rope_parameters": THETA | YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}}),
    "mistral bias": ("mistral", {"attention_bias": True}),
    "mistral scaling": ("mistral", {"rope_parameters": THETA | YARN | {"llama_4_scaling_beta": 0.1}}),
    "ernie partial": ("ernie4_5", {"rope_parameters": THETA | {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "ernie bias": ("ernie4_5", {"use_bias": True}),
    "seed_oss no bias": ("seed_oss", {"attention_bias": False}),
    "seed_oss o bias": ("seed_oss", {"attention_out_bias": True}),
    "seed_oss mlp bias": ("seed_oss", {"mlp_bias": True}),
    "gemma3 bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "gemma3 cap": ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    "gemma untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma2 untied": ("gemma2", {"tie_word_embeddings": False}),
    "cohere untied": ("cohere", {"tie_word_embeddings": False}),
    "cohere bias": ("cohere", {"attention_bias": True}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon alibi": ("falcon", {"alibi": True}),
    "falcon heads": ("falcon", {"multi_query": False}),
    "arcee bidirectional": ("arcee", {"is_causal": False}),
    "arcee scale": ("arcee", {"logit_scale": 0.5}),
    "exaone4 bias": ("exaone4", {"attention_bias": True}),
    "cwm bias": ("cwm", {"attention_bias": True}),
    "nemotron activation": ("nemotron", {"hidden_act": "silu"}),
    "jais2 window": ("jais2", {"interleaved_sliding_window": 8}),
}
"""Name -> family and the keys that make both sides compute different models, or an engine without a parameter."""


def bad(name: str) -> Any:
    family, keys = WRONG[name]
    config = small_config(family)
    for key, value in keys.items():
        setattr(config, key, value)
    config.architectures = None
    return config


@pytest.mark.vllm
@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_was_never_compared_is_refused_by_name(name):
    key = next(iter(WRONG[name][1]))
    with pytest.raises(UserError, match=key):
        check_model(bad(name))


@pytest.mark.vllm
@pytest.mark.parametrize("family", SHOWN)
def test_what_was_compared_is_allowed(family):
    accepted = [name for of, name, row in results() if of == family and "w4a16" in row and name not in rotary_rows()]
    assert len(accepted) > 2
    for name in accepted:
        config = small_config(family, **rows(family)[name])
        config.architectures = None
        check_model(config)


@pytest.mark.parametrize("family", SHOWN)
def test_every_key_that_is_read_is_compared_or_refused(family):
    """A value of a type that no config has: only keys with a reason take it."""
    import transformers

    read = read_keys(family)
    assert len(read) > 80 and COMPARED[family].keys() <= read | {"sliding_window_pattern"}
    for key in sorted(COMPARED[family]):
        assert any(key in changes for changes in rows(family).values()) or key in (
            "head_dim",
            "sliding_window_pattern",
        ), key
    config = transformers.CONFIG_MAPPING[family]()
    check_config_keys(config)
    object.__setattr__(config, "logits_are_halved", True)  # nobody reads it
    check_config_keys(config)
    object.__setattr__(config, "is_causal", False)
    with pytest.raises(UserError, match="is_causal"):
        check_config_keys(config)


HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family} {rope['rope_type']}": (family, rope)
    for family in ("granite", "mistral", "arcee", "ernie4_5", "cohere", "seed_oss", "exaone4", "jais2", "falcon")
    for rope in ({"rope_type": "linear", "factor": 4.0}, YARN)
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", HEALTHY)
def test_rotary_embeddings_on_which_both_sides_agree_are_allowed(name):
    family, rope = HEALTHY[name]
    check_config_keys(small_config(family, rope_parameters=THETA | rope))


def write_model(config: Any, tokenizer: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.rmtree("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("model")
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, "model")


@pytest.mark.parametrize("family", SHOWN)
def test_every_family_loads_without_dropout(family, startable_run, pristine_model):
    write_model(small_config(family), pristine_model)
    policy = Policy.load(load_config(["config=run.yaml", "quant.scheme=bf16", "quant.align=off"]))
    kinds = {type(module).__name__: module for module in policy.model.modules() if "Dropout" in type(module).__name__}
    assert all(module.p == 0 for module in kinds.values())
    assert not any(getattr(policy.model.config, key, 0) for key in DROPOUTS)
