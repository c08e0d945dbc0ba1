"""The path of a verl run on a GPU, through verl's, vLLM's and transformers' own code, as far as it goes without one.

For each shipped config of the backend `verl` and each Hydra group `+qarl=SCHEME`, dense and with experts: verl's
config, its model config, the actor's model at its real size (without memory for its weights), the attention that it
chooses, verl's server up to vLLM's engine config, a layer of vLLM's model with its kernels, the checkpoint engine, the
memory plan, and the agent loop with its tokenizer.
"""

from __future__ import annotations

import asyncio
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
from gpu_lock_models import build, process_groups
from random_models import save_tokenizer

from qarl.checks.machine import UNKNOWN_GPU_BYTES
from qarl.checks.memory import estimate
from qarl.checks.memory_parts import ranks
from qarl.checks.model_size import ModelSize
from qarl.kernels.base import ExpertsShape
from qarl.kernels.registry import choose_experts_kernel, choose_linear_kernel
from qarl.rollout.kernel_request import LEAST_ROWS_KEY, is_followed
from qarl.schemes import get_scheme

required()

CONFIGS = [path.name for path in sorted((ROOT / "configs").glob("*.yaml"))]
MODELS = {name: yaml.safe_load((ROOT / "configs" / name).read_text()) for name in CONFIGS}
VERL_CONFIGS = [name for name, config in MODELS.items() if config.get("backend") == "verl"]
GROUPS = ["bf16", "w4a16", "w8a8", "fp8"]
DENSE, EXPERTS = "Qwen3-0.6B", "Qwen3-30B-A3B"
STARTS = [
    *VERL_CONFIGS,
    *(f"+qarl={group} {model}" for model in (DENSE, EXPERTS) for group in GROUPS),
]
BENCH_MODELS = ROOT / "qarl" / "bench" / "models"
OF_VERL = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "model.gradient_checkpointing": "true",
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.tensor_model_parallel_size": 2,
    "quant.align": "model",
    "optim.name": "adamw",
    "actor.use_dynamic_bsz": "false",
    "actor.ppo_max_token_len_per_gpu": "null",
    "actor.ppo_micro_batch_size_per_gpu": 1,
    "actor.log_prob_micro_batch_size_per_gpu": 1,
}
"""verl's and the groups' defaults, by QaRL's keys, for the memory plan of a start by a group."""
FOR_EXPERTS = {
    "quant.ignore": '[lm_head,"re:.*mlp.gate$"]',
    "rollout.gpu_memory_utilization": 0.45,
    "trainer.nnodes": 2,
}
"""What such a start needs besides: masters and AdamW's state of 30 billion weights on GPUs of 80 GB."""
LINEARS = {
    "bf16": ("UnquantizedLinearMethod", None),
    "w4a16": ("MacheteLinearKernel", "vllm_machete"),
    "w8a8": ("CutlassInt8ScaledMMLinearKernel", "vllm_cutlass_int8"),
    "fp8": ("CutlassFP8ScaledMMLinearKernel", "vllm_cutlass_fp8"),
}
"""Scheme -> the class in vLLM's layers on Hopper, and the trainer's kernel for the same operators."""
STACKS = {
    "bf16": ("TritonExperts", None),
    "w4a16": ("MarlinExperts", "vllm_marlin_experts"),
    "w8a8": ("TritonExperts", "vllm_triton_experts"),
    "fp8": ("TritonOrCutlassExperts", "vllm_cutlass_experts"),
}
"""The same for experts."""


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
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the real model's config and a small tokenizer."""
    start = request.node.callspec.params["start"]
    named = (
        MODELS[start]["model"]["path"].split("/")[-1].removesuffix("-Base")
        if start in VERL_CONFIGS
        else ""
    )
    named = named or start.split()[1]
    size = named if (BENCH_MODELS / named / "config.json").is_file() else DENSE
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((BENCH_MODELS / size / "config.json").read_text())
    save_tokenizer(folder, 64)
    return folder


@pytest.fixture
def ours(start: str, folder: Path, tmp_path: Path) -> Any:
    """QaRL's config of a start by a config file, else that with the values that a group takes from verl's defaults."""
    from qarl.config import load_config

    where = [f"model.path={folder}", f"output_dir={tmp_path}"]
    if start in VERL_CONFIGS:
        return load_config([f"config={start}", *where])
    changes = OF_VERL | (FOR_EXPERTS if start.endswith(EXPERTS) else {})
    changes |= {"quant.scheme": start.split()[0].removeprefix("+qarl=")}
    return load_config(
        [
            "config=qwen3_8b_w4a16.yaml",
            *where,
            *(f"{key}={value}" for key, value in changes.items()),
        ]
    )


@pytest.fixture
def resolved(start: str, folder: Path, ours: Any) -> Any:
    """verl's config of a start on GPUs."""
    if start in VERL_CONFIGS:
        from qarl.verl.environment import set_environment
        from qarl.verl.run import verl_config

        set_environment(ours, False)
        return verl_config(ours, on_cpu=False)
    from hydra import compose, initialize_config_module

    overrides = ["hydra.searchpath=[pkg://qarl.verl]", start.split()[0]]
    overrides += [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.name=vllm"]
    overrides += [
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    places = {
        "quant": "actor_rollout_ref.actor.fsdp_config.quant",
        "rollout": "actor_rollout_ref.rollout",
    }
    for key, value in FOR_EXPERTS.items() if start.endswith(EXPERTS) else ():
        section, name = key.split(".")
        overrides.append(f"{places.get(section, section)}.{name}={value}")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


@pytest.fixture
def engine(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's config, made from the command line that verl's server gives it."""
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
    return server.engine


def model_config(resolved: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(resolved.actor_rollout_ref.model)


def quant_of(resolved: Any) -> Any:
    return resolved.actor_rollout_ref.actor.fsdp_config.quant


@pytest.mark.parametrize("start", STARTS)
def test_the_actor_is_built_and_its_attention_is_ours(resolved: Any) -> None:
    """The class and the attention that verl's engine asks transformers for, at real size."""
    from verl.utils.model import get_hf_auto_model_class

    from qarl.align.packed_attention import ROWS_ATTENTION, use_rows_attention

    config = model_config(resolved).hf_config
    with init_empty_weights(include_buffers=False):
        model = get_hf_auto_model_class(hf_config=config).from_config(config, dtype=torch.bfloat16)
    assert use_rows_attention(model)
    assert model.config._attn_implementation == ROWS_ATTENTION


@pytest.mark.parametrize("start", STARTS)
def test_the_engines_config_is_accepted(start: str, resolved: Any, engine: Any) -> None:
    """With the quantization that QaRL names. At `model`, and in the groups, nothing is compiled."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    rollout, quant = resolved.actor_rollout_ref.rollout, quant_of(resolved)
    assert engine.model_config.quantization == (
        None if quant.scheme == "bf16" else "compressed-tensors"
    )
    assert engine.parallel_config.tensor_parallel_size == rollout.tensor_model_parallel_size
    workers = (
        "mp" if rollout.tensor_model_parallel_size > 1 else "uni"
    )  # verl's for one worker is mp, too
    assert engine.parallel_config.distributed_executor_backend == workers
    assert engine.parallel_config.worker_extension_cls.startswith("qarl.")
    compilation = engine.compilation_config
    follows = quant.align in (None, "model")  # null in a group is the default
    assert compilation.mode == (CompilationMode.NONE if follows else CompilationMode.VLLM_COMPILE)
    graphs = CUDAGraphMode.FULL_DECODE_ONLY if follows else CUDAGraphMode.FULL_AND_PIECEWISE
    assert compilation.cudagraph_mode == graphs and not engine.model_config.enforce_eager
    operators = (engine.attention_config.backend, engine.kernel_config.ir_op_priority.rms_norm[0])
    ours, theirs = (AttentionBackendEnum.CUSTOM, "qarl"), (None, "native")
    assert operators == (ours if follows else theirs)


@pytest.mark.parametrize("start", STARTS)
def test_the_kernels_on_hopper(resolved: Any, engine: Any, ours: Any) -> None:
    """Those in a layer of vLLM's model, as verl starts it, and the trainer's for the same weights."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import LinearBase

    quant, text = quant_of(resolved), engine.model_config.hf_text_config
    size = ModelSize.from_config(text)
    text.num_hidden_layers = 1
    with process_groups(engine):
        get_tp_group().world_size = engine.parallel_config.tensor_parallel_size
        model = build(engine, torch.device("meta"))
    layers = dict(model.model.layers.named_modules())
    linears = {
        name: kernel_in(layer) for name, layer in layers.items() if isinstance(layer, LinearBase)
    }
    experts = {
        kernel_in(layer) for layer in layers.values() if type(layer).__name__ == "RoutedExperts"
    }
    routers = {linears.pop(name) for name in list(linears) if name.endswith("mlp.gate")}
    of_engine, of_trainer = LINEARS[quant.scheme]
    if (
        quant.scheme == "w4a16" and quant.group_size == 32
    ):  # the quickstart's: Machete has groups of 64 and 128
        of_engine, of_trainer = "MarlinLinearKernel", "vllm_marlin"
    if LEAST_ROWS_KEY in engine.additional_config:  # QaRL's subclass of the same kernel pads rows
        of_engine = "QaRLPaddedFP8LinearKernel"
    assert len(linears) == (2 if size.experts else 4) and set(linears.values()) == {of_engine}
    assert experts == ({STACKS[quant.scheme][0]} if size.experts else set())
    followed = quant.scheme != "bf16" and is_followed(engine)
    router = "RouterMethod" if followed else "UnquantizedLinearMethod"
    assert routers == ({router} if size.experts else set())
    if quant.scheme == "bf16":
        return
    device = torch.device("cuda", 0)
    scheme = get_scheme(quant.scheme, quant.group_size)
    shapes = {shape for name, shape in size.block_linears(0).items() if ".experts." not in name}
    chosen = {choose_linear_kernel(scheme, device, shape).kernel.name for shape in shapes}
    assert chosen == {of_trainer}
    if size.experts:
        shape = ExpertsShape(
            text.num_experts, text.num_experts_per_tok, text.hidden_size, text.moe_intermediate_size
        )
        assert choose_experts_kernel(scheme, device, shape).kernel.name == STACKS[quant.scheme][1]


def kernel_in(layer: Any) -> str:
    """The class in one of vLLM's layers that multiplies."""
    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    if scheme is not None:
        return type(getattr(scheme, "kernel", None) or scheme.fp8_linear).__name__
    return (getattr(method, "experts_cls", None) or type(method)).__name__


@pytest.mark.parametrize("start", STARTS)
def test_the_checkpoint_engine_is_made(resolved: Any, ours: Any) -> None:
    """As verl's workers and its trainer make it. The largest tensor of a publish fits into its buffer."""
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.import_utils import import_external_libs
    from verl.workers.rollout import get_rollout_class

    config = omega_conf_to_dataclass(resolved.actor_rollout_ref.rollout.checkpoint_engine)
    import_external_libs(config.custom_backend_module or None)
    arguments = config.engine_kwargs.get(config.backend, {})
    buffer = config.update_weights_bucket_megabytes << 20
    made = CheckpointEngineRegistry.new(
        config.backend, is_master=True, bucket_size=buffer, **arguments
    )
    own_engines = ours.trainer.staleness > 0
    expected = "QaRLCheckpointEngine" if own_engines else "ColocatedCheckpointEngine"
    assert type(made).__name__ == expected
    assert type(made) is CheckpointEngineManager(config, actor_wg=None, replicas=[]).backend_cls
    assert get_rollout_class(
        resolved.actor_rollout_ref.rollout.name, resolved.actor_rollout_ref.rollout.mode
    )
    size = ModelSize.from_config(model_config(resolved).hf_config)
    assert 2 * size.largest_parameter <= buffer


@pytest.mark.parametrize("start", STARTS)
def test_the_memory_plan_fits(resolved: Any, ours: Any) -> None:
    """The doctor's estimate for GPUs of 80 GB, also for the values that a group takes from verl's defaults."""
    rollout, data = resolved.actor_rollout_ref.rollout, resolved.data
    assert ours.data.max_response_length == data.max_response_length
    assert ours.rollout.gpu_memory_utilization == rollout.gpu_memory_utilization
    assert ours.rollout.tensor_model_parallel_size == rollout.tensor_model_parallel_size
    assert ranks(ours) == resolved.trainer.nnodes * resolved.trainer.n_gpus_per_node
    size = ModelSize.from_config(model_config(resolved).hf_config)
    plan = estimate(size, ours, device="cuda", gpu_memory_bytes=UNKNOWN_GPU_BYTES)
    assert plan.peak[1] <= UNKNOWN_GPU_BYTES, "\n".join(plan.table())
    assert plan.kv_tokens >= data.max_prompt_length + data.max_response_length


@pytest.mark.parametrize("start", STARTS)
def test_the_agent_loop_takes_any_tokenizer(resolved: Any) -> None:
    """Also one without the special tokens of the model's family, such as the quickstart's."""
    import hydra
    from verl.experimental.agent_loop import agent_loop as loops
    from verl.utils.dataset.rl_dataset import RLHFDataset

    model = model_config(resolved)
    loop = hydra.utils.instantiate(
        config=loops._agent_loop_registry[
            resolved.actor_rollout_ref.rollout.agent.default_agent_loop
        ],
        trainer_config=loops.DictConfigWrap(config=resolved),
        server_manager=None,
        tokenizer=model.tokenizer,
        processor=None,
        hf_model_type=model.hf_config.model_type,
        dataset_cls=RLHFDataset,
        data_config=loops.DictConfigWrap(resolved.data),
        tools=loops.ToolListWrap([]),
    )
    assert type(loop).__module__ == "qarl.verl.agent_loop"
