"""The proof `costs`: what counts, by hand; and that nothing of a layer of experts is done expert by expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.proofs.counting import Counts, counting
from benchmarks.proofs.layer_costs import (
    ENGINE_LAUNCHES,
    beyond_products,
    dense_phases,
    expert_phases,
    own_forward_phase,
)
from benchmarks.proofs.shard_costs import (
    gather_phase,
    optimizer_phase,
    publish_phase,
    quantize_phase,
    receive_phase,
    shard_shapes,
    wire,
)
from qarl.bench.model import find_model
from qarl.bench.plan import traffic
from qarl.checks.model_size import ModelSize
from qarl.kernels.triton.quantize import dequantize_rows
from qarl.schemes import engine_scheme_names, get_scheme

SIZE = ModelSize(layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=100, experts=8,
                 experts_per_token=2, moe_intermediate=128, sparse_layers=(0, 1))  # fmt: skip


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda: gpu(3, 4) + gpu(3, 4), Counts(kernels=1, moved=3 * 48)),
        (lambda: gpu(4).expand(3, 4) + 1, Counts(kernels=1, moved=16 + 48)),
        (
            lambda: gpu(3, 4).t().reshape(2, 6)[0].unsqueeze(0),
            Counts(kernels=1, moved=2 * 48),
        ),  # reshape copies
        (lambda: gpu(3, 4).view(2, 6)[0].detach(), Counts()),
        (lambda: gpu(100, 4)[gpu(2, dtype=torch.int64)], Counts(kernels=1, moved=2 * 32 + 16)),
        (lambda: gpu(3).fill_(1.0), Counts(kernels=1, moved=12)),
        (lambda: gpu(3).copy_(gpu(3)), Counts(kernels=1, moved=24)),
        (lambda: gpu(3).sum().item(), Counts(kernels=1, syncs=1, moved=16)),
        (lambda: gpu(3).cpu(), Counts(copies=1, syncs=1)),
        (lambda: gpu(3).tolist(), Counts(copies=1, syncs=1)),
        (lambda: torch.ones(3).to("meta", non_blocking=True), Counts(copies=1)),
        (lambda: gpu(3).copy_(torch.ones(3)), Counts(copies=1, syncs=1)),
        (lambda: torch.ones(3) + 1, Counts()),
        (
            lambda: dequantize_rows(gpu(4, 8, dtype=torch.int8), gpu(4, 1)),
            Counts(kernels=1, moved=4 * 8 + 16 + 2 * 32),
        ),
    ],
)
def test_counts_by_hand(what, expected):
    with counting() as counter:
        what()
    assert counter.counts == expected, counter.names


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_a_step_of_the_experts_of_qwen3_30b(scheme):
    """On 8 ranks. Nothing is repacked in a forward, a block that ends with experts does not run their kernel again, and
    the host reads nothing."""
    size = find_model("Qwen3-30B-A3B").size
    few, many = (
        {
            phase.name: phase
            for phase in (
                *expert_phases(replace(size, experts=experts), scheme, 128, 22528),
                quantize_phase(replace(size, experts=experts), scheme, 128, 8),
                gather_phase(replace(size, experts=experts), scheme, 128, 8),
            )
        }
        for experts in (16, 128)
    )
    for name, phase in many.items():
        assert (
            phase.kernels == few[name].kernels
            and not phase.counts.syncs
            and not phase.counts.copies
        ), name
    launched = [name for name, _ in ENGINE_LAUNCHES[scheme]]
    assert many["forward"].kernels == ("_to_copy", *launched) and not many["recompute"].kernels
    assert len(many["forward"].kernels) + len(many["backward"].kernels) <= 27
    copies = [name for name in many["backward"].kernels if name.startswith("dequantize_")]
    inputs = scheme != "w4a16"  # x in BF16, for the gradient of gate_up
    assert len(copies) == 2 + inputs, "one BF16 copy of each stack"
    assert many["backward"].counts.moved / many["backward"].least <= 1.5
    tensors = [wire(shape, get_scheme(scheme, 128)).values() for shape in shard_shapes(size, 1)]
    assert many["gather"].least == sum(tensor.nbytes for each in tensors for tensor in each), (
        "one layout is gathered"
    )


@pytest.mark.parametrize("tokens", [256, 22528])
@pytest.mark.parametrize(("scheme", "kernels"), [("w4a16", 5), ("w8a8", 9), ("fp8", 9)])
def test_the_own_forward_of_the_experts_of_qwen3_30b(scheme, kernels, tokens):
    """`quant.kernels=qarl`, in a decode step and in a micro-batch of the trainer."""
    phase = own_forward_phase(find_model("Qwen3-30B-A3B").size, scheme, 128, tokens)
    assert len(phase.kernels) == kernels, phase.kernels
    assert not phase.counts.syncs and not phase.counts.copies
    if scheme == "w4a16":
        assert phase.counts.moved / phase.least < 1.02, "no copy of a weight or of a row"


def test_dense_products_need_little_more_than_their_operands():
    forward, backward = dense_phases(SIZE, "w4a16", 128, 4096)
    assert forward.counts.kernels == 2 * len(
        [n for n in SIZE.block_linears(0) if ".experts." not in n]
    )
    for phase in (forward, backward):
        assert 1 <= phase.counts.moved / phase.least < 1.2 and not phase.counts.syncs


@pytest.mark.parametrize("scheme", engine_scheme_names())
def test_a_publish_costs_as_much_with_any_number_of_experts(scheme):
    """Qwen3-30B-A3B. The host reads once, at the end of a publish. W4A16 stacks are permuted in nine passes."""
    size = find_model("Qwen3-30B-A3B").size
    for phase in (publish_phase, receive_phase):
        few, many = (phase(replace(size, experts=experts), scheme, 128) for experts in (16, 128))
        assert few.kernels == many.kernels and len(many.kernels) <= 40, many.kernels
        waits = [name for name in many.kernels if name in ("_local_scalar_dense", "copy")]
        assert many.counts.syncs == 1 and many.kernels[-1] in waits  # other copies do not wait
        permuted = scheme == "w4a16" and phase is receive_phase
        assert many.counts.moved / many.least < (4 if permuted else 1.1)


@pytest.mark.parametrize("scheme", engine_scheme_names())
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3-8B", "Qwen2.5-Math-7B"])
def test_the_plan_has_formulas_of_the_counts(model: str, scheme: str) -> None:
    size = find_model(model).size
    assert traffic.beyond_products(size, get_scheme(scheme), 22528) == pytest.approx(
        beyond_products(size, scheme, 22528), rel=0.01
    )
    phase, weights = optimizer_phase(size, 8)
    assert traffic.muon_bytes_per_weight(size) == pytest.approx(
        phase.counts.moved / weights, rel=1e-3
    )
