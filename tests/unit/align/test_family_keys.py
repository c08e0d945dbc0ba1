"""Family x key of a model's config: what was measured through `qarl train` is what the checks say, and no row that they
accept is a different model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from cpu_features import needs_vllm_cpu

from qarl.align.compared_keys import SIZES, TABLE, read_keys
from qarl.align.model_config import VERDICTS, check_config_keys
from qarl.checks.model import check_served
from qarl.config import load_config
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED
from qarl.trainer.load_weights import DROPOUTS
from qarl.trainer.policy import Policy

sys.path.insert(0, str(ROOT / "scripts"))
import family_tables

from benchmarks.proofs.families import ALL, results, rows, small_config

BY_LOADING = (
    "the engine would run MistralForCausalLM, but the trainer would run MinistralForCausalLM",
    "config or tokenizer cannot be loaded",  # transformers' own class cannot take the value
)
BY_NAME = (
    " is refused",
    "are refused",
    "would compute different rotary embeddings from this config",
    *BY_LOADING,
)


def test_every_row_was_measured_or_refused_by_name() -> None:
    measured = family_tables.by_family()
    for family in ALL:
        assert set(measured[family]) == set(rows(family)), family
    for family, name, row in results():
        assert "failed" not in row, (family, name, row)
        assert "w4a16" in row or any(words in row["refused"] for words in BY_NAME), (
            family,
            name,
            row,
        )


def test_no_accepted_row_is_a_different_model() -> None:
    """At most a tenth of the mismatch at `off`, and nothing at `exact`."""
    accepted = [(family, name, row) for family, name, row in results() if "w4a16" in row]
    assert len(accepted) > 200
    for family, name, row in accepted:
        assert family_tables.agrees(row), (family, name, row)
        exact = [of_scheme["exact"] for of_scheme in row.values() if "exact" in of_scheme]
        assert not any(exact) and (len(exact) == 2) == (family in ALL[:4]), (family, name, row)


def test_the_page_shows_the_results() -> None:
    assert family_tables.page() == family_tables.PAGE.read_text(encoding="utf-8")


def refusal(config: Any) -> str | None:
    try:
        check_served(config)
    except UserError as error:
        return error.what
    return None


@pytest.mark.long
@needs_vllm_cpu
@pytest.mark.parametrize("family", ALL)
def test_every_row_is_accepted_or_refused_in_the_words_of_its_measurement(family: str) -> None:
    for name, row in family_tables.by_family()[family].items():
        if row.get("refused", "").startswith(BY_LOADING):
            continue
        message = refusal(small_config(family, **rows(family)[name]))
        assert (
            message is None if "w4a16" in row else row["refused"].startswith(message or "accepted")
        ), name


def test_every_key_that_counts_has_a_measured_row() -> None:
    table = json.loads(TABLE.read_text())["families"]
    for family in ALIGNED:
        counting = {
            key
            for key in set.intersection(*map(set, table[family].values()))
            if VERDICTS.get(key) == "both"
        }
        refused = set(ALIGNED[family].refuses)
        assert counting - SIZES | refused <= {
            key for changes in rows(family).values() for key in changes
        }, family


UNMEASURED = {
    "exaone4": {"attention_bias": True},
    "jais2": {"interleaved_sliding_window": 8},
    "mistral": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
}


@pytest.mark.parametrize("family", UNMEASURED)
def test_a_value_that_was_never_compared_is_refused_by_name(family: str) -> None:
    (key,) = UNMEASURED[family]
    with pytest.raises(UserError, match=key):
        check_config_keys(small_config(family, **UNMEASURED[family]))


@pytest.mark.parametrize("family", MEASURED)
def test_every_key_that_is_read_is_compared_or_refused(family: str) -> None:
    read, follow = (
        read_keys(family),
        {"head_dim", "sliding_window_pattern"},
    )  # in some families from other keys
    assert len(read) > 80 and MEASURED[family].compared.keys() <= read | {"sliding_window_pattern"}
    assert MEASURED[family].compared.keys() - follow <= {
        key for changes in rows(family).values() for key in changes
    }
    config = small_config(family)
    check_config_keys(config)
    object.__setattr__(config, "logits_are_halved", True)
    with pytest.raises(UserError, match="logits_are_halved=True"):
        check_config_keys(config)


@pytest.mark.parametrize("family", MEASURED)
def test_every_family_loads_without_dropout(
    family: str, startable_run: Any, pristine_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    shutil.rmtree("model")
    AutoModelForCausalLM.from_config(small_config(family), dtype=torch.bfloat16).save_pretrained(
        "model"
    )
    for file in pristine_model.glob("*token*"):
        shutil.copy(file, "model")
    policy = Policy.load(load_config(["config=run.yaml", "quant.scheme=bf16", "quant.align=off"]))
    assert all(
        module.p == 0 for module in policy.model.modules() if "Dropout" in type(module).__name__
    )
    assert not any(getattr(policy.model.config, key, 0) for key in DROPOUTS)
