"""Keys of config.json that nobody knows, and published configs, which have none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from checkout import ROOT

from qarl.align.model_config import check_known_keys
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED

PUBLISHED = sorted(path.parent.name for path in (ROOT / "qarl/bench/models").glob("*/config.json"))


def config_of(family: str, **keys: Any) -> Any:
    return transformers.CONFIG_MAPPING[family](**keys)


@pytest.mark.parametrize("family", [*ALIGNED, *MEASURED])
@pytest.mark.parametrize("value", [True, False, 0, "x", {"a": 1}])
def test_an_unknown_key_is_refused_whatever_its_value(family: str, value: Any) -> None:
    with pytest.raises(UserError, match=r"use_gated_attention=.* is an unknown key"):
        check_known_keys(config_of(family, use_gated_attention=value))


@pytest.mark.parametrize("family", [*ALIGNED, *MEASURED])
def test_what_every_config_may_have_passes(family: str) -> None:
    notes = {
        "use_gated_attention": None,
        "unsloth_version": "2026.1",
        "temperature": 0.7,
        "torch_dtype": "bfloat16",
        "unk_token_id": 0,
    }
    check_known_keys(
        config_of(family, architectures=["X"], eos_token_id=[1, 2], use_mrope=False, **notes)
    )
    check_known_keys(config_of(family))


@pytest.mark.parametrize("key", ["use_mrope", "rope_interleaved"])
def test_a_switch_of_another_rotary_embedding_is_refused_if_it_is_on(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}=True"):
        check_known_keys(config_of("qwen2", **{key: True}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_no_unknown_key(name: str) -> None:
    keys = json.loads((ROOT / "qarl/bench/models" / name / "config.json").read_text())
    check_known_keys(transformers.AutoConfig.for_model(**keys))


def test_a_config_that_was_saved_and_loaded_has_no_unknown_key(tmp_path: Any) -> None:
    for family in ALIGNED:
        config_of(family).save_pretrained(tmp_path)
        check_known_keys(transformers.AutoConfig.from_pretrained(tmp_path))
