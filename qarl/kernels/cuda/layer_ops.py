"""vLLM's CUDA operators of a decoder layer, what each rounds, and for each a PyTorch function with the same rounding.

    rms_norm            `rms_norm`, or `fused_add_rms_norm` behind a residual addition
    silu_and_mul        `silu_and_mul`

A contract says which intermediate results are BF16 and which are FP32. The functions `*_reference` follow the
contracts. They run on every device, and compute the forward for tensors that are not on a GPU, so that the level can be
tested without one. The contracts are read from the source of vLLM 0.24.0, the release in requirements/gpu.lock.

Equal contracts do not mean equal bits: a contract leaves the order of FP32 sums open. So `quant.align=model` on a GPU
calls vLLM's operators, and the contracts say what to expect from them. Only a device can confirm that. Until
`confirmed` names a result file, the log and the doctor call the level unconfirmed.

The two norms sum squares in different orders. A decoder layer of transformers has added the residual already when it
calls its norm. vLLM's operator adds zeros to this sum then, which gives the bits that it gives for the two parts,
because it normalises their rounded sum.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from qarl.process import configure_vllm_process, vllm_missing

ENGINE_ARGUMENTS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
}
"""vLLM's arguments that make its engine run these operators, with CUDA graphs for decode steps.

`mode` 0 is no compilation. With the default, Inductor compiles PyTorch's formulas, which round differently.
The other setting is one split in attention. vLLM 0.24.0 reads it only if it captures whole steps, and if a step has at
most `max_cudagraph_capture_size` tokens (by default twice max_num_seqs, at most 512). In larger steps a heuristic of
FlashAttention chooses: one split for up to 512 keys, and whenever the queries fill the GPU. So prompts have one split.
With rollout.enforce_eager=true no setting gives one split except VLLM_BATCH_INVARIANT. That replaces operators of the
whole process, so it needs an engine in a separate process, as in verl.
"""


class Contract(NamedTuple):
    """`operator`: vLLM's name. `source`: file in vLLM 0.24.0. `rounds`: results that are rounded to BF16; all others
    are FP32. `open`: what the contract does not determine. `test`: the device test that confirms it, as file::function.
    `confirmed`: file under benchmarks/results in which a device has confirmed it, or empty."""

    operator: str
    source: str
    rounds: str
    open: str
    test: str
    confirmed: str = ""


_TESTS = "tests/gpu/test_align_cuda.py"
CONTRACTS: dict[str, Contract] = {
    "norm": Contract(
        "rms_norm",
        "csrc/libtorch_stable/layernorm_kernels.cu",
        "(x * r) * weight, once",
        "order of the sum of squares. A call with fewer than 256 rows has other blocks, which changes the order only "
        "if rows have more than 2048 elements",
        f"{_TESTS}::test_rms_norm",
    ),
    "residual norm": Contract(
        "fused_add_rms_norm",
        "csrc/libtorch_stable/layernorm_kernels.cu",
        "x + residual; then (sum * r) * weight, once, from the rounded sum",
        "as in rms_norm",
        f"{_TESTS}::test_fused_add_rms_norm",
    ),
    "rotary": Contract(
        "rotary_embedding",
        "csrc/libtorch_stable/pos_encoding_kernels.cu",
        "the cosines and sines; then x * cos - y * sin, once",
        "nothing: products of BF16 numbers are exact in FP32, fused or not. But vLLM computes the cosines and sines on "
        "the GPU, so they differ from a table that is computed on a CPU",
        f"{_TESTS}::test_rotary_embedding",
    ),
    "activation": Contract(
        "silu_and_mul",
        "csrc/libtorch_stable/activation_kernels.cu",
        "silu(gate); then silu(gate) * up",
        "the last bit of expf",
        f"{_TESTS}::test_silu_and_mul",
    ),
    "attention": Contract(
        "FlashAttention 3, one split",
        "vllm/v1/attention/backends/flash_attn.py",
        "exp(score - largest score so far) where it multiplies the values; the output",
        "the number of keys in a tile, after which sums are rescaled: 128 for heads of 96 and 128, and in a prefill of "
        "heads of 64. A decode of heads of 64 has 160 or 192",
        f"{_TESTS}::test_attention_of_prefill",
    ),
    "lm_head": Contract(
        "F.linear, cuBLAS",
        "vllm/model_executor/layers/vocab_parallel_embedding.py",
        "the logits",
        "cuBLAS chooses a kernel by the number of rows, which may change the order of the sums",
        f"{_TESTS}::test_lm_head",
    ),
    "log-softmax": Contract(
        "compute_token_logprobs",
        "vllm/v1/worker/gpu/sample/logprob.py",
        "nothing: logits / temperature, then (x - largest) - log(sum), in FP32",
        "the order of the sum; the trainer's is PyTorch's, which may change the last bit of a log-prob",
        f"{_TESTS}::test_log_softmax",
    ),
}
"""Part of the model -> contract of vLLM's operator. docs/alignment_cuda.md has the same table."""


def unconfirmed() -> tuple[str, ...]:
    """Return the operators that no device has confirmed."""
    return tuple(contract.operator for contract in CONTRACTS.values() if not contract.confirmed)


OPERATORS = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding")


@cache
def unavailable() -> str | None:
    """Return why vLLM's operators cannot be called in this process, or None if they can. A GPU is not needed."""
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    missing_ops = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
    return f"this vLLM build has no {', '.join(missing_ops)}" if missing_ops else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, after_sum: bool) -> torch.Tensor:
    """Return the norm of x BF16 [..., K] with weight BF16 [K], as BF16.

    `after_sum`: whether x is the sum of a residual addition, which the engine computes in the norm's operator.
    """
    if not x.is_cuda:
        return rms_norm_reference(x, weight, epsilon)
    rows = x.reshape(-1, x.shape[-1])
    if after_sum:
        out = rows.clone()  # the operator writes into its operands
        torch.ops._C.fused_add_rms_norm(out, torch.zeros_like(rows), weight, epsilon)
    else:
        out = torch.empty_like(rows)
        torch.ops._C.rms_norm(out, rows.contiguous(), weight, epsilon)
    return out.view(x.shape)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Do the same as `rms_norm`, in PyTorch: the product of three FP32 numbers is rounded once."""
    total = x.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (total * scale * weight.float()).to(x.dtype)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as BF16, for gate and up BF16 [..., N]."""
    if not gate.is_cuda:
        return silu_and_mul_reference(gate, up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(out, torch.cat((gate, up), dim=-1))
    return out


def silu_and_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Do the same as `silu_and_mul`, in PyTorch: both results are rounded."""
    return F.silu(gate.float()).to(gate.dtype) * up
