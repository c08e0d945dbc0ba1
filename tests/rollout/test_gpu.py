"""A GPU that vLLM and the trainer share, without a GPU: what is refused, with which numbers and reasons."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qarl.checks.run import checks_for
from qarl.errors import UserError
from qarl.quant.scheme import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def batch_invariance(backend: str) -> None:
    for check in checks_for(backend):
        if check.name == "batch invariance":
            check.make(SimpleNamespace())  # type: ignore[arg-type]  # it looks at no input


@pytest.mark.parametrize("value", ["1", " 1", "2"])
def test_batch_invariance_is_refused_in_the_trainers_process(
    value: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    with pytest.raises(UserError, match=r"(?s)trainer's process.*torch\.bmm.*gradients.*unset VLLM_BATCH_INVARIANT"):
        batch_invariance("local")
    batch_invariance("verl")  # its engines have processes of their own
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    batch_invariance("local")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_batch_invariance_nothing_is_refused(
    value: str | None, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    batch_invariance("local")


def test_an_engine_in_a_program_of_ones_own_refuses_it_too(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UserError, match="batch-invariant mode"):
        RolloutEngine(EngineConfig("nowhere", get_scheme("w4a16"), ("lm_head",), 64))
