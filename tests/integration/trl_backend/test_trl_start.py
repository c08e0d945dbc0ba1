"""A model that peft has given an adapter, as TRL's users pass one to begin from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.config import load_config
from qarl.errors import UserError
from qarl.trl import QaRLConfig, QaRLTrainer
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


LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def refusal(model: Any, folder: Path, peft_config: Any = None, **settings: Any) -> UserError:
    """Return the error of a trainer, which is raised before an engine starts."""
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 16}
    usual = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "max_steps": 1}
    with pytest.raises(UserError) as error:
        QaRLTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=QaRLConfig(**usual | sizes | settings),
            train_dataset=Dataset.from_dict({"prompt": ["t3 t4"]}),
            peft_config=peft_config,
        )
    return error.value


def test_a_kl_term_with_an_adapter_to_begin_from_is_refused(tmp_path: Path) -> None:
    """TRL loads the reference from the base's folder, without the adapter."""
    model = save_random_model(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    error = refusal(get_peft_model(base, LORA), tmp_path, loss_type="dapo", beta=0.04)
    assert "beta=0.04 with a PeftModel" in error.what and "beta=0.0" in str(error.fix)


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["all weights", "lora"])
def test_a_base_with_codes_is_refused(tmp_path: Path, peft_config: Any) -> None:
    model = save_random_model(tmp_path / "model")
    folder = shutil.copytree(model, tmp_path / "codes")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    error = refusal(str(folder), tmp_path, peft_config)
    assert "is quantized already" in error.what
    assert "BF16 checkpoint" in str(error.fix) and "never tried" in str(error.why)
