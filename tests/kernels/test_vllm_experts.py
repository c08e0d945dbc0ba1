"""vLLM's fused experts without a GPU: what its own chooser answers, and what its operators are handed.

The CUDA operators are stood in for by PyTorch that reads the layouts and routing tables which vLLM documents; the
Python around them (fused_marlin_moe, run_cutlass_moe_fp8, fused_experts, Marlin's permutations, the choice) is the
installed vLLM's. On a GPU tests/gpu runs the real ones.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from expert_cases import exact, exact_weight, make, off, stacked
from marlin_reference import unpermuted

from qarl.kernels.activations import dequantize, quantize_fp8, quantize_int8, silu_mul
from qarl.kernels.cuda import vllm_ops as vllm_cuda
from qarl.kernels.experts import cuda as vllm_experts
from qarl.kernels.experts.autograd import EXPERTS_KERNELS, LowBitExperts, choose_experts_kernel, fused_experts
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.process import configure_vllm_process

configure_vllm_process()
MOE = "vllm.model_executor.layers.fused_moe"
UTILS = "vllm.model_executor.layers.quantization.utils"
QWEN3_30B = ExpertsShape(experts=128, top_k=8, hidden=2048, intermediate=768)


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's platform as on a GPU of a given capability. Its modules are imported before, as a CPU build must."""

    def pretend(major: int, minor: int) -> None:
        for name in ("config", "experts.cutlass_moe", "experts.triton_moe", "experts.marlin_moe", "oracle.fp8"):
            importlib.import_module(f"{MOE}.{name}")
        importlib.import_module(f"{vllm_experts._COMPRESSED_TENSORS}.compressed_tensors")
        from vllm.platforms import PlatformEnum, current_platform
        from vllm.platforms.interface import DeviceCapability

        capability = DeviceCapability(major, minor)
        platform = type(current_platform)
        monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
        monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls, device_id=0: capability))
        monkeypatch.setattr(platform, "supports_fp8", classmethod(lambda cls: (major, minor) >= (8, 9)))
        cutlass = importlib.import_module(f"{MOE}.experts.cutlass_moe")
        monkeypatch.setattr(cutlass, "cutlass_group_gemm_supported", lambda: major in (9, 10))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(vllm_cuda, "_unusable", lambda operator: None)
        monkeypatch.setattr(vllm_experts, "_unusable", lambda: None)
        vllm_experts.engines_choice.cache_clear()

    yield pretend
    vllm_experts.engines_choice.cache_clear()


@pytest.mark.parametrize(
    ("scheme", "capability", "group_size", "expected"),
    [
        ("w4a16", (9, 0), 128, "vllm_marlin_experts"),
        ("w4a16", (8, 0), 32, "vllm_marlin_experts"),
        ("w8a8", (9, 0), None, "vllm_triton_experts"),
        ("w8a8", (8, 0), None, "vllm_triton_experts"),
        ("fp8", (9, 0), None, "vllm_cutlass_experts"),
        ("fp8", (8, 9), None, "vllm_triton_experts"),
    ],
)
def test_the_choice_is_vllms(
    pretend_cuda: Any, scheme: str, capability: tuple[int, int], group_size: int | None, expected: str
) -> None:
    pretend_cuda(*capability)
    choice = choose_experts_kernel(scheme, torch.device("cuda", 0), QWEN3_30B, group_size=group_size)
    assert choice.kernel.name == expected


def test_what_vllm_does_otherwise_is_said(pretend_cuda: Any) -> None:
    pretend_cuda(9, 0)
    device = torch.device("cuda", 0)
    marlin, cutlass = vllm_experts.VllmMarlinExperts, vllm_experts.VllmCutlassExperts
    why_not = marlin.unavailable("w4a16", device, QWEN3_30B._replace(intermediate=96), 32)
    assert why_not in (
        "vLLM pads an intermediate size of 96 to a multiple of 64",
        "here vLLM itself runs CompressedTensorsWNA16MoEMethod",  # vLLM 0.24 does not pad
    )
    for one_group in ({"intermediate": 128}, {"hidden": 128}):
        assert "one group per row" in (marlin.unavailable("w4a16", device, QWEN3_30B._replace(**one_group), 128) or "")
    both = QWEN3_30B._replace(hidden=128, intermediate=128)
    assert marlin.unavailable("w4a16", device, both, 128) is None
    why_not = marlin.unavailable("w4a16", device, QWEN3_30B._replace(hidden=2048 + 64), 32)
    assert why_not and why_not.startswith("here vLLM itself runs ") and "MarlinExperts" not in why_not
    assert "multiples of 16" in (cutlass.unavailable("fp8", device, QWEN3_30B._replace(hidden=2040), None) or "")
    pretend_cuda(10, 0)
    assert cutlass.unavailable("fp8", device, QWEN3_30B, None)


def test_vllm_comes_first() -> None:
    for kernels in EXPERTS_KERNELS.values():
        names = [kernel.name for kernel in kernels]
        assert all(name.startswith("vllm") for name in names[:-2]) and names[-2:] == ["triton", "reference"]
        assert names[0] == "vllm_cpu"
        for kernel in kernels[1:-2]:
            why_not = kernel.unavailable("w8a8", torch.device("cpu"), QWEN3_30B, None)
            assert why_not == "runs on NVIDIA GPUs, not on cpu"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = importlib.import_module("vllm._custom_ops")
    marlin, cutlass, triton = (
        importlib.import_module(f"{MOE}.{name}") for name in ("experts.marlin_moe", "experts.cutlass_moe", "fused_moe")
    )

    def align(ids: Any, block: int, experts: int, expert_map: Any = None, **other: Any) -> Any:
        """Every expert's places in the flattened ids, filled up to whole blocks with a place that is none."""
        flat = ids.flatten()
        places, owners = [], []
        for expert in range(experts):
            own = (flat == expert).nonzero()[:, 0].tolist()
            blocks = -(-len(own) // block)
            places += own + [flat.numel()] * (blocks * block - len(own))
            owners += [expert] * blocks
        return torch.tensor(places), torch.tensor(owners), torch.tensor([len(places)])

    def moe_sum(input: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(input.float().sum(1))

    for stand_in in (*marlin_operators(ops), *cutlass_operators(cutlass), moe_sum, scaled_fp8_quant):
        monkeypatch.setattr(ops, stand_in.__name__, stand_in)

    def silu_and_mul(output: torch.Tensor, input: torch.Tensor) -> None:
        """The CUDA operator's arithmetic; a CPU build's rounds once."""
        output.copy_(silu_mul(*input.chunk(2, 1)))

    monkeypatch.setattr(torch.ops._C, "silu_and_mul", silu_and_mul, raising=False)
    monkeypatch.setattr(marlin, "moe_align_block_size", align)
    monkeypatch.setattr(importlib.import_module(f"{UTILS}.marlin_utils"), "num_compute_units", lambda index=0: 132)
    monkeypatch.setattr(cutlass, "moe_permute", moe_permute)
    monkeypatch.setattr(cutlass, "moe_unpermute", moe_unpermute)
    monkeypatch.setattr(importlib.import_module(f"{UTILS}.int8_utils"), "per_token_quant_int8", quantize_int8)
    monkeypatch.setattr(triton, "tl", SimpleNamespace(bfloat16="bf16"))
    monkeypatch.setattr(triton, "try_get_optimal_moe_config", lambda *args, **kwargs: {"BLOCK_SIZE_M": 4})
    monkeypatch.setattr(triton, "_prepare_expert_assignment", lambda ids, config, *a, **k: align(ids, 4, 5))
    monkeypatch.setattr(triton, "moe_kernel_quantize_input", moe_kernel_quantize_input)
    monkeypatch.setattr(triton, "dispatch_fused_moe_kernel", dispatch_fused_moe_kernel)


def scaled_fp8_quant(x: Any, scale: Any = None, use_per_token_if_dynamic: bool = False, output: Any = None) -> Any:
    assert x.is_contiguous() and scale is None and use_per_token_if_dynamic
    values, made = quantize_fp8(x)
    return (values, made) if output is None else (output.copy_(values), made)


def moe_kernel_quantize_input(A: Any, A_scale: Any, quant_dtype: Any, per_act_token_quant: bool, **other: Any) -> Any:
    assert A_scale is None and per_act_token_quant
    return (quantize_int8 if quant_dtype == torch.int8 else quantize_fp8)(A)


def marlin_operators(ops: Any) -> tuple[Any, ...]:
    marlin = importlib.import_module(f"{UTILS}.marlin_utils")

    def moe_wna16_marlin_gemm(
        input: Any, output: Any, b_qweight: Any, b_bias: Any, b_scales: Any, a_scales: Any, global_scale: Any,
        b_qzeros: Any, g_idx: Any, perm: Any, workspace: Any, sorted_token_ids: Any, expert_ids: Any, padded: Any,
        topk_weights: Any, moe_block_size: int, top_k: int, mul_topk_weights: bool, b_q_type: Any, size_m: int,
        size_n: int, size_k: int, **flags: Any,
    ) -> Any:  # fmt: skip
        assert flags["is_k_full"] and flags["use_fp32_reduce"] and not flags["use_atomic_add"]
        assert (b_q_type.size_bits, b_q_type.bias) == (4, 8) and input.shape == (size_m, size_k)
        assert b_bias is a_scales is global_scale is b_qzeros is None and g_idx.numel() == perm.numel() == 0
        inverse = torch.argsort(torch.tensor(marlin.get_scale_perms()[0 if b_scales.shape[1] > 1 else 1]))
        for block, expert in enumerate(expert_ids.tolist()):
            codes = unpermuted(b_qweight[expert]).double()
            assert codes.shape == (size_k, size_n)
            scales = b_scales[expert].reshape(-1, len(inverse))[:, inverse].reshape(-1, size_n).double()
            weight = (codes * scales.repeat_interleave(size_k // len(scales), 0)).bfloat16().double()
            for place in sorted_token_ids[block * moe_block_size :][:moe_block_size].tolist():
                if place < size_m * top_k:
                    row = input[place // top_k].double() @ weight
                    output[place] = row * topk_weights.flatten()[place] if mul_topk_weights else row
        return output

    return (moe_wna16_marlin_gemm,)


def cutlass_operators(module: Any) -> tuple[Any, ...]:
    def get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
        offsets: Any, sizes1: Any, sizes2: Any, n: int, k: int, swap_ab: bool
    ) -> None:
        for sizes, (rows, depth) in ((sizes1, (2 * n, k)), (sizes2, (k, n))):
            for expert, count in enumerate(offsets.diff().tolist()):
                sizes[expert] = torch.tensor([rows, count, depth] if swap_ab else [count, rows, depth])

    def cutlass_moe_mm(
        out: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, offsets: Any, sizes: Any, a_strides: Any,
        b_strides: Any, c_strides: Any, per_act_token: bool, per_out_ch: bool,
    ) -> None:  # fmt: skip
        assert per_act_token and per_out_ch and a.dtype == b.dtype == torch.float8_e4m3fn
        assert a_strides.tolist() == b_strides.tolist() == [b.stride(1)] * len(b) and a.stride(0) == b.stride(1)
        assert c_strides.tolist() == [out.stride(0)] * len(b) and c_strides.dtype == torch.int64
        bounds = [*offsets.tolist(), len(a)]
        for expert in range(len(b)):
            rows = slice(bounds[expert], bounds[expert + 1])
            assert rows.stop - rows.start in sizes[expert].tolist()
            left = a[rows].double() * a_scale[rows].double()
            out[rows] = (left @ (b[expert].double() * b_scale[expert].double()).t()).to(out.dtype)

    return get_cutlass_moe_mm_problem_sizes_from_expert_offsets, cutlass_moe_mm


def moe_permute(
    x: Any, scale: Any, ids: Any, experts: int, local: int, expert_map: Any, permuted_hidden_states: Any, scratch: Any
) -> Any:
    assert expert_map is None and scratch is None and experts == local
    order = ids.flatten().long().argsort(stable=True)
    permuted_hidden_states.view(torch.uint8).copy_(x.view(torch.uint8)[order // ids.shape[1]])
    offsets = torch.searchsorted(ids.flatten()[order], torch.arange(experts + 1))
    return permuted_hidden_states, scale[order // ids.shape[1]], offsets, order.argsort(), order


def moe_unpermute(
    out: Any, permuted_hidden_states: Any, topk_weights: Any, inv_permuted_idx: Any, expert_first_token_offset: Any
) -> None:
    rows = permuted_hidden_states[inv_permuted_idx].view(*topk_weights.shape, -1)
    out.copy_((rows.float() * topk_weights[..., None]).sum(1))


def dispatch_fused_moe_kernel(
    A: Any, B: Any, C: Any, A_scale: Any, B_scale: Any, B_zp: Any, topk_weights: Any, places: Any, owners: Any,
    padded: Any, multiply: bool, top_k: int, config: Any, **flags: Any,
) -> None:  # fmt: skip
    assert flags["per_channel_quant"] and flags["use_int8_w8a8"] == (B.dtype == torch.int8) and A.dtype == B.dtype
    rows = C.view(-1, C.shape[-1])
    for block, expert in enumerate(owners.tolist()):
        weight = B[expert].double() * B_scale[expert].double()
        for place in places[block * config["BLOCK_SIZE_M"] :][: config["BLOCK_SIZE_M"]].tolist():
            if place < len(rows):
                row = weight @ (A[place // top_k].double() * A_scale[place // top_k].double())
                rows[place] = row * topk_weights.flatten()[place] if multiply else row


@pytest.mark.parametrize(
    ("scheme", "group_size", "kernel"),
    [
        ("w4a16", 32, vllm_experts.VllmMarlinExperts),
        ("w4a16", 128, vllm_experts.VllmMarlinExperts),
        ("w8a8", 32, vllm_experts.VllmTritonExperts),
        ("fp8", 32, vllm_experts.VllmTritonExperts),
        ("fp8", 32, vllm_experts.VllmCutlassExperts),
    ],
)
@pytest.mark.parametrize("tokens", [1, 23])
def test_operators_are_handed_what_they_expect(
    operators: None, scheme: str, group_size: int, kernel: Any, tokens: int
) -> None:
    """The forward beside float64, rounded between the products; gradients are those of the exact experts, which
    quantize with the same stand-ins."""
    shape = ExpertsShape(experts=5, top_k=2, hidden=256, intermediate=192 if group_size == 32 else 256)
    x, weights, ids, gate_up, down = make(shape, tokens)
    wire = stacked(gate_up, scheme, group_size), stacked(down, scheme, group_size)
    grad = torch.randn(tokens, shape.hidden).bfloat16()
    made = []
    for each in (kernel, EXPERTS_KERNELS[scheme][-1]):
        inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
        y = fused_experts(*inputs[:2], ids, *inputs[2:], LowBitExperts.of(each, *wire))
        y.backward(grad)
        made.append([y, *(t.grad for t in inputs)])
    (y, *grads), (_, *expected_grads) = made
    weights1, weights2 = (exact_weight(tensors) for tensors in wire)
    assert off(y, exact(scheme, x.double(), weights.double(), ids, weights1, weights2)) < 3e-3
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
    if scheme != "w4a16":
        values, scale = kernel.quantize(scheme, x)
        assert values.dtype == wire[0]["weight"].dtype and dequantize(values, scale).shape == x.shape
