"""Schemes against compressed-tensors, transformers and vLLM as readers; the ignore matcher against both matchers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.utils import match_name

from qarl.config.ignored_layers import is_ignored, resolve_ignored
from qarl.errors import UserError
from qarl.schemes import from_quantization_config, get_scheme

PRESETS = {
    "w4a16": ("W4A16", "pack-quantized"),
    "w4a8": ("W4A8", "pack-quantized"),
    "w8a8": ("W8A8", "int-quantized"),
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_schemes_are_presets_of_compressed_tensors(name: str) -> None:
    config = QuantizationConfig.model_validate(get_scheme(name).quantization_config(["lm_head"]))
    (group,) = config.config_groups.values()
    preset, format = PRESETS[name]
    assert group.model_copy(update={"format": None}) == preset_name_to_scheme(preset, ["Linear"])
    assert (config.format, group.format, config.quant_method) == (
        format,
        format,
        "compressed-tensors",
    )
    assert config.quantization_status.value == "compressed"
    assert config.ignore == ["lm_head"]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("group_size", [8, 32, 128])
def test_quantization_config_survives_json_and_comes_back(name: str, group_size: int) -> None:
    scheme = get_scheme(name, group_size)
    assert (scheme.name, scheme.group_size) == (name, group_size if name.startswith("w4") else None)
    written = json.loads(json.dumps(scheme.quantization_config(["lm_head", "re:.*gate$"])))
    assert from_quantization_config(written) == scheme
    full_dump = QuantizationConfig.model_validate(written).model_dump(mode="json")
    assert from_quantization_config(full_dump) == scheme


@pytest.mark.parametrize(
    ("name", "vllm_scheme"),
    [
        ("w4a16", "CompressedTensorsWNA16"),
        ("w8a8", "CompressedTensorsW8A8Int8"),
        ("fp8", "CompressedTensorsW8A8Fp8"),
    ],
)
def test_vllm_reads_it(name: str, vllm_scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme that vLLM makes of the dictionary for one linear; w4a8 is no scheme that vLLM serves as such."""
    module = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    )
    engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    fp8_module = f"{module.__package__}.schemes.compressed_tensors_w8a8_fp8"
    monkeypatch.setattr(f"{fp8_module}.get_current_vllm_config", lambda: engine)
    config = module.CompressedTensorsConfig.from_config(
        get_scheme(name, 32).quantization_config(["lm_head"])
    )
    served = config.get_scheme(torch.nn.Linear(64, 64), "model.layers.0.self_attn.o_proj")
    assert type(served).__name__ == vllm_scheme
    assert config.get_scheme(torch.nn.Linear(64, 64), "lm_head") is None
    if name == "w4a16":
        assert (served.pack_factor, served.group_size, served.symmetric) == (8, 32, True)
    else:
        assert (served.strategy, served.is_static_input_scheme) == ("channel", False)


def test_bf16_is_not_quantized_and_what_no_scheme_has_is_refused() -> None:
    scheme = get_scheme("bf16")
    assert (
        not scheme.quantized and scheme.group_size is None and scheme.check_shape("w", 3, 5) is None
    )
    assert all(get_scheme(name, 128).check_shape("w", 7, 193) is None for name in ("w8a8", "fp8"))
    with pytest.raises(UserError, match=r"no scheme 'nvfp4'(.|\n)*bf16, w4a16, w8a8, fp8, w4a8"):
        get_scheme("nvfp4")
    for group_size in (-1, 0, 4, 12, 100):
        with pytest.raises(
            UserError, match=f"group_size {group_size} is not a positive multiple of 8"
        ):
            get_scheme("w4a16", group_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"format": "int-quantized"}, "int-quantized"),
        ({"config_groups": {}}, "0 config groups"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "quantizes the KV cache"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "output_activations": {}}}},
            "must quantize weights",
        ),
        ({"config_groups": {"W4A16_ASYM": ["Linear"]}}, "symmetric=False"),
        ({"config_groups": {"NVFP4A16": ["Linear"]}}, "scale_dtype"),
        ({"config_groups": {"W8A8": ["Linear"]}}, "num_bits=8.*pack-quantized"),
        ({"config_groups": {"FP8": ["Linear"]}, "format": "float-quantized"}, "strategy='tensor'"),
        (
            {"config_groups": {"FP8_BLOCK": ["Linear"]}, "format": "float-quantized"},
            "block_structure",
        ),
        ({"config_groups": {"W4AFP8": ["Linear"]}}, "type='float'"),
        ({"config_groups": {"W4A16": ["re:.*q_proj"]}}, "targets"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"bits": 4}}}}, "bits"),
    ],
)
def test_other_checkpoints_are_refused(change: dict[str, Any], message: str) -> None:
    config = get_scheme("w4a16").quantization_config(["lm_head"]) | change
    with pytest.raises(UserError, match=message):
        from_quantization_config(config)


LEAVES = (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.shared_expert_gate",
    "mlp.experts.3.down_proj",
)  # fmt: skip
NAMES = [
    f"{prefix}layers.{layer}.{leaf}"
    for prefix in ("", "model.", "model.language_model.")
    for layer in (0, 1, 10)
    for leaf in LEAVES
] + ["lm_head", "model.lm_head", "lm_head_2", "model.embed_tokens"]
ENTRIES = [
    "lm_head", "mlp.gate", "model.layers.0.mlp.gate", "re:lm_head", "re:.*lm_head$", "re:.*mlp.gate",
    "re:.*mlp[.]gate$", "re:mlp.gate", "re:model.layers.1", r"re:model\.layers\.1\..*", "re:.*(q_proj|o_proj)",
    "re:.*shared_expert_gate$", "re:", "", "Re:.*", "*",
]  # fmt: skip


def test_matches_as_compressed_tensors_and_vllm_do() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.utils")
    ignored = {(name, entry): is_ignored(name, [entry]) for name in NAMES for entry in ENTRIES}
    assert ignored == {(name, entry): match_name(name, entry) for name, entry in ignored}
    assert ignored == {
        (name, entry): utils.should_ignore_layer(name, ignore=[entry]) for name, entry in ignored
    }
    assert 0 < sum(ignored.values()) < len(ignored)
    for name in NAMES:
        assert is_ignored(name, ENTRIES[:3]) == utils.should_ignore_layer(
            name, ignore=ENTRIES[:3]
        ), name


def test_resolve_ignored_keeps_order_and_reports_what_matched_nothing() -> None:
    assert resolve_ignored(["lm_head"], ["Linear"]).unmatched == ["Linear"], (
        "a class name, as in vLLM"
    )
    names = ["b.q_proj", "a.q_proj", "lm_head", "a.o_proj"]
    resolved = resolve_ignored(names, ["lm_head", "re:.*gate$", "re:b[.]", "lm_haed"])
    assert resolved.quantized == ["a.q_proj", "a.o_proj"]
    assert resolved.ignored == ["b.q_proj", "lm_head"]
    assert resolved.unmatched == ["re:.*gate$", "lm_haed"]
