"""The contents of a publish and how many bytes of it are low-bit, for every scheme, without an engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from random_models import save_random_model
from torch import nn
from transformers import AutoModelForCausalLM

from qarl.errors import UserError
from qarl.quant import get_scheme, packed_state_dict
from qarl.rollout.publish.manifest import (
    PublishReport,
    check_complete,
    check_same_layers,
    expected_manifest,
    not_finite,
)
from qarl.schemes import scheme_names

LOW_BIT = [name for name in scheme_names() if name != "bf16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> nn.Module:
    folder: Path = save_random_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", tie=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def tensors_and_manifest(model, name):
    scheme = get_scheme(name, group_size=32)
    tensors = list(packed_state_dict(model, scheme=scheme, ignore=("lm_head",)))
    return tensors, expected_manifest(model.config, scheme, ("lm_head",))


@pytest.mark.parametrize("name", scheme_names())
def test_packed_state_dict_is_complete_for_a_model_with_biases_and_tied_embeddings(model, name):
    tensors, expected = tensors_and_manifest(model, name)
    assert any(tensor_name.endswith("q_proj.bias") for tensor_name, _ in tensors)
    check_complete(tensors, expected)


@pytest.mark.parametrize("name", scheme_names())
def test_report_counts_the_bytes_of_quantized_weights_alone(model, name):
    report = PublishReport.of(*tensors_and_manifest(model, name), 3, {})
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    bf16 = sum(linear.weight.nbytes for linear in linears)
    scales = sum(linear.out_features * 4 for linear in linears)
    low_bit = {"w8a8": bf16 // 2 + scales, "fp8": bf16 // 2 + scales}
    low_bit |= dict.fromkeys(("w4a16", "w4a8"), int(bf16 * 0.28125) + 16 * len(linears))
    if name == "bf16":
        assert (report.quantized_bytes, report.quantized_bf16_bytes, report.quantized_ratio) == (
            0,
            0,
            1.0,
        )
    else:
        assert (report.quantized_bytes, report.quantized_bf16_bytes) == (low_bit[name], bf16)
    others = sum(p.nbytes for p in model.parameters()) - bf16
    assert report.bytes == others + (low_bit[name] if name != "bf16" else bf16)


@pytest.mark.parametrize("name", LOW_BIT)
def test_a_scale_that_is_not_finite_or_of_another_dtype_is_refused(model, name):
    tensors, expected = tensors_and_manifest(model, name)
    scale = "model.layers.1.mlp.up_proj.weight_scale"
    for change, message in (
        (lambda t: t * float("nan"), "holds NaN or Inf"),
        (lambda t: t / 0, "holds NaN or Inf"),
        (lambda t: t.half(), "is float16"),
        (lambda t: t.flatten(), "expects"),
    ):
        spoilt = [(n, change(t) if n == scale else t) for n, t in tensors]
        with pytest.raises(UserError, match=f"{scale}: .*{message}"):
            check_complete(spoilt, expected)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
)
def test_finite_means_what_it_means_in_torch(dtype):
    finite = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, -0.0, finite.max, finite.min, finite.tiny, 1.0], dtype=torch.float64
    ).to(dtype)
    assert not_finite([("values", values), ("empty", torch.empty(0, dtype=dtype))]) == []
    for bad in (
        (math.nan, -math.nan) if dtype == torch.float8_e4m3fn else (math.nan, math.inf, -math.inf)
    ):
        spoilt = values.clone()
        spoilt[3] = torch.tensor(bad, dtype=torch.float64).to(dtype)
        turned = spoilt.view(2, 3).t()
        assert not_finite([("a", spoilt), ("values", values), ("b", turned)]) == ["a", "b"]
    assert not_finite([("codes", torch.tensor([2**31 - 1], dtype=torch.int32))]) == []


class EngineModel(nn.Module):
    """One layer as vLLM builds it: fused linears, a quant_method on every one, a scheme on the quantized ones."""

    def __init__(self, quantized: set[str]) -> None:
        super().__init__()
        fused = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        self.packed_modules_mapping = fused
        self.layer = nn.Module()
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            linear = nn.Module()
            linear.quant_method, linear.scheme = object(), object() if name in quantized else None
            self.layer.add_module(name, linear)


@pytest.mark.parametrize(
    ("engine", "trainer", "only_trainer", "only_engine"),
    [
        ({"qkv_proj", "o_proj"}, ["q_proj", "k_proj", "v_proj", "o_proj"], [], []),
        ({"qkv_proj"}, ["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj"], []),
        ({"qkv_proj", "o_proj"}, ["q_proj", "k_proj", "v_proj"], [], ["o_proj"]),
        ({"gate_up_proj"}, ["o_proj"], ["o_proj"], ["gate_proj", "up_proj"]),
    ],
)
def test_layers_that_one_side_alone_quantizes_are_named(engine, trainer, only_trainer, only_engine):
    expected = {
        f"layer.{name}.{kind}": None
        for name in trainer
        for kind in ("weight_packed", "weight_scale")
    }
    expected |= {"layer.norm.weight": None, "layer.down_proj.weight": None}
    if not only_trainer and not only_engine:
        check_same_layers(EngineModel(engine), expected)
        return
    with pytest.raises(UserError, match="quantize different layers") as caught:
        check_same_layers(EngineModel(engine), expected)
    ours, theirs = ([f"layer.{name}" for name in names] for names in (only_trainer, only_engine))
    assert caught.value.where == f"only the trainer: {ours}; only the engine: {theirs}"
