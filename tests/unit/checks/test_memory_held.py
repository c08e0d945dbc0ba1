"""The memory estimate against what transformers, autograd, the kernels, the optimizer and a checkpoint really hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkout import ROOT
from contract_checks import stand_in_for_vllm
from live_bytes import LiveBytes
from memory_cases import FAMILIES, parts, run, tiny
from random_models import save_random_model
from torch import nn

from benchmarks.proofs.counting import counting
from benchmarks.proofs.shard_costs import stack_shapes, wire
from qarl.align import align_model
from qarl.checkpoint.model_files import ModelFiles
from qarl.checkpoint.resumable import save_checkpoint
from qarl.checks.block_arithmetic import block_arithmetic
from qarl.checks.memory import checkpoint_bytes, estimate
from qarl.checks.memory_parts import adapter_parameters
from qarl.checks.model_size import ModelSize
from qarl.config.level import Level
from qarl.kernels.cpu.torch_linears import (
    CpuW4A8Linear,
    DequantizedW4A16Linear,
    TorchFP8Linear,
    TorchInt8Linear,
    _fp32_matmul_equals_scaled_mm,
)
from qarl.kernels.cpu.vllm_linears import VllmCpuWNA16Linear
from qarl.kernels.experts import LowBitExperts, TritonExperts, fused_experts
from qarl.kernels.reference import ReferenceW4A16Linear
from qarl.kernels.triton.linears import TritonW4A16Linear
from qarl.lora.layers import target_linears
from qarl.process import vllm_without_device
from qarl.quant.quantize import quantize
from qarl.quant.wire_specs import wire_specs
from qarl.schemes import get_scheme, scheme_names
from qarl.trainer.master_optimizer import MasterOptimizer

MODELS = sorted((ROOT / "qarl" / "bench" / "models").glob("*/config.json"))


def meta(config: Any) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_linears_are_those_of_transformers(family: str) -> None:
    config = tiny(family)
    size, model = ModelSize.from_config(config), meta(config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    linears = {
        n: (m.out_features, m.in_features)
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }
    assert {n: shape for n, shape in size.linears().items() if ".experts." not in n} == {
        n: shape for n, shape in linears.items() if n != "lm_head"
    }
    stacked = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert sum(n * k for name, (n, k) in size.linears().items() if ".experts." in name) == stacked


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "o_proj"]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_counted_as_they_are_made(family: str, targets: Any) -> None:
    config = tiny(family)
    made = target_linears(meta(config), targets)
    counted = adapter_parameters(
        ModelSize.from_config(config), run(lora__r=8, lora__target_modules=targets)
    )
    assert counted == 8 * sum(map(sum, made.values())) > 0


@pytest.mark.parametrize("path", MODELS, ids=[path.parent.name for path in MODELS])
def test_public_models_are_counted_as_transformers_counts_them(path: Path) -> None:
    model = meta(transformers.AutoConfig.from_pretrained(path.parent))
    assert ModelSize.from_config(json.loads(path.read_text())).parameters == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("scheme", scheme_names())
def test_bytes_on_the_wire_are_the_schemes(scheme: str) -> None:
    for n, k in ((64, 96), (40, 128)):
        tensors = wire_specs(get_scheme(scheme, group_size=32), n, k)
        real = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values())
        assert get_scheme(scheme, 32).wire_bytes(n, k) == real


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        ("w4a16", ReferenceW4A16Linear),
        ("w4a16", VllmCpuWNA16Linear),
        ("w4a16", DequantizedW4A16Linear),
        ("w4a16", TritonW4A16Linear),
        ("w4a8", CpuW4A8Linear),
        ("w8a8", TorchInt8Linear),
        ("fp8", TorchFP8Linear),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_bytes_that_kernels_prepare(scheme: str, kernel: Any) -> None:
    weight = torch.randn(96, 128, dtype=torch.bfloat16)
    prepared = kernel.prepare(quantize(weight, get_scheme(scheme, group_size=32), name="w").tensors)
    tensors = [prepared] if isinstance(prepared, torch.Tensor) else list(prepared)
    size = sum(t.nbytes for t in tensors)
    if kernel is TorchFP8Linear and not _fp32_matmul_equals_scaled_mm(weight.shape[1]):
        size += (
            3 * weight.numel()
        )  # kept as e4m3 where FP32 sums have other bits: less than is counted
    assert kernel.prepared_bytes(get_scheme(scheme, 32), (96, 128)) == size


@pytest.mark.parametrize(
    ("level", "device"), [*((level, "cpu") for level in Level), (Level.MODEL, "cuda")]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3, tied"])
def test_activations_are_what_autograd_keeps(
    monkeypatch: pytest.MonkeyPatch, family: str, level: Level, device: str
) -> None:
    """Bytes of one row; the difference of three layers and one layer leaves out what is not in the blocks."""
    if level == Level.MODEL:  # on a CPU it is `exact`, if the engine's operator can be called
        monkeypatch.setattr(
            "qarl.align.applied_level.exact_unavailable", lambda *_: "without the operator"
        )
    saved = []
    for layers in (1, 3):
        config = tiny(family)
        config.num_hidden_layers = layers
        config.layer_types = ["full_attention"] * layers
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        if device == "cuda" and (why_not := vllm_without_device()):
            pytest.skip(f"vLLM's table of cosines: {why_not}")
        stand_in_for_vllm(monkeypatch)  # PyTorch stands for the GPU's operators
        if align_model(model, level, device=torch.device(device)).level != level:
            pytest.skip("this machine does not have the level")
        saved.append(saved_bytes(model, torch.zeros(1, 192, dtype=torch.long)))
    arithmetic = block_arithmetic(level, device)
    size = ModelSize.from_config(config)
    assert (saved[1] - saved[0]) / 2 / 192 == size.activation_bytes_per_token(arithmetic)


def saved_bytes(model: nn.Module, input_ids: torch.Tensor) -> int:
    """Storage that the graph of the decoder holds, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=input_ids, use_cache=False)
    return sum(storage.nbytes() for storage in storages.values())


EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "hidden_size": 256,
}


@pytest.mark.parametrize("scheme", ["off", "w4a16", "w8a8", "fp8"])
def test_rows_of_the_experts_are_what_their_backward_holds(scheme: str) -> None:
    """All but indices and scales, 56 bytes a row, and x in 8 bits. At `off` what autograd saved is alive too."""
    config, tokens = tiny("qwen3-moe"), 512
    config.update(EXPERTS)
    size = ModelSize.from_config(config)
    planned = run(
        backend="verl",
        quant__scheme="w4a16" if scheme == "off" else scheme,
        actor__use_dynamic_bsz=True,
        actor__ppo_max_token_len_per_gpu=tokens,
        actor__ppo_micro_batch_size_per_gpu=None,
        actor__log_prob_micro_batch_size_per_gpu=None,
    )
    level = Level.OFF if scheme == "off" else Level.LINEARS
    estimated = parts(estimate(size, planned, device="cuda", level=level))[
        "rows of a layer's experts"
    ]
    if scheme == "off":
        peak, estimated = (
            peak_of_transformers(config, tokens),
            estimated + tokens * size.expert_row_bytes,
        )
    else:
        peak = (
            peak_of_ours(size, scheme, tokens) - 2 * 8 * 3 * 128 * 256
        )  # less the stacks' gradients, another part
    assert (
        estimated
        <= peak
        <= estimated + 4 * tokens * 56 + tokens * 256 * (scheme in ("w8a8", "fp8"))
    )
    saved = [
        parts(estimate(size, planned, device="cuda", level=to))["activations, update"]
        for to in (Level.OFF, level)
    ]
    assert saved[0] - saved[1] == (0 if level is Level.OFF else 4 * tokens * size.expert_row_bytes)


def peak_of_ours(size: ModelSize, scheme_name: str, tokens: int) -> int:
    scheme = get_scheme(scheme_name, 128)
    with torch.device("meta"):
        x = torch.empty(tokens, size.hidden, dtype=torch.bfloat16, requires_grad=True)
        weights, ids = (
            torch.empty(tokens, 4, requires_grad=True),
            torch.empty(tokens, 4, dtype=torch.int64),
        )
        stacks = [
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in stack_shapes(size)
        ]
    with counting():
        wires = [wire(tuple(stack.shape), scheme) for stack in stacks]
        experts = LowBitExperts.of(TritonExperts, *wires, operands=scheme.operands)
        y = fused_experts(x, weights, ids, *stacks, experts)
    grad = torch.empty_like(y)
    with counting(), LiveBytes() as live:
        y.backward(grad)
    return live.peak


def peak_of_transformers(config: Any, tokens: int) -> int:
    config._experts_implementation = "grouped_mm"
    experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config).bfloat16()
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = (
        torch.rand(tokens, 4).bfloat16().requires_grad_(),
        torch.rand(tokens, 8).topk(4).indices,
    )
    with LiveBytes() as forward:
        y = experts(x, ids, weights)
    grad = torch.empty_like(y)
    with LiveBytes(forward) as live:
        y.backward(grad)
    return live.peak


@pytest.mark.parametrize(("name", "master"), [("adamw", "fp32"), ("muon", "bf16")])
def test_a_checkpoint_is_as_large_as_its_folder(tmp_path: Path, name: str, master: str) -> None:
    config = run(optim__name=name, optim__master_dtype=master)
    source = save_random_model(tmp_path / "source", vocab_size=2048, tie=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    optimizer = MasterOptimizer(
        model.named_parameters(), config.optim, seed=0, total_training_steps=1
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate()
    optimizer.step()
    save_checkpoint(
        tmp_path / "step_1",
        files=ModelFiles.of(model, transformers.AutoTokenizer.from_pretrained(source)),
        weights=[
            (key, tensor) for key, tensor in model.state_dict().items() if key != "lm_head.weight"
        ],
        optimizer=optimizer.state_dict(),
        rng={},
        state={},
    )
    files = ("model.safetensors", "optimizer.pt")
    real = sum((tmp_path / "step_1" / file).stat().st_size for file in files)
    expected = checkpoint_bytes(ModelSize.from_config(model.config), config)["resumable"]
    assert 0 < real - expected < 40_000, "headers of the files are all that is not counted"
    assert expected > 1_500_000
