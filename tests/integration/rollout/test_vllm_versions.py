"""The pin of vLLM: the installed release has every name that QaRL uses, and any other release is refused."""

from __future__ import annotations

import pytest
import torch
from cpu_features import NO_VLLM_CPU, vllm_is_for_cpus
from third_party_uses import Call, package_uses, resolve, why_not_callable

pytest.importorskip("vllm")
if not vllm_is_for_cpus():  # tests/gpu_stack/test_symbols.py does the same with the GPU lock
    pytest.skip(NO_VLLM_CPU, allow_module_level=True)

from qarl import vllm_versions
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.rollout.chosen_kernel import chosen_kernel
from qarl.rollout.engine import EngineConfig, RolloutEngine
from qarl.rollout.engine_config import llm_arguments
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice

pytestmark = pytest.mark.vllm
configure_vllm_process()

ONLY_FOR_GPUS = "vllm.vllm_flash_attn"
"""The module that a build for CPUs lacks."""
METHODS = (
    "vllm.entrypoints.llm.LLM.generate",
    "vllm.entrypoints.llm.LLM.collective_rpc",
    "vllm.entrypoints.llm.LLM.get_metrics",
    "vllm.entrypoints.llm.LLM.reset_prefix_cache",
    "vllm.entrypoints.llm.LLM.sleep",
    "vllm.entrypoints.llm.LLM.wake_up",
    "vllm.v1.engine.core_client.InprocClient.shutdown",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer.num_output_tokens",
    "vllm.v1.worker.worker_base.WorkerBase.get_model",
    "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase.process_weights_after_loading",
)
"""Methods of objects, which the reader of the sources does not follow."""


def test_the_installed_vllm_has_every_name_and_takes_every_argument() -> None:
    uses = [
        use
        for use in package_uses()
        if use.package == "vllm" and not use.target.startswith(ONLY_FOR_GPUS)
    ]
    assert len(uses) > 100
    wrong = []
    for use in uses:
        try:
            named = resolve(use.target)
            why = why_not_callable(named, use.call) if use.call else None
        except (AttributeError, ImportError) as error:
            why = str(error)
        if why:
            wrong.append(f"{use.file}:{use.line}: {use.target}: {why}")
    assert wrong == []
    for method in METHODS:
        resolve(method)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("kernels", [KernelChoice.ENGINE, KernelChoice.QARL])
def test_the_installed_vllm_has_every_argument_of_the_engine(
    gpu: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = EngineConfig(
        "model", get_scheme("w4a8"), ("lm_head",), 64, max_num_batched_tokens=64, return_routed_experts=True,
        head_dtype="fp32", aligned=True, kernels=kernels,
    )  # fmt: skip
    assert (
        why_not_callable(
            resolve("vllm.engine.arg_utils.EngineArgs"),
            Call(0, tuple(llm_arguments(settings)), False),
        )
        is None
    )


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.24.0", True),
        ("0.29.1+cpu", True),
        ("0.23.9", False),
        ("0.30.0", False),
        (None, False),
        ("dev", False),
    ],
)
def test_another_release_is_refused_before_its_model_is_looked_at(
    version: str | None, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_versions, "installed_version", lambda: version)
    assert (vllm_versions.unsupported_release() is None) == supported
    if supported:
        return
    with pytest.raises(
        UserError,
        match=rf"(?s)vLLM {version} is installed, but QaRL supports 0\.24 to 0\.29.*make setup",
    ):
        RolloutEngine(EngineConfig("nowhere", get_scheme("w4a16"), ("lm_head",), 64))
    with pytest.raises(UserError, match="does not support the installed vLLM"):
        chosen_kernel(get_scheme("w4a16"), (64, 64), (64, 64))


def test_caches_are_found_however_they_are_nested() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    caches = vllm_versions.kv_cache_tensors([a, (b,), {"c": [c]}, None, []])
    assert [id(tensor) for tensor in caches] == [id(a), id(b), id(c)]
    assert vllm_versions.kv_cache_tensors(None) == [] and vllm_versions.kv_cache_tensors(a)[0] is a
