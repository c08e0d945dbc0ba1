"""A model that peft has given an adapter, as TRL's users pass one to begin from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.config import load_config
from qarl.trl.adapters import base_and_section
from qarl.trl.loading import load_policy


@pytest.mark.parametrize("name", ["default", "sft"])
def test_a_model_with_an_adapter_of_peft_begins_from_it(tmp_path: Path, name: str) -> None:
    model = save_random_model(tmp_path / "model")
    folder = str(tmp_path / "adapter")
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    wrapped = get_peft_model(
        base,
        LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_alpha=16, task_type="CAUSAL_LM"),
        adapter_name=name,
    )
    named = {n: p for n, p in wrapped.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for parameter in named.values():
            parameter.copy_(torch.randn(parameter.shape).bfloat16())
    begun, section = base_and_section(wrapped, None, folder)
    path = section["path"]
    config = load_config(["config=quickstart.yaml", f"model.path={model}", f"lora.path={path}"])
    assert [*section] == ["path"] and (config.lora.r, config.lora.alpha) == (8, 16)
    policy = load_policy(begun, config)
    assert policy.adapters is not None
    for of_tensor, tensor in policy.adapters.tensors().items():
        assert torch.equal(
            tensor, named[of_tensor.replace(".weight", f".{name}.weight")].bfloat16()
        )
