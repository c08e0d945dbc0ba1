"""`quant.align=exact` on GPUs: what cuBLAS is asked for, and that nobody else gets it. No GPU has shown its effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.config.level import Level
from qarl.kernels.cuda import whole_sums


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    for name in whole_sums.VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    calls: list[Any] = []
    matmul = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", calls.append)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    calls.append(matmul)
    return calls


@pytest.mark.parametrize("level", Level)
def test_only_exact_asks(level: Level, asked: list[Any]) -> None:
    whole_sums.set_variables(asked=level.zero_mismatch)
    assert whole_sums.are_set() == level.zero_mismatch
    whole_sums.apply()
    matmul, *libraries = asked
    allowed = matmul.allow_bf16_reduced_precision_reduction
    assert (libraries, allowed) == (
        (["cublaslt"], (False, False)) if level.zero_mismatch else ([], True)
    )


def test_what_the_user_has_set_stays(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "32768")
    whole_sums.set_variables(asked=True)
    whole_sums.apply()
    assert not whole_sums.are_set() and len(asked) == 1
