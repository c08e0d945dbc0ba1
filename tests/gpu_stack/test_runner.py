"""What QaRL gives to and reads from the locked vLLM's engine: its arguments, Model Runner V2's KV caches, log-probs.

vLLM 0.24 runs Qwen3, Llama and Mistral with Model Runner V2, other families with the first one.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from gpu_lock import pretend, required
from gpu_lock_models import build, engine_config, load, process_groups, stand_in_operators
from random_models import save_random_model
from random_moe import IGNORE, wire_tensors

from qarl.rollout.publish import writers
from qarl.rollout.publish.manifest import expected_manifest
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.wire import encode_publish
from qarl.schemes import get_scheme

required()

FAMILIES = {"qwen3": True, "llama": True, "qwen2": False, "qwen3_moe": False}
"""Family -> whether vLLM runs it with Model Runner V2."""

HOW: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "aligned": {"aligned": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = tmp_path_factory.mktemp("models")
    return {
        family: save_random_model(
            folder / family,
            family,
            **{k: v for k, v in sizes.items() if (family, k) != ("qwen2", "head_dim")},
        )
        for family in FAMILIES
    }


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", HOW)
def test_the_engines_arguments_are_taken(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, scheme: str, how: str
) -> None:
    pretend(monkeypatch, (9, 0))
    config = engine_config(
        folders[family], get_scheme(scheme, 128), IGNORE, max_num_seqs=32, **HOW[how]
    )
    assert config.use_v2_model_runner == FAMILIES[family]
    model, graphs = config.model_config, config.compilation_config.cudagraph_mode
    assert model.logprobs_mode == "processed_logprobs" and model.dtype == torch.bfloat16
    assert (model.quantization == "compressed-tensors") == (scheme != "bf16")
    compiled = how == "graphs" and scheme in (
        "bf16",
        "w4a16",
    )  # there the trainer follows no operator of the engine
    assert graphs.name == (
        "NONE" if how == "eager" else "FULL_AND_PIECEWISE" if compiled else "FULL_DECODE_ONLY"
    )
    assert config.compilation_config.mode == (3 if compiled else 0), (
        "compiled models round differently"
    )
    assert model.enable_sleep_mode
    attention = config.attention_config.backend
    assert (attention is not None and attention.name == "CUSTOM") == (how == "aligned")
    assert config.scheduler_config.max_num_seqs == 32 and config.model_config.max_model_len == 256
    assert config.load_config.load_format == "dummy"


def test_routing_is_returned_by_the_first_runner(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, (9, 0))
    config = engine_config(
        folders["qwen3_moe"], get_scheme("bf16"), IGNORE, return_routed_experts=True
    )
    assert config.model_config.enable_return_routed_experts and not config.use_v2_model_runner


def kv_caches_of(config: Any) -> list[Any]:
    """`model_runner.kv_caches`, allocated by the functions of Model Runner V2."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.utils import AttentionGroup

    config.cache_config.num_gpu_blocks_override = 64
    specs = attn_utils.get_kv_cache_spec(config)
    (kv_cache_config,) = get_kv_cache_configs(config, [specs], [64 << 20])
    caches: list[Any] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Metadata builders need a device; the caches do not depend on them.
        builder = SimpleNamespace(
            get_cudagraph_support=lambda *args: attn_utils.AttentionCGSupport.ALWAYS
        )
        monkeypatch.setattr(
            AttentionGroup, "create_metadata_builders", lambda self, *args, **kwargs: None
        )
        monkeypatch.setattr(AttentionGroup, "get_metadata_builder", lambda self, *args: builder)
        groups, _, block_sizes = attn_utils.init_attn_backend(
            kv_cache_config, config, torch.device("cpu")
        )
    attn_utils.init_kv_cache(
        caches,
        config.compilation_config.static_forward_context,
        kv_cache_config,
        groups,
        torch.device("cpu"),
        config.cache_config.cache_dtype,
        block_sizes,
        config,
    )
    return caches


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_publish_after_nan_clears_every_kv_cache(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    capability: tuple[int, int],
) -> None:
    """FlashAttention's caches, and on capability 10.0 FlashInfer's."""
    pretend(monkeypatch, capability)
    stand_in_operators()
    monkeypatch.setattr(writers, "_stored_on_cpu", lambda target, direct: None)
    scheme, folder = get_scheme("bf16"), folders[family]
    config, tensors = engine_config(folder, scheme, IGNORE), wire_tensors(folder, scheme)
    assert config.use_v2_model_runner
    with process_groups(config):
        model = build(config)
        load(model, config, tensors)
        caches = kv_caches_of(config)
        attention = [layer for layer in model.modules() if type(layer).__name__ == "Attention"]
        assert len(attention) == 2 and all(layer.kv_cache.numel() for layer in attention)
        for layer in attention:
            layer.kv_cache.fill_(torch.nan)
        runner = SimpleNamespace(get_model=lambda: model, vllm_config=config, kv_caches=caches)
        manifest = expected_manifest(config.model_config.hf_config, scheme, IGNORE)
        receiver = StreamReceiver(EngineWeights.of_runner(runner, manifest))
        receiver.mark_stale("a log-prob was NaN")
        receiver.weights.kv_cache_spoilt = True
        receiver.feed(encode_publish(iter(tensors.items()), version=1))
        assert all(not layer.kv_cache.any() for layer in attention)


def test_both_runners_have_what_is_read_from_them() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    for runner in (First, Second):
        source = inspect.getsource(runner)
        assert (
            "self.kv_caches: list" in source
            and "self.vllm_config = " in source
            and hasattr(runner, "get_model")
        )


def test_the_engine_reaches_its_model_through_these_attributes() -> None:
    """`RolloutEngine.model()`: llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()."""
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    sets = ((LLM, "llm_engine"), (LLMEngine, "engine_core"), (InprocClient, "engine_core"))
    sets += (
        (EngineCore, "model_executor"),
        (UniProcExecutor, "driver_worker"),
        (WorkerWrapperBase, "worker"),
    )
    for kind, name in sets:
        assert f"self.{name}" in inspect.getsource(kind), f"{kind.__name__}.{name}"
    assert (
        hasattr(Worker, "get_model")
        and hasattr(InprocClient, "shutdown")
        and hasattr(LLM, "reset_prefix_cache")
    )
    assert hasattr(LLM, "get_metrics") and hasattr(LLM, "collective_rpc")


def test_the_tokens_of_open_requests_are_in_these_attributes() -> None:
    """`LiveCounts`: llm_engine.output_processor.request_states[...].detokenizer.num_output_tokens()."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    sets = (
        (LLMEngine, "output_processor"),
        (OutputProcessor, "request_states"),
        (RequestState, "detokenizer"),
    )
    for kind, name in sets:
        assert f"self.{name}" in inspect.getsource(kind), f"{kind.__name__}.{name}"
    assert hasattr(IncrementalDetokenizer, "num_output_tokens")


def test_sampling_kernels_under_the_interpreter() -> None:
    """Log-probs and ranks in the places where QaRL reads them, and the tokens that top-k and top-p keep."""
    paths = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "tests" / "support" / "runner_v2_sampling.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    assert (
        figures["shape_0"] == [8, 1]
        and figures["shape_1"] == [8, 2]
        and figures["top_tokens"] is True
    )
    assert figures["off_0"] < 1e-5 and figures["off_1"] < 1e-5, (
        "FP32 logits below 10 and a sum over 640 tokens"
    )
    masses = {name: mass for name, mass in figures.items() if name.startswith("kept_otherwise")}
    assert len(masses) == 4 and all(mass < 2e-4 for mass in masses.values()), masses
    assert [mass for name, mass in masses.items() if "0.999" not in name] == [0, 0, 0]


@pytest.mark.parametrize(("first", "tables"), [("", 1), ("import_flashinfer()", 0)])
def test_flashinfers_table_is_on_the_default_device_unless_imported_first(
    first: str, tables: int
) -> None:
    """The default device stands for the engine's memory while vLLM loads a model. If the first case finds no table,
    `import_flashinfer` is no longer needed."""
    code = f"""
import sys, torch
from qarl.vllm_versions import import_flashinfer
{first}
with torch.device("meta"):
    import flashinfer
modules = [module for name, module in sys.modules.items() if name.startswith("flashinfer")]
print(sum(isinstance(value, torch.Tensor) and value.is_meta for module in modules for value in vars(module).values()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.split()[-1:] == [str(tables)], done.stderr
