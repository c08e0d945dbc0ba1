"""The router's product against float64, and tokens whose logits do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from triton_checks import assert_one_rounding
from triton_rig import DEVICE

from qarl.kernels.triton.router import router_logits


@pytest.mark.parametrize(
    ("tokens", "columns", "experts"), [(1, 128, 4), (65, 256, 128), (30, 200, 70)], ids=str
)
def test_logits(tokens: int, columns: int, experts: int) -> None:
    """The last shape has no whole tile, and an x whose rows are strided."""
    torch.manual_seed(0)
    x = torch.randn(tokens, columns + 8).bfloat16()[:, :columns]
    weight = torch.randn(experts, columns).bfloat16()
    logits = router_logits(x.to(DEVICE), weight.to(DEVICE))
    exact = x.double() @ weight.double().t()
    assert_one_rounding(logits, exact, x.double().abs() @ weight.double().abs().t())


def test_a_tokens_logits_do_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(size, 384, device=DEVICE).bfloat16() for size in (600, 8))
    whole = router_logits(x, weight)
    for cut in ([1, 16, 64, 65, 454], [599, 1]):
        assert torch.equal(torch.cat([router_logits(part, weight) for part in x.split(cut)]), whole)
