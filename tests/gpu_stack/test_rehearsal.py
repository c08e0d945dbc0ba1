"""The path of a verl run on a GPU, through verl's, vLLM's and transformers' own code, as far as it goes without one.

For each shipped config of the backend `verl` and each Hydra group `+qarl=SCHEME`: verl's config, its model config, the
actor's model at its real size (without memory for its weights), the attention that it chooses, verl's server up to
vLLM's engine config, and the agent loop with its tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import init_empty_weights
from checkout import ROOT
from gpu_lock import pretend, required
from random_models import save_tokenizer

required()

CONFIGS = [path.name for path in sorted((ROOT / "configs").glob("*.yaml"))]
MODELS = {name: yaml.safe_load((ROOT / "configs" / name).read_text()) for name in CONFIGS}
VERL_CONFIGS = [name for name, config in MODELS.items() if config.get("backend") == "verl"]
GROUPS = ["bf16", "w4a16", "w8a8", "fp8"]
STARTS = [*VERL_CONFIGS, *(f"+qarl={group}" for group in GROUPS)]
BENCH_MODELS = ROOT / "qarl" / "bench" / "models"


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch, (9, 0))
    monkeypatch.chdir(ROOT)
    before = dict(os.environ)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def resolved(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """verl's config of a start on GPUs. Its model is a folder with the real model's config and a small tokenizer."""
    start: str = request.param
    named = MODELS[start]["model"]["path"].split("/")[-1].removesuffix("-Base") if start in VERL_CONFIGS else ""
    size = named if (BENCH_MODELS / named / "config.json").is_file() else "Qwen3-0.6B"
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((BENCH_MODELS / size / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, 64)
    if start in VERL_CONFIGS:
        from qarl.config import load_config
        from qarl.verl.process import set_environment
        from qarl.verl.run import verl_config

        ours = load_config([f"config={start}", f"model.path={folder}", f"output_dir={tmp_path}"])
        set_environment(ours, False)
        return verl_config(ours, on_cpu=False)
    from hydra import compose, initialize_config_module

    overrides = ["hydra.searchpath=[pkg://qarl.verl.plugin.hydra]", start, f"actor_rollout_ref.model.path={folder}"]
    overrides += ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4"]
    overrides += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def model_config(resolved: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(resolved.actor_rollout_ref.model)


@pytest.mark.parametrize("resolved", STARTS, indirect=True)
def test_the_actor_is_built_and_its_attention_is_ours(resolved: Any) -> None:
    """The class and the attention that verl's engine asks transformers for, at real size."""
    from verl.utils.model import get_hf_auto_model_class

    from qarl.align.rows import ROWS_ATTENTION, use_rows_attention

    config = model_config(resolved).hf_config
    with init_empty_weights(include_buffers=False):
        model = get_hf_auto_model_class(hf_config=config).from_config(config, dtype=torch.bfloat16)
    assert use_rows_attention(model)
    assert model.config._attn_implementation == ROWS_ATTENTION


@pytest.mark.parametrize("resolved", STARTS, indirect=True)
def test_the_engines_config_is_accepted(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's server makes vLLM's command line, and vLLM its config, with the quantization that QaRL names."""
    import ray
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode

    with monkeypatch.context() as import_time:  # Triton would look for the driver
        import_time.setattr(torch.cuda, "is_available", lambda: False)
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(vLLMHttpServer):
        async def run_server(self, args: Any) -> None:
            self.engine = AsyncEngineArgs.from_cli_args(args).create_engine_config()

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "1"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    rollout = omega_conf_to_dataclass(resolved.actor_rollout_ref.rollout)
    workers: list[Any] = [None] * rollout.tensor_model_parallel_size
    server = Server(rollout, model_config(resolved), RolloutMode.HYBRID, workers, 0, 0, 8, 1, "0")
    asyncio.run(server.launch_server())
    quant = resolved.actor_rollout_ref.actor.fsdp_config.quant
    expected = None if quant.scheme == "bf16" else "compressed-tensors"
    assert server.engine.model_config.quantization == expected
    assert server.engine.parallel_config.tensor_parallel_size == rollout.tensor_model_parallel_size
    assert server.engine.parallel_config.worker_extension_cls.startswith("qarl.")


@pytest.mark.parametrize("resolved", STARTS, indirect=True)
def test_the_agent_loop_takes_any_tokenizer(resolved: Any) -> None:
    """Also one without the special tokens of the model's family, such as the quickstart's."""
    import hydra
    from verl.experimental.agent_loop import agent_loop as loops
    from verl.utils.dataset.rl_dataset import RLHFDataset

    model = model_config(resolved)
    loop = hydra.utils.instantiate(
        config=loops._agent_loop_registry[resolved.actor_rollout_ref.rollout.agent.default_agent_loop],
        trainer_config=loops.DictConfigWrap(config=resolved),
        server_manager=None,
        tokenizer=model.tokenizer,
        processor=None,
        hf_model_type=model.hf_config.model_type,
        dataset_cls=RLHFDataset,
        data_config=loops.DictConfigWrap(resolved.data),
        tools=loops.ToolListWrap([]),
    )
    assert type(loop).__module__ == "qarl.verl.plugin.agent_loop"
