"""A scheme of a plugin whose operands no kernel has: refused before anything is loaded, until its file has a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_helpers import config

from qarl.checks.registry import check_run
from qarl.errors import UserError
from qarl.kernels import registry
from qarl.kernels.base import LinearKernel
from qarl.kernels.registry import check_experts_registered, choose_linear_kernel
from qarl.schemes import register, unregister
from qarl.schemes.base import Operands
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.w4a16 import W4A16

OPERANDS = Operands("int6", "bf16")


class W6A16(W4A16):
    name = "w6a16"

    @property
    def operands(self) -> Operands:
        return OPERANDS


class SixBits(LinearKernel):
    name = "six_bits"
    operands = OPERANDS
    options = (KernelChoice.QARL,)

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None


@pytest.fixture(autouse=True)
def _scheme() -> Iterator[None]:
    register(W6A16)
    yield
    unregister(W6A16.name)


@pytest.fixture
def _kernel() -> Iterator[None]:
    registry.register(SixBits)
    yield
    registry.unregister(SixBits.name)


def errors(tmp_path, *overrides: str) -> str:
    """The errors of the checks that a run makes before it loads its model, which does not exist here."""
    run = config(tmp_path, "quant.scheme=w6a16", "quant.group_size=32", *overrides)
    with pytest.raises(UserError) as caught:
        check_run(run)
    return str(caught.value)


@pytest.mark.parametrize("kernels", ["engine", "qarl"])
def test_the_checks_name_the_fix(tmp_path, kernels: str) -> None:
    said = errors(tmp_path, f"quant.kernels={kernels}")
    assert (
        f"no kernel of quant.kernels={kernels} multiplies int6 weights by bf16 activations" in said
    )
    assert "kernels multiply float8 by float8, int4 by bf16, int4 by int8, int8 by int8" in said
    assert "register a kernel with these operands in the scheme's file" in said
    assert "examples/own_kernel.py" in said


@pytest.mark.usefixtures("_kernel")
def test_a_kernel_of_another_choice_is_named(tmp_path) -> None:
    assert "set quant.kernels=qarl" in errors(tmp_path, "quant.kernels=engine")


@pytest.mark.usefixtures("_kernel")
def test_with_a_kernel_the_checks_pass(tmp_path) -> None:
    chosen = choose_linear_kernel(
        W6A16(32), torch.device("cpu"), (64, 64), kernels=KernelChoice.QARL
    )
    assert chosen.kernel is SixBits


def test_experts_are_refused_with_the_same_fix() -> None:
    with pytest.raises(
        UserError, match=r"(?s)no kernel of experts multiplies int6.*own_kernel\.py"
    ):
        check_experts_registered(W6A16(32))
