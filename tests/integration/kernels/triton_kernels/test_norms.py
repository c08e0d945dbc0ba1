"""QaRL's RMSNorm against its reference, and against float64 with its gradients. What it does not write stays NaN
(conftest.py)."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels import reference
from qarl.kernels.triton.norms import add_rms_norm, norm_tile, rms_norm, rms_norm_backward

EPSILON = 1e-6
WIDTHS = (8, 128, 576, 896, 2048, 4096, 5120)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(DEVICE)


def assert_one_rounding(output: torch.Tensor, exact: torch.Tensor) -> None:
    """The FP32 sums before the rounding have errors below 1e-5 of the result."""
    assert output.dtype == torch.bfloat16 and output.shape == exact.shape
    error = (output.double() - exact).abs()
    assert (error <= exact.abs() * (2**-8 + 1e-5) + 1e-30).all()


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7])
def test_the_norm_is_rounded_once(rows: int, width: int) -> None:
    x, weight = random(rows, width, scale=3), random(width, seed=1)
    output = rms_norm(x, weight, EPSILON)
    assert_one_rounding(output, exact_norm(x, weight))
    nearest = reference.rms_norm(x, weight, EPSILON)
    assert float((output != nearest).float().mean()) < 1e-2


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_residual_is_added_and_rounded_first(width: int, in_place: bool) -> None:
    x, residual, weight = random(5, width), random(5, width, seed=2, scale=8), random(width, seed=1)
    total = x + residual
    alone = rms_norm(total, weight, EPSILON)
    before = x.clone()
    output, stored = add_rms_norm(x, residual, weight, EPSILON, in_place=in_place)
    assert torch.equal(stored, total) and torch.equal(output, alone)
    assert (output is x and stored is residual) == in_place
    assert in_place or torch.equal(x, before)


@pytest.mark.parametrize(
    ("width", "most"), [(64, 2112), (576, 257), (896, 257), (4096, 257), (5120, 257)]
)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(width: int, most: int) -> None:
    """vLLM's operator has other blocks below 256 rows. `most` is no multiple of the rows of a program."""
    x, residual, weight = random(most, width), random(most, width, seed=2), random(width, seed=1)
    whole = rms_norm(x, weight, EPSILON)
    for rows in (1, 7, 255) if most > 257 else (1, 7):
        assert torch.equal(rms_norm(x[:rows], weight, EPSILON), whole[:rows])
        assert torch.equal(rms_norm(x[-rows:], weight, EPSILON), whole[-rows:])
    summed = add_rms_norm(x[:9], residual[:9], weight, EPSILON)[0]
    assert torch.equal(add_rms_norm(x[:7], residual[:7], weight, EPSILON)[0], summed[:7])


def test_the_tile_follows_from_the_width() -> None:
    assert norm_tile(128) == (8, 128, 1) and norm_tile(576) == (1, 1024, 1)
    assert norm_tile(2048) == (1, 2048, 2) and norm_tile(5120) == (1, 8192, 8)


def test_heads_of_a_fused_projection() -> None:
    """The engine normalises views of q and k within the product of q, k and v, the trainer whole tensors."""
    tokens, heads, size = 37, 3, 64
    fused, weight = random(tokens, 5 * size), random(size, seed=1)
    query = fused[:, : heads * size].view(tokens, heads, size)
    key = fused[:, heads * size :].view(tokens, 2, size)
    for part in (query, key):
        assert not part.is_contiguous()
        output = rms_norm(part, weight, EPSILON)
        assert output.is_contiguous()
        assert torch.equal(output, rms_norm(part.contiguous(), weight, EPSILON))
        assert torch.equal(output[None], rms_norm(part[None], weight, EPSILON))
    odd = random(6, size + 3)[:, :size]  # rows that no load of 16 bytes can begin
    assert torch.equal(rms_norm(odd, weight, EPSILON), rms_norm(odd.clone(), weight, EPSILON))
    shifted = fused.view(-1)[3 : 3 + 2 * size].view(2, size)
    assert torch.equal(
        rms_norm(shifted, weight, EPSILON), rms_norm(shifted.clone(), weight, EPSILON)
    )
    one = fused[:1, :size].as_strided((1, size), (1, 1))
    assert torch.equal(rms_norm(one, weight, EPSILON), rms_norm(one.clone(), weight, EPSILON))


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 128), (255, 64), (9, 896), (3, 5120)])
def test_gradients_against_float64(rows: int, width: int) -> None:
    x, weight, grad = (
        random(rows, width, scale=2),
        random(width, seed=1),
        random(rows, width, seed=3),
    )
    exact_x, exact_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    exact_norm(exact_x, exact_weight).backward(grad.double())
    assert exact_x.grad is not None and exact_weight.grad is not None
    expected = exact_x.grad
    for backward in (rms_norm_backward, reference.rms_norm_backward):
        dx, dw = backward(grad, x, weight, EPSILON)
        assert dw is not None and dw.dtype == torch.float32
        size = expected.abs() + expected.abs().mean()  # differences of terms of this size
        assert ((dx.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()
        assert float((dw.double() - exact_weight.grad).norm()) < 1e-6 * rows * width**0.5
        same, nothing = backward(grad, x, weight, EPSILON, weight_too=False)
        assert torch.equal(same, dx) and nothing is None


def test_what_the_kernel_does_not_have_is_refused() -> None:
    weight = random(64)
    with pytest.raises(ValueError, match=r"built for BF16, not for torch\.float32"):
        rms_norm(random(2, 64).float(), weight, EPSILON)
    with pytest.raises(ValueError, match="multiple of 8 elements, up to 8192, not of 60"):
        rms_norm(random(2, 60), random(60), EPSILON)
    with pytest.raises(ValueError, match="does not fit rows of 128"):
        rms_norm(random(2, 128), weight, EPSILON)
    with pytest.raises(ValueError, match="same shape and dtype"):
        add_rms_norm(random(2, 64), random(1, 64), weight, EPSILON)


def test_no_rows() -> None:
    nothing, weight = random(0, 64), random(64)
    assert rms_norm(nothing, weight, EPSILON).shape == (0, 64)
    dx, dw = rms_norm_backward(nothing, nothing, weight, EPSILON)
    assert dx.shape == (0, 64) and dw is not None and not dw.any()
