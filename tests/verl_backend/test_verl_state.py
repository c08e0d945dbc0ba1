"""QaRL's record of a checkpoint: read only after verl has copied what it offloads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("verl")

from qarl.verl.plugin import state

pytestmark = pytest.mark.verl


def engine(module: nn.Module, optimizer: Any) -> Any:
    return SimpleNamespace(module=module, optimizer=optimizer, lr_scheduler=SimpleNamespace(state_dict=dict))


def test_copies_to_the_host_are_complete_before_they_are_read(monkeypatch):
    """With param_offload on a GPU the copies end only at the device's next synchronization. Here that is when they are
    made."""
    torch.manual_seed(1)
    module = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    expected = state.engine_state(engine(module, optimizer))
    pending: dict[torch.Tensor, torch.Tensor] = {}
    tensors = [*module.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
    with torch.no_grad():
        for tensor in tensors:
            pending[tensor] = tensor.clone()
            tensor.zero_()

    def synchronize() -> None:
        with torch.no_grad():
            for tensor, copy in pending.items():
                tensor.copy_(copy)

    assert state.engine_state(engine(module, optimizer)) != expected, "without an accelerator nothing is waited for"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    assert state.engine_state(engine(module, optimizer)) == expected
