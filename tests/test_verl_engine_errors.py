"""What the quantized engine refuses of verl's settings and batches, and what it leaves to others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from qarl.errors import UserError
from qarl.verl_plugin import engine as plugin_engine
from qarl.verl_plugin.config import QuantFSDPEngineConfig
from qarl.verl_plugin.engine import QaRLFSDPEngine, check_engine_config, register

MODEL = {"lora_rank": 0, "use_fused_kernels": False, "use_liger": False, "enable_activation_offload": False}


def check(model: dict | None = None, **engine) -> None:
    settings = {"strategy": "fsdp2"} | engine
    check_engine_config(SimpleNamespace(**MODEL | (model or {})), QuantFSDPEngineConfig(**settings))


def quantized_engine() -> QaRLFSDPEngine:
    """One that was never built, for methods that use nothing of the model."""
    engine = object.__new__(QaRLFSDPEngine)
    engine.quant = QuantFSDPEngineConfig(strategy="fsdp2").quant
    return engine


def test_what_goes_with_the_quantized_forward():
    check()
    check(param_offload=True, optimizer_offload=True, mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"enable_activation_offload": True}}, "actor_rollout_ref.model.enable_activation_offload=False"),
        ({"offload_policy": True}, "fsdp_config.offload_policy=False"),
        ({"forward_only": True}, "actor_rollout_ref.ref.fsdp_config._target_"),
        ({"mixed_precision": {"param_dtype": "bf16", "cast": True}}, "mixed_precision"),
    ],
)
def test_settings_that_would_be_dropped_in_silence(settings, key):
    with pytest.raises(UserError) as caught:
        check(**settings)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("flash", "one", "dtype"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, True, torch.float32)],
)
def test_bf16_logits_reach_nothing_but_flash_attns_kernel(monkeypatch, flash, one, dtype):
    monkeypatch.setattr(plugin_engine, "flash_cross_entropy", lambda: flash)
    monkeypatch.setattr(FSDPEngineWithLMHead, "prepare_model_outputs", lambda self, output, *rest: output)
    engine = quantized_engine()
    engine.model_config = SimpleNamespace(tokenizer=range(6))
    output = SimpleNamespace(logits=torch.zeros(1, 3, 8, dtype=torch.bfloat16))
    logits = engine.prepare_model_outputs(output, {"temperature_is_one": one}, None, None).logits
    assert logits.dtype == dtype
    assert (logits[..., :6] == 0).all() and (logits[..., 6:] < -1e29).all()


def test_positions_of_several_axes_are_refused():
    with pytest.raises(UserError, match="mrope"):
        quantized_engine().prepare_model_inputs({"position_ids": torch.zeros(2, 4, 5)})


def test_another_packages_engine_stays(monkeypatch, caplog):
    class Other(FSDPEngineWithLMHead):
        pass

    monkeypatch.setattr(EngineRegistry, "_engines", {})
    EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")(Other)
    register()
    engines = EngineRegistry._engines["language_model"]
    assert engines["fsdp2"][("cuda", "nvidia")] is Other
    assert engines["fsdp"][("cuda", "nvidia")] is engines["fsdp2"]["cpu"] is QaRLFSDPEngine
    (record,) = caplog.records
    assert "fsdp2" in record.message and "keeps another package's engine" in record.message
