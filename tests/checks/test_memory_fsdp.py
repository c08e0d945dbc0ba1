"""What the memory plan assumes of FSDP2: one input of a reduce-scatter, which outlives its block's backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, WIDE = 4, 64


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Inputs:
    """A reduce-scatter that does nothing. `alive`: how many inputs were alive when each was made, and at each call."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        if made.numel() == WIDE * WIDE:
            assert dtype == torch.float32
            self.alive.append(self.count())
            self.made.append(weakref.ref(made))
        return made

    def count(self) -> int:
        return sum(ref() is not None for ref in self.made)

    def __call__(self, *tensors: Any, **options: Any) -> None:
        return None


def test_fsdp2_frees_an_input_before_it_makes_the_next() -> None:
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)))
    policy, inputs = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), Inputs()
    during: list[int] = []
    for block in model:
        fully_shard(block, mp_policy=policy)
        block.set_custom_reduce_scatter(inputs)
        block.register_full_backward_pre_hook(lambda *_: during.append(inputs.count()))
    fully_shard(model, mp_policy=policy)
    model(torch.randn(2, WIDE, requires_grad=True)).sum().backward()
    assert inputs.alive == [0, 0, 0, 0], "an input was alive when the next one was made"
    assert during == [0, 1, 1, 1], "the former block's is alive in the backward"
