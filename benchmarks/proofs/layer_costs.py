"""The passes of one decoder layer, run at real sizes on meta tensors, and the least bytes of each.

    forward     the layer's experts by the engine's kernel (`ENGINE_LAUNCHES`), and its dense products by QaRL's. The
                experts are read as FSDP2 gathered them
    own forward the same by QaRL's kernel (`quant.kernels=qarl`), which the engine then runs, too
    recompute   the experts again, at the end of a checkpointed block
    backward    QaRL's own (`qarl.kernels.experts`, `qarl.quant.linear`)

`least` are the bytes that the phase's products cannot avoid: every operand read once, every result written once, and
one pass over each intermediate between two products. `beyond_products` is what `qarl bench plan` adds to a roofline.
Attention is not counted: its intermediate results stay on the chip.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs.counting import Counting, counting
from benchmarks.proofs.shard_costs import (
    ENGINE_KERNELS,
    Phase,
    gather,
    make_shard,
    on_meta,
    stack_shapes,
)
from qarl.bench.model import default_group_size
from qarl.bench.plan.traffic import dense_linears
from qarl.checks.model_size import ModelSize
from qarl.kernels.base import PreparedStacks
from qarl.kernels.cuda.vllm_experts import Experts
from qarl.kernels.experts import TritonExperts, TritonInvariantExperts, fused_experts
from qarl.quant.experts import ExpertsInOneCopy
from qarl.quant.linear import QuantLinear
from qarl.quant.wire_specs import wire_specs
from qarl.schemes import Scheme, get_scheme

ENGINE_LAUNCHES = {
    "w4a16": (
        ("moe_align_block_size", "ids"),
        ("moe_wna16_marlin_gemm", "x gate_up wide"),
        ("silu_and_mul", "wide narrow"),
        ("moe_wna16_marlin_gemm", "narrow down out"),
        ("moe_sum", "out y"),
    ),
    "w8a8": (
        ("quantize", "x x_codes"),
        ("moe_align_block_size", "ids"),
        ("fused_moe", "x gate_up wide"),
        ("silu_and_mul", "wide narrow"),
        ("quantize", "narrow narrow_codes"),
        ("fused_moe", "narrow down out"),
        ("moe_sum", "out y"),
    ),
    "fp8": (
        ("quantize", "x x_codes"),
        ("permute", "x out"),
        ("cutlass_moe_mm", "x gate_up wide"),
        ("silu_and_mul", "wide narrow"),
        ("quantize", "narrow narrow_codes"),
        ("cutlass_moe_mm", "narrow down out"),
        ("unpermute", "out y"),
    ),
}
"""The kernels that vLLM launches for a layer of experts, with their operands (fused_marlin_moe, TritonExperts,
run_cutlass_moe_fp8)."""
_PRODUCTS = ("_grouped_mm", "mm", "addmm", "bmm", "linear")


def passes(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> list[Phase]:
    """Count forward and backward of a layer's dense products and of its experts, if it has any."""
    phases = dense_phases(size, scheme_name, group_size, tokens)
    return phases + (expert_phases(size, scheme_name, group_size, tokens) if size.experts else [])


def expert_phases(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> list[Phase]:
    """Count forward, recomputation and backward of a layer's experts on a GPU of capability 9.0."""
    scheme = get_scheme(scheme_name, group_size)
    shapes = stack_shapes(size)
    x = on_meta(tokens, size.hidden).requires_grad_()
    weights = on_meta(tokens, size.experts_per_token, dtype=torch.float32).requires_grad_()
    ids = on_meta(tokens, size.experts_per_token, dtype=torch.int64)
    gate_up, down = (on_meta(*shape).requires_grad_() for shape in shapes)
    with counting():
        shards = [make_shard(shape, scheme, ENGINE_KERNELS[scheme_name], 1) for shape in shapes]
        for shard in shards:
            shard.quantize()
        gathered = gather(shards)
    runs: list[Counting] = []

    def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with counting() as counter:
            runs.append(counter)
            kernel = _engine(scheme_name, counter, size)
            wire_gate_up, wire_down = gathered
            experts = ExpertsInOneCopy(kernel, wire_gate_up, wire_down, scheme.operands)
            return fused_experts(x, weights, ids, gate_up, down, experts)

    y = block(x, weights)
    with counting() as backward:
        y.backward(torch.empty_like(y))
    runs.clear()
    again = checkpoint(block, x, weights, use_reentrant=False, preserve_rng_state=False)
    with counting():
        again.backward(torch.empty_like(again))
    return [
        Phase.of("forward", runs[0], _least_forward(size, tokens, scheme_name, group_size)),
        Phase.of("recompute", runs[1], 0),
        Phase.of("backward", backward, _least_backward(size, tokens, scheme_name, group_size)),
    ]


def own_forward_phase(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> Phase:
    """Count the forward of a layer's experts by QaRL's kernel, as in the engine: the router's weights are FP32 and its
    choice is int32."""
    scheme = get_scheme(scheme_name, group_size)
    top_k = size.experts_per_token
    gate_up, down = (
        {
            name: on_meta(shape[0], *spec_shape, dtype=dtype)
            for name, (dtype, spec_shape) in wire_specs(scheme, *shape[1:]).items()
            if name != "weight_shape"
        }
        for shape in stack_shapes(size)
    )
    x = on_meta(tokens, size.hidden)
    weights = on_meta(tokens, top_k, dtype=torch.float32)
    ids = on_meta(tokens, top_k, dtype=torch.int32)
    prepared = PreparedStacks(gate_up, down, scheme.operands)
    with counting() as counter:
        TritonInvariantExperts.forward(x, weights, ids, prepared)
    least = _least_forward(size, tokens, scheme_name, group_size)
    return Phase.of("own forward", counter, least)


def _engine(scheme_name: str, counter: Counting, size: ModelSize) -> Any:
    """A kernel that prepares as the engine's, and reports its launches instead of making them."""
    engines: Any = ENGINE_KERNELS[scheme_name]

    class Engine(engines):
        quantize = TritonExperts.quantize

        @classmethod
        def forward(
            cls,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            prepared: Experts,
        ) -> torch.Tensor:
            rows = topk_ids.numel()
            inner = size.moe_intermediate
            buffers = {"ids": topk_ids, "x": x, "wide": on_meta(rows, 2 * inner), "narrow": on_meta(rows, inner),
                   "out": on_meta(rows, size.hidden), "y": torch.empty_like(x)}  # fmt: skip
            codes = {
                f"{name}_codes": torch.empty_like(buffers[name], dtype=torch.int8)
                for name in ("x", "narrow")
            }
            operands: dict[str, tuple[torch.Tensor, ...]] = {
                name: (tensor,) for name, tensor in (buffers | codes).items()
            }
            operands |= {"gate_up": prepared[::2], "down": prepared[1::2]}
            for name, operated in ENGINE_LAUNCHES[scheme_name]:
                counter.launched(
                    name, [tensor for key in operated.split() for tensor in operands[key]]
                )
            return buffers["y"]

    return Engine


def dense_phases(size: ModelSize, scheme_name: str, group_size: int, tokens: int) -> list[Phase]:
    """Count forward and backward of a layer's dense products. Each reads its own input."""
    scheme = get_scheme(scheme_name, group_size)
    shapes = dense_linears(size)
    with counting():
        layers = [_linear(shape, scheme) for shape in shapes]
    inputs = [on_meta(tokens, shape[1]).requires_grad_() for shape in shapes]
    with counting() as counter:
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    rows = sum(2 * tokens * (n + k) for n, k in shapes)
    weights = sum(get_scheme(scheme_name, group_size).wire_bytes(*shape) for shape in shapes)
    forward = Phase.of("forward, dense", counter, rows + weights)
    # dX reads dy and the weight, dW reads dy and x; dX and dW are written
    gradients = sum(2 * tokens * (2 * n + 2 * k) + 2 * n * k for n, k in shapes)
    return [forward, Phase.of("backward, dense", _backward(outputs), gradients + weights)]


def _linear(shape: tuple[int, int], scheme: Scheme) -> QuantLinear:
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.bfloat16)
    layer = QuantLinear(linear, scheme, qualified_name="layer", kernel="triton")
    layer.make_ready()
    return layer


def _backward(outputs: list[torch.Tensor], without: tuple[str, ...] = ()) -> Counting:
    gradients = [torch.empty_like(output) for output in outputs]
    with counting(without) as counter:
        torch.autograd.backward(outputs, gradients)
    return counter


def beyond_products(size: ModelSize, trainer: str, tokens: int) -> tuple[int, int]:
    """Return the bytes of a layer's forward and backward that products do not move. `trainer`: its scheme.

    A BF16 trainer runs transformers' experts, and its linears move nothing beside their operands."""
    forward, backward = _rest_of_layer(size, tokens)
    counted = [(forward.counts.moved, backward.counts.moved)]
    if trainer != "bf16":
        phases = passes(size, trainer, default_group_size(size), tokens)
        beyond = {phase.name: max(phase.counts.moved - phase.least, 0) for phase in phases}
        backward_bytes = sum(moved for name, moved in beyond.items() if name.startswith("backward"))
        counted.append((sum(beyond.values()) - backward_bytes, backward_bytes))
    elif size.experts:
        forward, backward = _transformers_experts(size, tokens)
        counted.append((forward.counts.moved, backward.counts.moved))
    return sum(there for there, _ in counted), sum(back for _, back in counted)


def _rest_of_layer(size: ModelSize, tokens: int) -> tuple[Counting, Counting]:
    """Count forward and backward of norms, rotary embedding, residuals, and SwiGLU of a dense layer."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeRMSNorm,
        apply_rotary_pos_emb,
    )

    with torch.device("meta"):
        norms = [Qwen3MoeRMSNorm(size.hidden).bfloat16() for _ in range(2)]
        by_head = (
            [Qwen3MoeRMSNorm(size.head_dim).bfloat16() for _ in range(2)] if size.qk_norm else []
        )
    x, attention, mlp = (_leaf(tokens, size.hidden) for _ in range(3))
    heads = [_leaf(1, tokens, count, size.head_dim) for count in (size.heads, size.kv_heads)]
    angles = [on_meta(1, tokens, size.head_dim) for _ in range(2)]
    halves = [] if size.sparse_layers else [_leaf(tokens, size.intermediate) for _ in range(2)]
    with counting(_PRODUCTS) as forward:
        outputs = [norms[0](x)]
        query, key = (
            (norm(head) for norm, head in zip(by_head, heads, strict=True)) if by_head else heads
        )
        outputs += apply_rotary_pos_emb(query, key, *angles, unsqueeze_dim=2)
        added = x + attention
        outputs += [norms[1](added), added + mlp]
        if halves:
            outputs.append(torch.nn.functional.silu(halves[0]) * halves[1])
    return forward, _backward(outputs, _PRODUCTS)


def _transformers_experts(size: ModelSize, tokens: int) -> tuple[Counting, Counting]:
    """Count forward and backward of a layer's experts in BF16 (`grouped_mm_experts_forward`)."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = transformers.Qwen3MoeConfig(
        hidden_size=size.hidden,
        moe_intermediate_size=size.moe_intermediate,
        num_experts=size.experts,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config).bfloat16()
    ids = on_meta(tokens, size.experts_per_token, dtype=torch.int64)
    x = _leaf(tokens, size.hidden)
    weights = _leaf(tokens, size.experts_per_token)
    with counting(_PRODUCTS) as forward:
        y = experts(x, ids, weights)
    return forward, _backward([y], _PRODUCTS)


def _leaf(*shape: int) -> torch.Tensor:
    return on_meta(*shape).requires_grad_()


def _stacks_bytes(size: ModelSize, scheme: str, group_size: int) -> list[int]:
    return [e * get_scheme(scheme, group_size).wire_bytes(n, k) for e, n, k in stack_shapes(size)]


def _rows(size: ModelSize, tokens: int) -> tuple[int, int, int]:
    """Return the bytes of T k rows in BF16 that are H, 2I and I wide."""
    rows = 2 * tokens * size.experts_per_token
    return rows * size.hidden, rows * 2 * size.moe_intermediate, rows * size.moe_intermediate


def _least_forward(size: ModelSize, tokens: int, scheme: str, group_size: int) -> int:
    """x and both stacks read, gate and up, their product and the experts' outputs once each way, y written."""
    hidden, both, inner = _rows(size, tokens)
    return (
        4 * tokens * size.hidden
        + sum(_stacks_bytes(size, scheme, group_size))
        + 2 * (both + inner + hidden)
    )


def _least_backward(size: ModelSize, tokens: int, scheme: str, group_size: int) -> int:
    """Five products and what lies between them.

    x and dy are gathered into rows by expert; [g u] = x Ŵgu^T and da = dy Ŵd; one pass makes a and d[g u] from g, u and
    da; dWd from dy and a; dx's rows from d[g u] and Ŵgu, summed by token; dWgu from d[g u] and x. Each stack is read in
    low bits, each gradient of a stack is written in BF16.
    """
    gate_up, down = _stacks_bytes(size, scheme, group_size)
    hidden, both, inner = _rows(size, tokens)
    (e, n, k), (_, out, inside) = stack_shapes(size)
    gathers = 4 * hidden
    again = hidden + gate_up + both + hidden + down + inner
    between = both + inner + both + inner
    d_down = hidden + inner + 2 * e * out * inside
    d_x = both + gate_up + hidden + hidden + 2 * tokens * size.hidden
    d_gate_up = both + hidden + 2 * e * n * k
    return gathers + again + between + d_down + d_x + d_gate_up
