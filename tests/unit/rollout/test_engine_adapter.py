"""What an engine must have after a publish of an adapter, with an engine that loads it as vLLM does, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from qarl.config.lora import engine_rank
from qarl.errors import UserError
from qarl.lora.adapter import PREFIX, WEIGHTS_FILE, Adapter, read_adapter
from qarl.rollout.adapter_spec import AdapterSpec
from qarl.rollout.publish import adapters
from qarl.rollout.publish.adapters import EngineAdapter

WIDTH = 16
NAMES = [f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]


class Stacks(nn.Module):
    """A linear that vLLM has wrapped: it has places for adapters of the rank of the engine."""

    def __init__(self, parts: int, rank: int) -> None:
        super().__init__()
        shape = (1, 1, rank, WIDTH)
        self.lora_a_stacked = tuple(torch.zeros(shape).bfloat16() for _ in range(parts))
        self.lora_b_stacked = tuple(torch.zeros(1, 1, WIDTH, rank).bfloat16() for _ in range(parts))


class Block(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.qkv_proj = Stacks(3, rank)
        self.o_proj = Stacks(1, rank)


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012  as in vLLM

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(rank), Block(rank)])


class Engine:
    """It copies A and B into the stacks of `model`, as vLLM does, and scales B once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.loaded: set[int] = set()

    def add_lora(self, request: Any) -> None:
        adapter = read_adapter(Path(request.folder))
        tensors = load_file(Path(request.folder) / WEIGHTS_FILE)
        for name, (a, b) in adapters._stacks(self.model).items():
            a.zero_()
            b.zero_()
            if (key := f"{PREFIX}{name}.lora_A.weight") in tensors:
                stored = tensors[key], tensors[key.replace("lora_A", "lora_B")] * adapter.factor
                a[0, 0, : len(stored[0])] = stored[0]
                b[0, 0, :, : stored[1].shape[1]] = stored[1]
        self.loaded.add(request.lora_int_id)

    def remove_lora(self, number: int) -> None:
        self.loaded.remove(number)

    def list_loras(self) -> set[int]:
        return self.loaded


def adapter_of(names: list[str], r: int, alpha: int, targets: tuple[str, ...]) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in names:
        for part, shape in (("A", (r, WIDTH)), ("B", (WIDTH, r))):
            random = torch.randn(shape, generator=generator).bfloat16()
            tensors[f"{PREFIX}{name}.lora_{part}.weight"] = random
    return Adapter(r, alpha, targets, "base", tensors)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        adapters,
        "adapter_request",
        lambda name, number, folder: SimpleNamespace(
            lora_name=name, lora_int_id=number, folder=folder
        ),
    )


CASES = {
    "all linears": (NAMES, ("k_proj", "o_proj", "q_proj", "v_proj")),
    "q and v": ([n for n in NAMES if n[-6:] in ("q_proj", "v_proj")], ("q_proj", "v_proj")),
    "one layer": (NAMES[4:], tuple(NAMES[4:])),
    "q of one layer": (NAMES[:1], (NAMES[0],)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("r", "alpha"), [(3, 6), (8, 4), (12, 24)])
def test_an_adapter_of_any_rank_and_any_linears_arrives(name: str, r: int, alpha: int) -> None:
    names, targets = CASES[name]
    adapter = adapter_of(names, r, alpha, targets)
    rank = engine_rank(r)
    model = Model(rank)
    target = EngineAdapter(Engine(model), model, AdapterSpec.of(adapter.r, adapter.targets))
    target.publish(adapter.padded(), version=1)
    assert target.version == 1
    pairs = adapter.pairs()
    for linear, (a, b) in adapters._stacks(model).items():
        if linear not in pairs:
            assert not a.any() and not b.any()
            continue
        assert torch.equal(a[0, 0, :r], pairs[linear][0]) and not a[0, 0, r:].any()
        assert torch.equal(b[0, 0, :, :r], pairs[linear][1] * (alpha / r))


def test_an_adapter_without_padding_or_of_other_linears_does_not_fit() -> None:
    names, targets = CASES["q of one layer"]
    adapter = adapter_of(names, 12, 12, targets)
    model = Model(16)
    target = EngineAdapter(Engine(model), model, AdapterSpec.of(adapter.r, adapter.targets))
    with pytest.raises(UserError, match="the engine expects"):
        target.publish(adapter, version=1)
    more = adapter_of(NAMES[:2], 12, 12, tuple(NAMES[:2])).padded()
    with pytest.raises(UserError, match="not a tensor of this model"):
        target.publish(more, version=1)
    target.publish(adapter.padded(), version=1)
    assert target.version == 1


def test_a_linear_that_the_engine_has_no_place_for_is_refused() -> None:
    with pytest.raises(UserError, match="no place for an adapter of c_attn"):
        EngineAdapter(Engine(Model(8)), Model(8), AdapterSpec(8, ("q_proj", "c_attn")))
