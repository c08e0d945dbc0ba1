"""Schemes against compressed-tensors, transformers and vLLM as readers; the ignore matcher against both matchers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.utils import match_name

from qarl.errors import UserError
from qarl.quant.matcher import is_ignored, resolve_ignored
from qarl.quant.scheme import QuantArgs, Scheme, get_scheme


def test_w4a16_is_the_preset_of_compressed_tensors() -> None:
    config = QuantizationConfig.model_validate(get_scheme("w4a16").quantization_config(["lm_head"]))
    (group,) = config.config_groups.values()
    preset = preset_name_to_scheme("W4A16", ["Linear"])
    assert group.model_copy(update={"format": None}) == preset
    assert (config.format, config.quant_method) == ("pack-quantized", "compressed-tensors")
    assert config.quantization_status.value == "compressed"
    assert config.ignore == ["lm_head"]


@pytest.mark.parametrize("group_size", [8, 32, 128])
def test_quantization_config_survives_json_and_comes_back(group_size: int) -> None:
    scheme = get_scheme("w4a16", group_size)
    written = json.loads(json.dumps(scheme.quantization_config(["lm_head", "re:.*gate$"])))
    assert Scheme.from_quantization_config(written) == scheme
    full_dump = QuantizationConfig.model_validate(written).model_dump(mode="json")
    assert Scheme.from_quantization_config(full_dump) == scheme


def test_strategy_may_be_left_to_compressed_tensors() -> None:
    config = get_scheme("w4a16", 64).quantization_config()
    del config["config_groups"]["group_0"]["weights"]["strategy"]
    assert Scheme.from_quantization_config(config) == get_scheme("w4a16", 64)


def test_transformers_reads_it() -> None:
    from transformers import CompressedTensorsConfig

    read = CompressedTensorsConfig.from_dict(get_scheme("w4a16", 32).quantization_config(["lm_head"]))
    assert read.is_quantization_compressed
    assert read.quantization_config.config_groups["group_0"].weights.group_size == 32
    assert read.quantization_config.ignore == ["lm_head"]


def test_vllm_reads_it() -> None:
    module = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    config = module.CompressedTensorsConfig.from_config(get_scheme("w4a16", 32).quantization_config(["lm_head"]))
    weights = config.target_scheme_map["Linear"]["weights"]
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, 32, True)
    assert config.target_scheme_map["Linear"]["input_activations"] is None
    assert (config.quant_format, config.ignore) == ("pack-quantized", ["lm_head"])


def test_bf16_is_not_quantized() -> None:
    scheme = get_scheme("bf16")
    assert not scheme.quantized and scheme.group_size is None and scheme.check_shape("w", 3, 5) is None
    with pytest.raises(ValueError, match="bf16"):
        scheme.quantization_config([])


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w4a8"])
def test_schemes_not_built_yet_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(UserError, match=rf"'{name}' is designed but not built yet(.|\n)*bf16, w4a16"):
        get_scheme(name)


def test_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no scheme 'W4A16'(.|\n)*nearest: w4a16"):
        get_scheme("W4A16")
    with pytest.raises(UserError, match=r"no scheme 'nvfp4'(.|\n)*bf16, w4a16"):
        get_scheme("nvfp4")


@pytest.mark.parametrize("group_size", [-1, 0, 4, 12, 100])
def test_group_size_must_be_whole_int32s(group_size: int) -> None:
    with pytest.raises(UserError, match=f"group_size {group_size} is not a positive multiple of 8"):
        get_scheme("w4a16", group_size)


def test_check_shape() -> None:
    scheme = get_scheme("w4a16", 128)
    assert scheme.check_shape("q_proj", 7, 256) is None
    problem = scheme.check_shape("q_proj", 7, 192)
    assert problem and "q_proj" in problem and "192" in problem and "128" in problem
    per_channel = Scheme("w4", QuantArgs(num_bits=4, type="int", strategy="channel"), format="pack-quantized")
    assert "multiple of 8" in (per_channel.check_shape("q_proj", 7, 12) or "")


def test_activation_arguments_are_written_and_validated() -> None:
    """The shape of the schemes to come: an 8-bit one is compressed-tensors' own W8A8 preset."""
    weights = QuantArgs(num_bits=8, type="int", strategy="channel")
    activations = QuantArgs(num_bits=8, type="int", strategy="token", dynamic=True)
    scheme = Scheme("w8a8", weights, activations, format="int-quantized")
    (group,) = QuantizationConfig.model_validate(scheme.quantization_config()).config_groups.values()
    assert group.model_copy(update={"format": None}) == preset_name_to_scheme("W8A8", ["Linear"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"format": "int-quantized"}, "int-quantized"),
        ({"config_groups": {}}, "0 config groups"),
        ({"config_groups": {"W4A16_ASYM": ["Linear"]}}, "symmetric=False"),
        ({"config_groups": {"NVFP4A16": ["Linear"]}}, "scale_dtype"),
        ({"config_groups": {"W8A8": ["Linear"]}}, "num_bits=8"),
        ({"config_groups": {"W4A16": ["re:.*q_proj"]}}, "targets"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"bits": 4}}}}, "bits"),
    ],
)
def test_other_checkpoints_are_refused(change: dict[str, Any], message: str) -> None:
    config = get_scheme("w4a16").quantization_config(["lm_head"]) | change
    with pytest.raises(UserError, match=message):
        Scheme.from_quantization_config(config)


NAMES = [
    f"{prefix}layers.{layer}.{leaf}"
    for prefix in ("", "model.", "model.language_model.")
    for layer in (0, 1, 10)
    for leaf in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate",
        "mlp.gate_proj",
        "mlp.shared_expert_gate",
        "mlp.experts.3.down_proj",
    )
] + ["lm_head", "model.lm_head", "lm_head_2", "model.embed_tokens"]
ENTRIES = [
    "lm_head",
    "mlp.gate",
    "model.layers.0.mlp.gate",
    "re:lm_head",
    "re:.*lm_head$",
    "re:.*mlp.gate",
    "re:.*mlp[.]gate$",
    "re:mlp.gate",
    "re:model.layers.1",
    r"re:model\.layers\.1\..*",
    "re:.*(q_proj|o_proj)",
    "re:.*shared_expert_gate$",
    "re:",
    "",
    "Re:.*",
    "*",
]


def test_matches_as_compressed_tensors_does() -> None:
    found = {(name, entry): is_ignored(name, [entry]) for name in NAMES for entry in ENTRIES}
    assert found == {(name, entry): match_name(name, entry) for name, entry in found}
    assert 0 < sum(found.values()) < len(found)


def test_matches_as_vllm_does() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.utils")
    for name in NAMES:
        for entry in ENTRIES:
            assert is_ignored(name, [entry]) == utils.should_ignore_layer(name, ignore=[entry]), (name, entry)
        assert is_ignored(name, ENTRIES[:3]) == utils.should_ignore_layer(name, ignore=ENTRIES[:3]), name


def test_router_does_not_take_gate_proj_with_it() -> None:
    assert is_ignored("model.layers.0.mlp.gate", ["model.layers.0.mlp.gate"])
    assert not is_ignored("model.layers.0.mlp.gate_proj", ["model.layers.0.mlp.gate"])
    assert is_ignored("model.layers.0.mlp.gate", ["re:.*mlp[.]gate$"])
    assert not is_ignored("model.layers.0.mlp.gate_proj", ["re:.*mlp[.]gate$"])
    assert not is_ignored("lm_head", [])


def test_a_class_name_ignores_nothing_here_nor_in_vllm() -> None:
    assert resolve_ignored(["lm_head"], ["Linear"]) == (["lm_head"], [], ["Linear"])


def test_resolve_ignored_keeps_order_and_reports_what_matched_nothing() -> None:
    names = ["b.q_proj", "a.q_proj", "lm_head", "a.o_proj"]
    resolved = resolve_ignored(names, ["lm_head", "re:.*gate$", "re:b[.]", "lm_haed"])
    assert resolved.quantized == ["a.q_proj", "a.o_proj"]
    assert resolved.ignored == ["b.q_proj", "lm_head"]
    assert resolved.unmatched == ["re:.*gate$", "lm_haed"]


def test_invalid_pattern_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"'re:\(gate' is not a valid regular expression"):
        is_ignored("lm_head", ["re:(gate"])
