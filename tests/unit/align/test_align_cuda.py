"""The operators of level `model` on a GPU, as far as a CPU can show them: pages and arguments of FlashAttention, and
the gradients. The kernel of the norms has test_norms.py (Triton's interpreter).

test_align_cuda_level.py has the whole model. tests/gpu/test_align_cuda.py compares the operators themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_checks import stand_in_for_vllm

from qarl.align import cuda
from qarl.kernels.cuda import layer_ops

pytest.importorskip("vllm")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def attention_inputs(
    length: int, heads: int = 4, kv_heads: int = 2, size: int = 128
) -> tuple[torch.Tensor, ...]:
    shapes = ((length, heads, size), (length, kv_heads, size), (length, kv_heads, size))
    return tuple(
        random(*shape, seed=i, scale=2.0 if i < 2 else 1.0) for i, shape in enumerate(shapes)
    )


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(
        q, k, v, is_causal=len(query) > 1, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("lengths", [(1,), (16,), (17, 1, 40), (5, 160, 16, 3)], ids=str)
def test_pages_hold_every_token_of_their_row(lengths: tuple[int, ...]) -> None:
    table, slots = layer_ops.pages(torch.tensor(lengths, dtype=torch.int32))
    assert table.dtype == torch.int32 and table.shape == (
        len(lengths),
        -(-max(lengths) // layer_ops.PAGE),
    )
    tensor = random(sum(lengths), 2, 8)
    paged = layer_ops.into_pages(tensor, slots, int(table.max()) + 1)
    for pages, row in zip(table, tensor.split(lengths), strict=True):
        assert torch.equal(paged[pages].flatten(0, 1)[: len(row)], row)
    used = [
        pages[: -(-length // layer_ops.PAGE)].tolist()
        for pages, length in zip(table, lengths, strict=True)
    ]
    flat = [page for pages in used for page in pages]
    assert sorted(flat) == list(range(len(paged)))


def test_the_call_fits_vllms_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the arguments, and shapes of the pages, on a function with the signature of vLLM 0.24.0."""
    seen: dict[str, Any] = {}

    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
        q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
    ):  # fmt: skip
        seen.update(locals())
        return q, q.new_zeros(q.shape[1], len(q))

    module = type(sys)("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    for size, queries in ((128, 17), (64, 65), (32, 65)):
        output, _ = layer_ops.flash_attention(*attention_inputs(20, size=size), 0.25, (17, 3))
        assert output.shape == (20, 4, size)
        assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (queries, 17)
        assert seen["k"].shape == seen["v"].shape == (3, 16, 2, size)
    assert (seen["fa_version"], seen["num_splits"], seen["return_softmax_lse"]) == (3, 1, True)
    assert (seen["causal"], seen["softmax_scale"]) == (True, 0.25)
    assert seen["cu_seqlens_q"].tolist() == [0, 17, 20] and seen["seqused_k"].tolist() == [17, 3]
    assert seen["block_table"].tolist() == [[0, 1], [2, 0]]
    layer_ops.flash_attention(*attention_inputs(90, size=64), 0.25, (90,))
    assert seen["max_seqlen_q"] == 90


def test_the_gradient_takes_what_the_forward_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own check of arguments and shapes, on tensors without memory; it has no values on a CPU."""
    query, key, value = (tensor.to("meta") for tensor in attention_inputs(20))
    grad, output, log_sums = (
        torch.empty_like(query),
        torch.empty_like(query),
        query.new_empty(4, 20),
    )
    seen: list[Any] = []
    operator = torch.ops.aten._flash_attention_backward
    monkeypatch.setattr(
        torch.ops.aten,
        "_flash_attention_backward",
        lambda *operands, **named: (seen.append((operands, named)), operator(*operands, **named))[
            1
        ],
    )
    grads = layer_ops.flash_attention_backward(
        grad, query, key, value, output, log_sums, 0.25, (17, 3)
    )
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    ((operands, named),) = seen
    names = [argument.name for argument in operator.default._schema.arguments]
    bound = dict(zip(names, operands, strict=False)) | named
    tensors = {"grad_out": grad, "query": query, "key": key, "value": value, "out": output}
    assert all(bound[name] is tensor for name, tensor in tensors.items())
    assert bound["logsumexp"] is log_sums and bound["scale"] == 0.25
    assert (bound["is_causal"], bound["dropout_p"]) == (True, 0.0)
    assert (bound["max_q"], bound["max_k"]) == (17, 17)
    assert bound["cum_seq_q"] is bound["cum_seq_k"] and bound["cum_seq_q"].shape == (3,)
    assert (bound["window_size_left"], bound["window_size_right"]) == (-1, 0)


GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "norm": (
        lambda x, w: cuda._Norm.apply(x, w, 1e-6),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        (random(3, 7, 96, scale=2), random(96, seed=1)),
    ),
    "SwiGLU": (
        lambda gate, up: cuda._SiluAndMul.apply(gate, up),
        lambda gate, up: F.silu(gate) * up,
        (random(9, 80, scale=2), random(9, 80, seed=1)),
    ),
    "attention": (
        lambda q, k, v: cuda._Flash.apply(q, k, v, 0.2, (30, 12)),
        lambda q, k, v: torch.cat([exact_attention(*(t[rows] for t in (q, k, v)), 0.2)
                                   for rows in (slice(0, 30), slice(30, 42))]),
        attention_inputs(42, size=32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    function, exact, inputs = GRADIENTS[name]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    truth = [tensor.double().requires_grad_() for tensor in inputs]
    output = function(*ours)
    grad = random(*output.shape, seed=9)
    output.backward(grad)
    exact(*truth).backward(grad.double())
    for leaf, expected in zip(ours, truth, strict=True):
        assert (
            leaf.grad is not None
            and expected.grad is not None
            and leaf.grad.dtype == torch.bfloat16
        )
        assert float((leaf.grad.double() - expected.grad).norm() / expected.grad.norm()) < 6e-3
