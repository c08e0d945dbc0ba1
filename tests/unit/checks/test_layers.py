"""Layers that the scheme or the engine cannot have: the rules against vLLM's own code, and splits over workers."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from bad_runs import refuses
from checkout import ROOT
from cpu_features import needs_vllm_cpu

from qarl.checks import layers
from qarl.checks.layers import KEY, split_errors
from qarl.checks.memory import KV_BLOCK, check_kv_cache
from qarl.checks.model_folder import load_hf_config
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.errors import UserError
from qarl.process import configure_vllm_process
from qarl.quant import convert
from qarl.schemes import get_scheme


@needs_vllm_cpu
def test_the_kv_cache_is_counted_as_vllm_counts_it(startable_run: Path) -> None:
    """As vLLM 0.29 counts it. 0.24 did not count the block that it keeps free."""
    configure_vllm_process()
    from vllm.v1.core.kv_cache_utils import check_enough_kv_cache_memory
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = ModelSize.from_config(load_hf_config("model"))
    spec = FullAttentionSpec(
        block_size=KV_BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    specs = {f"layer{i}": spec for i in range(2)}
    for response in (1, 112, 113, 300):
        vllm_config = fake_vllm_config(16 + response)
        for size in range(1, 6 * len(specs) * spec.page_size_bytes, 8191):
            gib = f"rollout.cpu_kvcache_space_gib={size / 2**30!r}"
            config = load_config(["config=run.yaml", f"data.max_response_length={response}", gib])
            vllm_check = functools.partial(check_enough_kv_cache_memory, vllm_config, specs, size)
            qarl_check = functools.partial(check_kv_cache, config, model)
            assert refuses(qarl_check, UserError) == refuses(vllm_check, ValueError)


def fake_vllm_config(max_model_len: int) -> Any:
    """The attributes that vLLM's count of a cache reads."""
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(block_size=KV_BLOCK, num_gpu_blocks_override=None),
    )


def test_the_checks_refuse_what_vllm_refuses() -> None:
    """Fused layers as vLLM fuses them, ignore lists it cannot follow, sizes its kernel for CPUs cannot take."""
    configure_vllm_process()
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.platforms import current_platform

    fused_layers = {fused: list(parts) for fused, parts in layers.FUSED_LAYERS.items()}
    for family in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM):
        assert family.packed_modules_mapping == fused_layers

    parts = [f"model.layers.0.self_attn.{part}" for part in fused_layers["qkv_proj"]]
    for count in range(4):
        for ignore in itertools.combinations(parts, count):
            engine = functools.partial(
                should_ignore_layer,
                "model.layers.0.self_attn.qkv_proj",
                ignore,
                fused_mapping=fused_layers,
            )
            ours = functools.partial(layers.check_fused_layers, parts, ignore)
            assert refuses(ours, UserError) == refuses(engine, ValueError), ignore

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernel for CPUs answers on a CPU only")
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearLayerConfig,
    )
    from vllm.scalar_type import scalar_types

    for n, k in itertools.product((16, 32, 40, 64, 96), repeat=2):
        layer = MPLinearLayerConfig(
            (k, n), (k, n), scalar_types.uint4b8, torch.bfloat16, 8, False, False
        )
        ours = functools.partial(
            layers.check_engine_shapes, get_scheme("w4a16"), {"down_proj": (n, k)}
        )
        assert refuses(ours, UserError) != CPUWNA16LinearKernel.can_implement(layer)[0], (n, k)


def test_layers_are_named_by_ranges_of_their_numbers() -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5, 11, 10)] + ["score"]
    assert layers.name_layers(names) == "model.layers.0-2,5,10-11.mlp.up_proj, score"


# Models that are split over the workers of an engine.

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 128,
    "intermediate_size": 512,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DENSE, MOE, SHARED = (
    transformers.Qwen3Config,
    transformers.Qwen3MoeConfig,
    transformers.Qwen2MoeConfig,
)


def config(workers: int, group: int = 128, **changes: Any) -> Config:
    keys = {
        "quant.group_size": group,
        "trainer.n_gpus_per_node": 4,
        KEY: workers,
        "quant.ignore": '[lm_head, "re:.*gate$"]',
    }
    overrides = [f"{key}={value}" for key, value in {**keys, **changes}.items()]
    return load_config([f"config={ROOT / 'configs/quickstart.yaml'}", "backend=verl", *overrides])


ROWS = [
    # A matrix that is split along its inputs; the size that cuts a group of it; the layers that the error names.
    (
        DENSE,
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        "layers.0.self_attn.o_proj",
    ),  # 192 / 2 = 96
    (DENSE, {"intermediate_size": 384}, "layers.0.mlp.down_proj"),  # 192 for each of two
    (
        SHARED,
        EXPERTS | {"shared_expert_intermediate_size": 384},
        "layers.0.mlp.shared_expert.down_proj",
    ),
    (SHARED, EXPERTS | {"moe_intermediate_size": 384}, "layers.0.mlp.experts.*.down_proj"),
]


def problems(config: Config, model: Any) -> list[UserError]:
    shapes = convert.linear_shapes(layers.meta_model(model))
    scheme = get_scheme(config.quant.scheme, group_size=config.quant.group_size)
    quantized = (
        layers.select_shapes(shapes, scheme, config.quant.ignore) if scheme.quantized else {}
    )
    return list(split_errors(config, model, quantized))


@pytest.mark.parametrize(("kind", "sizes", "layer"), ROWS)
def test_a_group_of_two_workers_is_refused_by_name(
    kind: Any, sizes: dict[str, Any], layer: str
) -> None:
    model = kind(**{**SIZES, **sizes})
    group = 64 if "num_attention_heads" in sizes else 128
    (error,) = problems(config(2, group), model)
    assert "cannot be split along their inputs" in error.what and f"{KEY}=2" in error.what
    assert error.where == f"model.{layer}" and f"group_size={group}" in (error.why or "")
    assert problems(config(2, group, **{"quant.scheme": "fp8"}), model) == []
    assert problems(config(2, 32), model) == problems(config(1, group), model) == []


def test_ranks_and_heads_that_do_not_split_are_refused() -> None:
    model = DENSE(**{**SIZES, "num_attention_heads": 12})
    ranks, heads = problems(config(8, 32, **{"trainer.nnodes": 3, "quant.scheme": "fp8"}), model)
    assert "12 ranks cannot be divided into engines of 8 workers" in ranks.what
    assert "12 attention heads do not split" in heads.what
