"""Machines that cannot run a config: GPUs that vLLM does not support, and verl beside TRL. No GPU is needed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_helpers import config

from qarl.checks.machine import Machine, check_capability, check_no_new_trl
from qarl.checks.registry import check_experts, check_kernels, check_scheme
from qarl.errors import UserError
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.w4a8 import W4A8


def gpu(capability: int) -> Machine:
    return Machine("cuda", "a GPU", False, capability)


def test_training_refuses_what_gpus_do_not_compute(tmp_path, monkeypatch):
    fp8 = config(tmp_path, "quant.scheme=fp8")
    with pytest.raises(UserError, match=r"8\.6 is too low for quant\.scheme=fp8"):
        check_scheme(fp8, gpu(86))
    check_scheme(fp8, gpu(89))
    with pytest.raises(UserError) as error:
        check_scheme(config(tmp_path, "quant.scheme=w4a8"), gpu(90))
    assert W4A8.no_gpu_kernel in str(error.value)
    for scheme, kernels, words in (
        ("w4a8", "qarl", W4A8.no_gpu_kernel),
        ("w4a16", "dequantized", "only on a CPU"),
    ):
        with pytest.raises(UserError) as error:
            check_kernels(
                config(tmp_path, f"quant.scheme={scheme}", f"quant.kernels={kernels}"), gpu(90)
            )
        assert words in str(error.value)
    with pytest.raises(UserError, match="no int8 products"):
        check_capability(get_scheme("w8a8"), KernelChoice.ENGINE, 100)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "Other,CutlassInt8ScaledMMLinearKernel")
    check_capability(get_scheme("w8a8"), KernelChoice.ENGINE, 100)


def test_experts_that_cannot_run_are_refused(tmp_path: Path) -> None:
    experts, dense = SimpleNamespace(num_experts=8), SimpleNamespace(num_experts=None)
    w8a8, own = config(tmp_path, "quant.scheme=w8a8"), config(tmp_path, "quant.kernels=dequantized")
    for refused, words in (
        (w8a8, r"(?s)no int8 products for experts on GPUs.*set quant\.kernels=qarl"),
        (own, r"no kernel of experts of quant\.kernels=dequantized"),
    ):
        with pytest.raises(UserError, match=words):
            check_experts(refused, gpu(90), experts)
        check_experts(refused, gpu(90), dense)
    for served in (["quant.scheme=fp8"], ["quant.scheme=w8a8", "quant.kernels=qarl"]):
        check_experts(config(tmp_path, *served), gpu(90), experts)


@pytest.mark.parametrize(
    ("version", "module", "refused"),
    [("1.16.0", "grpo", True), ("1.12.0", "ppo", False), ("0.12.0", None, False)],
)
def test_a_trl_without_the_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, module: str | None, refused: bool
) -> None:
    package = tmp_path / "trl"
    (package / "experimental" / module if module else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / f"trl-{version}.dist-info").mkdir()
    (tmp_path / f"trl-{version}.dist-info" / "METADATA").write_text(
        f"Name: trl\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("trl") == version
    if not refused:
        check_no_new_trl()
        return
    with pytest.raises(UserError, match=r"does not run beside TRL 1\.16\.0"):
        check_no_new_trl()
