"""GPUs on which vLLM would compute another scheme, or fail. No GPU is needed: the capability is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_helpers import config

from qarl.checks.kernels import check_capability, check_kernels
from qarl.checks.run import CHECKS
from qarl.errors import UserError
from qarl.rollout.engine_config import W4A8_ON_GPUS

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def test_training_refuses_fp8_on_gpus_without_fp8_products(tmp_path, monkeypatch):
    monkeypatch.setattr("qarl.checks.kernels.runs_on_cpu", lambda backend: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(UserError, match=r"8\.6 is too low for quant\.scheme=fp8"):
        check_kernels(config(tmp_path, "quant.scheme=fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_kernels(config(tmp_path, "quant.scheme=fp8"))


def test_training_refuses_w4a8_on_every_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("qarl.checks.kernels.runs_on_cpu", lambda backend: False)
    for kernels in ("engine", "qarl"):
        with pytest.raises(UserError) as error:
            check_kernels(config(tmp_path, "quant.scheme=w4a8", f"quant.kernels={kernels}"))
        assert W4A8_ON_GPUS in str(error.value)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_training_refuses_experts_in_w8a8_on_gpus(tmp_path, monkeypatch, scheme, experts, on_cpu):
    monkeypatch.setattr("qarl.checks.run.runs_on_cpu", lambda backend: on_cpu)
    run = SimpleNamespace(
        config=config(tmp_path, f"quant.scheme={scheme}", "rollout.enforce_eager=true"),
        hf_config=SimpleNamespace(num_experts=experts),
    )
    (check,) = (check for check in CHECKS if check.name == "experts")
    if scheme == "w8a8" and experts and not on_cpu:
        with pytest.raises(UserError, match="no int8 products for experts on GPUs"):
            check.make(run)
    else:
        check.make(run)


def test_a_disabled_cutlass_is_not_refused(monkeypatch):
    with pytest.raises(UserError, match="no int8 products"):
        check_capability("w8a8", "engine", 100)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "Other,CutlassInt8ScaledMMLinearKernel")
    check_capability("w8a8", "engine", 100)
