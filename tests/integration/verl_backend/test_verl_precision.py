"""The dtypes in which FSDP2 casts weights and sums gradients over ranks: those of verl's own engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl

from qarl.verl import fsdp_engine
from qarl.verl.config_classes import QuantFSDPEngineConfig
from qarl.verl.fsdp_engine import QaRLFSDPEngine

CHOICES: list[dict[str, str] | None] = [
    None,
    {},
    {"param_dtype": "bf16"},
    {"param_dtype": "fp32", "reduce_dtype": "bf16"},
    {"reduce_dtype": "fp32"},
]


def policy_of(
    kind: Any, monkeypatch: pytest.MonkeyPatch, mixed_precision: dict[str, str] | None
) -> Any:
    """What `apply_fsdp2` gets from the engine of this class."""
    engine = object.__new__(kind)
    engine.engine_config = SimpleNamespace(
        mixed_precision=mixed_precision,
        strategy="fsdp2",
        wrap_policy=None,
        reshard_after_forward=True,
        offload_policy=False,
        forward_only=False,
    )
    engine.model_config = SimpleNamespace(lora_rank=0, enable_activation_offload=False)
    engine.device_mesh = None
    if kind is QaRLFSDPEngine:
        engine.quant = QuantFSDPEngineConfig(strategy="fsdp2").quant
    seen: list[Any] = []
    module = fsdp_engine if kind is QaRLFSDPEngine else transformer_impl
    others = ("get_fsdp_wrap_policy", "get_sharding_strategy", "fsdp2_load_full_state_dict")
    for name in (*others, "check_buffers"):
        monkeypatch.setattr(module, name, lambda *_, **__: None, raising=False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(module, "apply_fsdp2", lambda _, how, __: seen.append(how["mp_policy"]))
    kind._build_fsdp_module(engine, torch.nn.Linear(2, 2))
    return seen[0]


@pytest.mark.parametrize("mixed_precision", CHOICES, ids=str)
def test_weights_and_sums_have_verls_dtypes(
    monkeypatch: pytest.MonkeyPatch, mixed_precision: dict[str, str] | None
) -> None:
    ours = policy_of(QaRLFSDPEngine, monkeypatch, mixed_precision)
    theirs = policy_of(FSDPEngineWithLMHead, monkeypatch, mixed_precision)
    assert (ours.param_dtype, ours.reduce_dtype) == (theirs.param_dtype, theirs.reduce_dtype)
    assert mixed_precision or ours.reduce_dtype == torch.float32
