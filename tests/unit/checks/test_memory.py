"""The memory estimate: numbers worked by hand, what the options change, and the table.

test_memory_held.py compares it with what transformers, autograd and the optimizer really hold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import load_model
from memory_cases import FAMILIES, SIZES, SMALL, parts, run
from random_models import save_random_model

from qarl.checks import memory
from qarl.checks.activation_memory import LOGITS_AT_A_TIME, LOGITS_IN_FP32
from qarl.checks.check import RunInputs
from qarl.checks.engine_memory import (
    ENGINE_ASLEEP_BYTES,
    ENGINE_GROUP_BYTES,
    ENGINE_WORKSPACE_BYTES,
)
from qarl.checks.memory import OFFLOAD, RUNTIME_BYTES, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_size import ModelSize
from qarl.kernels.cpu.vllm_linears import VllmCpuWNA16Linear
from qarl.quant.experts import QuantExperts
from qarl.quant.state_dict import low_bit_layers

PACKED = 2 * 2 * 6400
"""Bytes of vLLM's packed copies of SMALL's embedding and lm_head on a CPU."""


def test_a_token_in_the_kv_cache_by_hand() -> None:
    """Two layers, 2 heads of 16, 2 bytes; one head on each of two GPUs, and still one on each of four."""
    assert [SMALL.kv_bytes_per_token(tp) for tp in (1, 2, 4)] == [256, 128, 128]


def test_the_local_trainer_by_hand() -> None:
    shapes = set(SMALL.linears().values())
    memory = estimate(SMALL, run(), device="cpu", kernels=dict.fromkeys(shapes, VllmCpuWNA16Linear))
    # Weight, scales and shape: q, o 2048 + 256 + 16; k, v 1024 + 128 + 16; gate, up, down 3072 + 384 + 16.
    wire = 2 * (2 * 2320 + 2 * 1168 + 3 * 3472)
    assert parts(memory) == {
        "weights, BF16": 149120,
        "FP32 masters": 298240,
        "adamw state, FP32": 596480,
        "FP32 gradient sums": 298240,
        "BF16 gradients of a micro-batch": 149120,
        "low-bit tensors": wire,
        "low-bit tensors in the kernels' layout": wire - 14 * 16,
        "dequantized weights for the backward, BF16": 122880,
        # 12 * 64 + 8 (norms), 4 * 128 (q, k, v in FP32), 6 * 64 + 16 (attention), 8 * 16 (rotary), 8 * 96 (MLP) a token
        "activations, log-probs": 4 * 20 * 2584,
        "logits, log-probs": 4 * 12 * 100 * (2 + 12),
        "activations, update": 2 * 20 * 2 * 2584,
        "logits, update": 2 * 12 * 100 * (4 + 12),
        "vLLM: weights": wire + 2 * 320 + 2 * 12800 + PACKED,
        "vLLM: KV cache": GIB // 2,
        "vLLM: workspace (allowance)": ENGINE_WORKSPACE_BYTES,
        "libraries and runtime (allowance)": RUNTIME_BYTES,
    }
    assert wire == 34784
    assert memory.kv_tokens == 2**29 // 256
    rollout = (
        149120
        + 298240
        + 596480
        + 2 * wire
        - 224
        + (wire + 26240 + PACKED)
        + 2**29
        + 2**30
        + RUNTIME_BYTES
    )
    assert memory.total("rollout") == rollout
    update = rollout + 298240 + 149120 + 122880 + 206720 + 38400
    assert memory.total("update") == update
    assert memory.peak == ("update", update)


def test_the_local_engine_sleeps_on_a_gpu() -> None:
    """It gives back its memory after the rollout, and its weights lie in host memory; the key keeps it awake."""
    wire, gpu = 34784 + 2 * 320 + 2 * 12800, {"device": "cuda", "gpu_memory_bytes": 2**33}
    awake = estimate(SMALL, run(rollout__free_cache_engine=False), **gpu)
    memory = estimate(SMALL, run(), **gpu)
    share = 2**32
    assert awake.total("rollout") == memory.total("rollout")
    for phase in ("old_log_prob", "update", "step"):
        assert awake.total(phase) - memory.total(phase) == share - ENGINE_ASLEEP_BYTES
    host = {part.name: part.bytes for part in memory.host}
    assert host.pop("vLLM's weights while it sleeps") == wire
    assert host == {part.name: part.bytes for part in awake.host}


def test_an_engine_with_a_gpu_of_its_own_takes_none_of_the_trainers() -> None:
    """All other parts, and the KV cache, are those of an engine that stays awake beside the trainer."""
    gpu = {"device": "cuda", "gpu_memory_bytes": 2**33}
    keys = {"backend": "verl", "rollout__free_cache_engine": False}
    beside = estimate(SMALL, run(**keys), **gpu)
    own = estimate(SMALL, run(**keys, trainer__staleness=1), **gpu)
    assert parts(own) == {k: v for k, v in parts(beside).items() if not k.startswith("vLLM")}
    assert parts(own) != parts(beside) and own.kv_cache == beside.kv_cache
    on_cpu = [estimate(SMALL, run(**keys, trainer__staleness=n), device="cpu") for n in (0, 1)]
    assert parts(on_cpu[0]) == parts(on_cpu[1])  # the processes share the machine's memory


FEW_TOKENS = {"rollout__max_num_batched_tokens": 12, "rollout__max_num_seqs": 12}
OPTIONS = [
    ({"optim__master_dtype": "bf16"}, "update of one parameter", 16 * 6400),  # an embedding
    ({"optim__master_dtype": "bf16"}, "FP32 masters", None),
    ({"optim__name": "muon"}, "muon state, FP32", 4 * 61440 + 8 * (74560 - 61440)),
    ({"quant__scheme": "bf16"}, "vLLM: weights", 149120 + PACKED),
    ({"quant__align": "off"}, "low-bit tensors", None),
    (
        {"quant__align": "off"},
        "activations, update",
        2 * 20 * 2 * 2200,
    ),  # 16 * 64 + 8, 2 * 128, 2 * 64 + 16, 8 * 96
    ({"model__gradient_checkpointing": True}, "activations, update", 2 * 20 * (2 * 64 * 4 + 2584)),
    ({"quant__ignore": ["lm_head", "re:.*mlp"]}, "low-bit tensors", 2 * (2 * 2320 + 2 * 1168)),
    # An adapter of r on [N, K] has r (N + K) weights: 928 r in each of two layers.
    ({"lora__r": 8}, "FP32 masters", 4 * 14848),
    ({"lora__r": 8}, "adamw state, FP32", 8 * 14848),
    ({"lora__r": 8, "optim__name": "muon"}, "muon state, FP32", 4 * 14848),
    ({"lora__r": 8, "optim__name": "muon"}, "update of one parameter", 16 * 8 * 96),
    ({"lora__r": 8}, "vLLM: A and B, gathered", 4096 * 8 * 6 * 96),
    ({"lora__r": 8, **FEW_TOKENS}, "vLLM: A and B, gathered", 20 * 8 * 6 * 96),  # a whole row
    (
        {"lora__r": 8, "lora__target_modules": ["q_proj"]},
        "vLLM: A and B, gathered",
        4096 * 8 * 6 * 64,
    ),
    ({}, "vLLM: A and B, gathered", None),
    # At first vLLM has the base, too: 34784 and 26240 bytes, in place of 20 * 6 * 96 of A.
    (
        {"lora__r": 1, **FEW_TOKENS},
        "vLLM: second copy of the base, at the start",
        34784 + 26240 - 11520,
    ),
    ({"lora__r": 8, **FEW_TOKENS}, "vLLM: second copy of the base, at the start", None),
    ({**FEW_TOKENS}, "vLLM: second copy of the base, at the start", None),
    ({"lora__r": 8}, "FP32 gradient sums", 4 * 14848),
    ({"lora__r": 8}, "BF16 gradients of a micro-batch", 2 * 14848),
    ({"lora__r": 8}, "weights, BF16", 2 * (74560 - 61440 + 14848)),
    ({"lora__r": 8, "quant__scheme": "bf16"}, "weights, BF16", 2 * (74560 + 14848)),
    ({"lora__r": 8}, "dequantized weight of one layer, BF16", 2 * 96 * 64),
    (
        {"lora__r": 8},
        "vLLM: weights",
        PACKED + 2 * 14848,
    ),  # the base is the trainer's, unless vLLM packs it
    ({"lora__r": 8, "quant__scheme": "fp8"}, "vLLM: weights", PACKED + 2 * 14848),
    (
        {"lora__r": 8, "quant__scheme": "w8a8"},
        "vLLM: weights",
        61440 + 4 * 896 + PACKED + 2 * 14848,
    ),
    ({"lora__r": 8, "quant__scheme": "bf16"}, "vLLM: weights", 2 * 61440 + PACKED + 2 * 14848),
    (
        {"lora__r": 8, "quant__kernels": "dequantized"},
        "vLLM: weights",
        2 * 61440 + PACKED + 2 * 14848,
    ),
    ({"lora__r": 8, "lora__target_modules": ["q_proj"]}, "FP32 masters", 4 * 2 * 8 * 128),
    (
        {},
        "low-bit tensors in the kernels' layout",
        None,
    ),  # without a kernel: one that reads what is published
]


@needs_w4a16_cpu
@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_copies_in_the_kernels_layout_are_those_of_a_model_with_experts(
    scheme: str, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path, "qwen3_moe")
    ignore = ["lm_head", "re:.*mlp[.]gate$"]
    config = run(
        model__path=str(folder), quant__scheme=scheme, quant__group_size=32, quant__ignore=ignore
    )
    inputs = RunInputs(config, plan=True)
    model = load_model(folder, scheme=inputs.scheme)
    held = 0
    for layer in low_bit_layers(model).values():
        layer.make_ready()
        if isinstance(layer, QuantExperts):
            products = layer.low_bit().prepared
            if products[0].experts[0].weight.dtype == torch.float8_e4m3fn:
                pytest.skip("this CPU multiplies FP8 without a copy in FP32")
            held += sum(
                tensor.nbytes
                for product in products
                for weight in product.experts
                for tensor in weight
            )
        else:
            held += sum(tensor.nbytes for tensor in layer.prepared)
    plan = parts(estimate(inputs.size, config, device="cpu", kernels=inputs.trainer_kernels))
    assert plan["low-bit tensors in the kernels' layout"] == held


def test_a_frozen_base_is_there_once_and_a_layer_in_two_layouts() -> None:
    """gate of SMALL: 96 * 64 / 2 bytes of codes and 384 of scales. Each matrix of 4 experts: 1024, 128 and 16."""
    family, changes = FAMILIES["qwen3-moe"]
    experts = ModelSize.from_config(family(**SIZES | changes))
    for size, expected in ((SMALL, 3456), (experts, 4 * 3 * 1168)):
        kernels = dict.fromkeys(size.linears().values(), VllmCpuWNA16Linear)
        sizes = parts(estimate(size, run(lora__r=8), device="cpu", kernels=kernels))
        assert sizes["a layer in another layout"] == expected


@pytest.mark.parametrize(("changes", "part", "size"), OPTIONS)
def test_what_the_options_change(changes: dict[str, Any], part: str, size: int | None) -> None:
    assert parts(estimate(SMALL, run(**changes), device="cpu")).get(part) == size


def test_adapters_under_fsdp2_by_hand() -> None:
    """The low-bit base is whole on every rank. Sharded are the adapters, 14848 weights, and 13120 frozen ones."""
    config = run(backend="verl", trainer__n_gpus_per_node=2, lora__r=8)
    sharded = parts(estimate(SMALL, config, device="cpu"))
    assert sharded["frozen BF16 weights, sharded"] == 74560 - 61440
    assert sharded["FP32 masters, sharded"] == sharded["FP32 gradients, sharded"] == 2 * 14848
    assert sharded["adamw state, FP32"] == 4 * 14848
    assert sharded["low-bit tensors"] == 34784
    assert sharded["gathered blocks (two)"] == 4 * 7424
    assert sharded["gradients of a block, BF16 and FP32"] == 8 * 7424
    assert sharded["update of one parameter"] == 16 * 8 * 96 // 2
    assert sharded["vLLM: A and B, gathered"] == 8192 * 8 * 6 * 96
    wide = parts(
        estimate(
            replace(SMALL, intermediate=256),
            run(lora__r=8, lora__target_modules=["up_proj"]),
            device="cpu",
        )
    )
    assert wide["vLLM: A and B, gathered"] == 4096 * 8 * 2 * 256, "B is larger than A in FP32"


def test_one_micro_batch_sums_no_gradients_while_activations_live() -> None:
    whole = estimate(SMALL, run(actor__ppo_micro_batch_size_per_gpu=12), device="cpu")
    assert [part.phases for part in whole.parts if part.name == "FP32 gradient sums"] == [("step",)]


def test_sharded_by_hand() -> None:
    config = run(
        backend="verl",
        trainer__n_gpus_per_node=2,
        trainer__nnodes=2,
        rollout__tensor_model_parallel_size=2,
    )
    memory = estimate(SMALL, config, device="cuda", gpu_memory_bytes=8 * GIB)
    weights = (34784 + 640 + 25600) // 2
    assert memory.kv_cache == 4 * GIB - weights - ENGINE_WORKSPACE_BYTES
    sharded = parts(memory)
    assert sharded["vLLM: weights"] == weights
    assert sharded["FP32 masters, sharded"] == 74560
    assert sharded["adamw state, FP32"] == 149120
    assert sharded["FP32 gradients, sharded"] == 74560
    assert sharded["low-bit tensors, sharded"] == 34784 // 4
    assert sharded["gathered blocks (two)"] == 34784  # the model has two
    assert sharded["embeddings and lm_head, gathered in BF16"] == 2 * 12800
    assert sharded["gradients of a block and of lm_head, BF16"] == 2 * 30720 + 2 * 6400
    assert sharded["a block's reduce-scatter, FP32"] == 4 * 30720 + 30720
    assert sharded["dequantized weight of one layer, BF16"] == 2 * 96 * 64
    assert sharded["logits, log-probs"] == (2 + 12) * 4 * 12 * 100
    assert sharded["logits, update"] == (4 + 12) * 2 * 12 * 100
    capped = replace(SMALL, plain_head=False)  # of prompt and response
    whole = parts(estimate(capped, config, device="cuda", gpu_memory_bytes=8 * GIB))
    assert whole["logits, log-probs"] == 8 * 4 * 20 * 100
    assert whole["logits, update"] == 14 * 2 * 20 * 100
    resident = 74560 + 149120 + 34784 // 4 + RUNTIME_BYTES
    assert memory.total("rollout") == resident + 4 * GIB  # vLLM's whole share
    asleep = ENGINE_ASLEEP_BYTES + ENGINE_GROUP_BYTES  # the engine's model is on two GPUs
    assert memory.total("step") == resident + 74560 + 16 * 6400 // 4 + asleep
    assert (
        estimate(SMALL, config, device="cpu").total("step") > resident + GIB // 2
    )  # on CPU it does not
    config = config.model_copy(update={"verl": dict.fromkeys(OFFLOAD, True)})
    offloaded = estimate(SMALL, config, device="cuda", gpu_memory_bytes=8 * GIB)
    assert offloaded.total("rollout") == memory.total("rollout") - 74560 - 149120
    assert offloaded.total("old_log_prob") == memory.total("old_log_prob") - 149120
    # verl loads all of it when an update begins
    assert [offloaded.total(phase) - memory.total(phase) for phase in ("update", "step")] == [0, 0]


def test_rows_of_experts_by_hand() -> None:
    """A micro-batch of 40 tokens, 2 experts of 32 for each: 80 rows."""
    moe = replace(SMALL, experts=4, experts_per_token=2, moe_intermediate=32, sparse_layers=(0, 1))
    rows, x = 80, 40 * 2 * 64
    ours = {"w4a16": 6 * 64 + 12 * 32, "w8a8": 7 * 64 + 12 * 32, "fp8": 7 * 64 + 12 * 32}
    for scheme, each in ours.items():
        config = run(quant__scheme=scheme, quant__align="linears")
        assert (
            parts(estimate(moe, config, device="cuda"))["rows of a layer's experts"]
            == rows * each + x
        )
    for changes in (
        {"quant__scheme": "bf16"},
        {"quant__align": "off"},
        {"quant__ignore": ["lm_head", "re:.*experts"]},
    ):
        config = run(**{"quant__align": "linears"} | changes)
        assert (
            parts(estimate(moe, config, device="cuda"))["rows of a layer's experts"]
            == rows * 6 * 64 + x
        )
    assert "rows of a layer's experts" not in parts(estimate(SMALL, run(), device="cuda"))


def test_only_the_backward_of_sharded_int4_experts_has_a_second_layout() -> None:
    moe = replace(SMALL, experts=4, experts_per_token=2, moe_intermediate=32, sparse_layers=(0,))
    for scheme, expected in (
        ("w4a16", 4 * 3 * (64 * 32 // 2 + 2 * 64 * 32 // 32 + 16)),
        ("w8a8", 0),
    ):
        memory = estimate(
            moe, run(backend="verl", quant__scheme=scheme, quant__align="linears"), device="cpu"
        )
        restored = [part for part in memory.parts if part.name == "experts of one layer, restored"]
        assert [(part.bytes, part.phases) for part in restored] == (
            [(expected, ("update",))] if expected else []
        )
    assert "experts of one layer, restored" not in parts(estimate(moe, run(), device="cpu"))


@pytest.mark.parametrize("backend", ["local", "verl"])
def test_many_logits_are_computed_in_blocks(backend: str) -> None:
    """At 2**27 logits: 2 bytes for each, in the update 6 and 4 bytes for each weight of lm_head, and 12 for each logit
    in FP32."""
    changes = {
        "backend": backend,
        "data__max_response_length": 2**21,
        "actor__log_prob_micro_batch_size_per_gpu": 2,
    }
    sizes = parts(estimate(SMALL, run(**changes), device="cpu"))
    in_fp32 = 12 * LOGITS_IN_FP32
    assert sizes["logits, log-probs"] == 2 * LOGITS_AT_A_TIME + in_fp32
    assert sizes["logits, update"] == 6 * LOGITS_AT_A_TIME + in_fp32 + 4 * 6400
    adapters = parts(estimate(SMALL, run(**changes, lora__r=8), device="cpu"))
    assert adapters["logits, update"] == 6 * LOGITS_AT_A_TIME + in_fp32


@pytest.mark.parametrize(("limit", "expected"), [("max", 4096), (str(2**30), 4096), ("3000", 2000)])
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    """Bytes; the machine has 4 KiB, and the container uses 1000."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4096))
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path)
    assert memory.available_memory() == expected
