"""The elementwise chains against PyTorch's operations and float64. What a kernel does not write stays NaN
(conftest.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_checks import assert_one_rounding
from triton_rig import DEVICE

from qarl.kernels.log_probs import WholeLogits, chosen_log_probs
from qarl.kernels.triton import chains

ODD = [(1, 1), (3, 7), (5, 1024), (2, 1500), (9, 96)]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(DEVICE)


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_the_gradient_of_swiglu(shape: tuple[int, int]) -> None:
    grad, gate, up = random(*shape), random(*shape, seed=1, scale=4), random(*shape, seed=2)
    exact = [tensor.double().cpu().requires_grad_() for tensor in (gate, up)]
    (F.silu(exact[0]) * exact[1]).backward(grad.double().cpu())
    sizes = [(grad * up).double().abs().cpu(), (grad * gate).double().abs().cpu()]
    outputs = chains.silu_and_mul_backward(grad, gate, up)
    for output, leaf, size in zip(outputs, exact, sizes, strict=True):
        assert leaf.grad is not None
        assert_one_rounding(output, leaf.grad, size)


def test_operands_of_other_strides() -> None:
    """As gate and up of one product, and a gradient of a transposed view."""
    both = random(6, 200)
    gate, up = both.chunk(2, dim=1)
    grad = random(100, 6, seed=1).t()
    outputs = chains.silu_and_mul_backward(grad, gate, up)
    expected = chains.silu_and_mul_backward(*(t.contiguous() for t in (grad, gate, up)))
    assert all(map(torch.equal, outputs, expected))


def turns(rows: int, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(rows, tokens, size // 2, generator=torch.Generator().manual_seed(3)) * 3
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().bfloat16().to(DEVICE), angles.sin().bfloat16().to(DEVICE)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "size", "rows"),
    [(1, 5, 3, 128, 1), (2, 4, 8, 64, 1), (2, 3, 1, 96, 2), (1, 1, 40, 80, 1)],
)
def test_turns_have_the_bits_of_transformers(
    batch: int, tokens: int, heads: int, size: int, rows: int, back: bool
) -> None:
    """On FP32 copies, rounded once: the operator of vLLM, as an H200 has confirmed."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    x = random(batch, tokens, heads, size, scale=3)
    cosines, sines = turns(rows, tokens, size)
    wide = (cosines.float(), -sines.float() if back else sines.float())
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), *wide)
    output = chains.turn(x, cosines, sines, back=back)
    assert torch.equal(output, expected.bfloat16().transpose(1, 2))
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(chains.turn(transposed, cosines, sines, back=back), output)


def test_the_gradient_of_a_turn_turns_back() -> None:
    x, grad = random(1, 6, 2, 32), random(1, 6, 2, 32, seed=1)
    cosines, sines = turns(1, 6, 32)
    exact = x.double().cpu().requires_grad_()
    cosine, sine = (part[:, :, None, :16].double().cpu() for part in (cosines, sines))
    first, second = exact.chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    turned.backward(grad.double().cpu())
    assert exact.grad is not None
    output = chains.turn(grad, cosines, sines, back=True)
    assert_one_rounding(output, exact.grad, torch.ones_like(exact))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [5, 1000, 4100])
def test_the_gradient_of_log_probs(columns: int, dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = random(4, columns, scale=5)
    logits[:, -2:] = -1e30  # no tokens
    logits = logits.to(dtype)
    tokens = torch.randint(columns - 2, (4,), generator=generator)
    grad = torch.randn(4, generator=generator)
    exact = logits.double().cpu().requires_grad_()
    scaled = exact / temperature
    scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0].backward(grad.double())
    log_sums = scaled.detach().logsumexp(-1).float().to(DEVICE)
    output = chains.log_softmax_backward(
        logits, log_sums, tokens.to(DEVICE), grad.to(DEVICE), temperature=temperature
    )
    assert output.dtype == dtype and exact.grad is not None
    assert not output[:, -2:].count_nonzero()
    step = 2**-8 if dtype == torch.bfloat16 else 1e-6
    error = (output.double().cpu() - exact.grad).abs()
    assert (error <= exact.grad.abs() * (step + 1e-5) + 1e-6 * grad.abs()[:, None]).all()


@pytest.mark.parametrize("rows", [64, 100, None], ids=["two blocks", "one block", "all logits"])
def test_log_probs_take_the_kernel(rows: int | None) -> None:
    """Both their values and their gradients, of hidden states and lm_head's weight."""
    generator = torch.Generator().manual_seed(0)
    leaves = [random(100, 48).requires_grad_(), random(320, 48, seed=1).requires_grad_()]
    tokens = torch.randint(320, (100,), generator=generator).to(DEVICE)
    grad = torch.randn(100, generator=generator).to(DEVICE)
    if rows is None:
        logits = WholeLogits(F.linear(*leaves))
        log_probs, top = logits.log_probs(tokens, temperature=0.7, likeliest=False)
    else:
        log_probs, top = chosen_log_probs(
            *leaves, tokens, temperature=0.7, rows=rows, likeliest=False
        )
    log_probs.backward(grad)
    assert top.shape == (0,)
    rounded = F.linear(*leaves).detach().double()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*exact)
    logits = logits + (rounded - logits).detach()
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    expected.backward(grad.double())
    assert float((log_probs - expected).abs().max()) < 1e-5
    for leaf, known in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and known.grad is not None
        error = (leaf.grad.double() - known.grad).norm() / known.grad.norm()
        assert float(error) < 2**-8
