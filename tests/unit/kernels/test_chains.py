"""The references of the elementwise chains against autograd in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from qarl.kernels import chains


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def assert_rounded_once(output: torch.Tensor, exact: Any) -> None:
    assert output.dtype == torch.bfloat16
    error = (output.double() - exact).abs()
    assert (error <= exact.abs() * (2**-8 + 1e-5) + 1e-6).all()


def test_the_gradient_of_swiglu() -> None:
    grad, gate, up = random(9, 80), random(9, 80, seed=1, scale=3), random(9, 80, seed=2)
    leaves = [tensor.double().requires_grad_() for tensor in (gate, up)]
    (F.silu(leaves[0]) * leaves[1]).backward(grad.double())
    for output, leaf in zip(chains.silu_and_mul_backward(grad, gate, up), leaves, strict=True):
        assert_rounded_once(output, leaf.grad)


def test_turns_and_their_gradient() -> None:
    """As complex numbers: a turn is a product with e^(i angle), and its gradient the product with e^(-i angle)."""
    angles = torch.tensor([[0.0, 1.0], [2.0, -0.5], [3.0, 0.25]])
    cosines, sines = (
        torch.cat([part, part], -1)[None].bfloat16() for part in (angles.cos(), angles.sin())
    )
    x = random(2, 3, 5, 4)
    turns = torch.complex(cosines[..., :2].double(), sines[..., :2].double())[:, :, None]
    for back, factor in ((False, turns), (True, turns.conj())):
        exact = torch.complex(*x.double().chunk(2, -1)) * factor
        output = chains.turn(x, cosines, sines, back=back)
        assert_rounded_once(output, torch.cat([exact.real, exact.imag], -1))


def test_the_gradient_of_log_probs() -> None:
    logits, tokens, grad = random(6, 40, scale=4), torch.tensor([0, 36, 5, 7, 7, 1]), torch.randn(6)
    logits[:, 37:] = -1e30  # no tokens
    leaf = logits.double().requires_grad_()
    scaled = leaf / 0.7
    scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0].backward(grad.double())
    log_sums = scaled.logsumexp(-1).float().detach()
    output = chains.log_softmax_backward(logits, log_sums, tokens, grad, temperature=0.7)
    assert_rounded_once(output, leaf.grad)
    assert not output[:, 37:].count_nonzero()
