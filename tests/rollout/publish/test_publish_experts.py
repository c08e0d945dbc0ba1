"""Faults of a publish in the tensors of one expert: each is refused before the engine is touched, and the next good
publish gives back exactly what the engine generated before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, greedy
from random_moe import IGNORE, save_random_moe, wire_tensors
from same_bytes import same_bytes

from qarl.errors import UserError
from qarl.quant import get_scheme
from qarl.quant.expert_names import stacked
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish.send import encode_publish
from qarl.rollout.publish.wire import TransferFailed

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

EXPERT = "model.layers.1.mlp.experts.3"
SCHEMES = ["w4a16", "w8a8", pytest.param("fp8", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)]
Tensors = list[tuple[str, torch.Tensor]]


class World(NamedTuple):
    """`part` is the name of up_proj's scale, or of its weight in BF16, and `weight` the one of down_proj's weight."""

    engine: RolloutEngine
    good: Tensors
    other: Tensors
    expected: Any
    part: str
    weight: str


@pytest.fixture(scope="module", params=SCHEMES)
def world(request: Any, tmp_path_factory: Any) -> Iterator[World]:
    """A W8A8 engine without one scale answers plausible numbers; a W4A16 one NaN."""
    scheme = get_scheme(request.param, 32)
    folder = save_random_moe(tmp_path_factory.mktemp("models") / "moe")
    good, other = (list(wire_tensors(folder, scheme, noise_seed=seed).items()) for seed in (None, 1))
    config = EngineConfig(str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        engine.publish(good, version=1)
        part = f"{EXPERT}.up_proj.{'weight_scale' if scheme.quantized else 'weight'}"
        weight = f"{EXPERT}.down_proj.{'weight_packed' if scheme.name == 'w4a16' else 'weight'}"
        yield World(engine, good, other, greedy(engine), part, weight)


def without(tensors: Tensors, *names: str) -> Tensors:
    return [(n, t) for n, t in tensors if n not in names]


def renamed(tensors: Tensors, name: str, to: str) -> Tensors:
    return [(to if n == name else n, t) for n, t in tensors]


def changed(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return [(n, change(t) if n == name else t) for n, t in tensors]


ROUTER = "model.layers.1.mlp.gate.weight"
FAULTS: dict[str, tuple[Callable[[Tensors, World], Tensors], str]] = {
    "a part is missing": (lambda t, w: without(t, w.part), "{part}: missing"),
    "a whole expert is missing": (
        lambda t, w: without(t, *(n for n, _ in t if n.startswith(f"{EXPERT}."))),
        "{part}: missing",
    ),
    "named as another expert's": (
        lambda t, w: renamed(t, w.part, w.part.replace("experts.3", "experts.4")),
        r"experts\.4\.up_proj\.\w+: sent twice; {part}: missing",
    ),
    "stacked": (
        lambda t, w: [*t, ("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 128, 128))],
        "gate_up_proj: not a tensor of this model",
    ),
    "NaN in a part": (lambda t, w: changed(t, w.part, lambda x: x * float("nan")), "{part}: holds NaN or Inf"),
    "the weight transposed": (
        lambda t, w: changed(t, w.weight, lambda x: x.t().contiguous()),
        "{weight}: is .* the engine expects",
    ),
}


def state(engine: RolloutEngine) -> list[Any]:
    """What the engine multiplies by: its parameters, and for low-bit experts what the kernel made of them."""
    found: list[Any] = [p.detach().clone() for p in engine.model().parameters()]
    for block in engine.model().model.layers:  # type: ignore[union-attr, arg-type]  # vLLM's modules
        experts = block.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts  # type: ignore[union-attr]  # as above
        found.append(getattr(experts, "prepared", None))
    return found


def unchanged(before: Any, after: Any) -> bool:
    return before is after or (isinstance(before, torch.Tensor) and same_bytes(before, after))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_before_the_engine_is_touched(world: World, fault: str) -> None:
    spoil, message = FAULTS[fault]
    before = state(world.engine)
    message = message.format(part=re.escape(world.part), weight=re.escape(world.weight))
    with pytest.raises(UserError, match=message):
        world.engine.publish(spoil(world.other, world), version=9)
    assert all(unchanged(*pair) for pair in zip(before, state(world.engine), strict=True))
    assert world.engine.stale
    with pytest.raises(UserError, match=r"(?s)refuses to generate.*publish of version 9 did not complete"):
        world.engine.generate(PROMPTS, SamplingConfig(4))
    world.engine.publish(world.good, version=1)
    assert greedy(world.engine) == world.expected


STACK = "model.layers.1.mlp.experts.gate_up_proj"
Stream = list[tuple[str, torch.Tensor]]


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """One bit of expert 3."""
    tensor = tensor.clone()
    tensor[3].view(torch.uint8).view(-1)[-1] ^= 1
    return tensor


def from_layer(stream: Stream, name: str, layer: int) -> Stream:
    """The tensor `name` with the bytes that belong to another layer."""
    other = dict(stream)[name.replace("layers.1", f"layers.{layer}")]
    return [(n, other if n == name else t) for n, t in stream]


DAMAGE: dict[str, tuple[Callable[[Stream, str, Stream], Stream], str]] = {
    "a stack is lost": (lambda s, n, _: without(s, n), r"layers\.1 did not arrive(?s:.*)lost: \['{name}'\]"),
    "bytes of one expert are flipped": (lambda s, n, _: changed(s, n, flipped), "{name} was damaged"),
    "a stack of another layer": (lambda s, n, _: from_layer(s, n, 2), "{name} was damaged"),
    "a stack of another version": (lambda s, n, old: changed(s, n, lambda _: dict(old)[n]), "{name} was damaged"),
    "two experts are swapped": (lambda s, n, _: changed(s, n, lambda t: t.flip(0)), "{name} was damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("leaf", ["weight", "scale"])
def test_a_stack_damaged_on_the_way(world: World, damage: str, leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the other weights are written by then."""
    spoil, message = DAMAGE[damage]
    old = dict(encode_publish(world.good, version=1))
    names = [name for name in old if name.startswith(STACK)]
    name = names[-1] if leaf == "scale" else names[0]
    monkeypatch.setattr(world.engine, "transport", lambda stream: spoil(list(stream), name, list(old.items())))
    with pytest.raises(TransferFailed, match=message.format(name=re.escape(name))):
        world.engine.publish(world.other, version=7)
    monkeypatch.undo()
    assert world.engine.stale
    world.engine.publish(world.good, version=1)
    assert greedy(world.engine) == world.expected


def nearby(tensors: Tensors, word: int) -> Tensors:
    """Another bit in one word of each of expert 3's tensors of up_proj, in two layers."""
    found = []
    for name, tensor in tensors:
        if re.search(r"layers\.[12]\.mlp\.experts\.3\.up_proj\.weight(_packed|_scale)?$", name):
            tensor = tensor.clone()
            tensor.view(torch.uint8).view(-1)[word * tensor.itemsize] ^= 1
        found.append((name, tensor))
    return found


def other_value(payload: torch.Tensor) -> torch.Tensor:
    payload = payload.clone()
    payload[16] ^= 2
    return payload


DAMAGED_CHANGES: dict[str, tuple[Callable[[Stream, str, Stream], Stream], str]] = {
    "changes of a stack are lost": DAMAGE["a stack is lost"],
    "bytes of one expert are flipped": (lambda s, n, _: changed(s, n, other_value), "{name} was damaged"),
    "changes of another version": DAMAGE["a stack of another version"],
    "the whole stack of another version": (
        lambda s, n, old: changed(s, n, lambda _: dict(old)[f"whole {n}"]),
        "the changes of {name} cannot be applied",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_CHANGES)
@pytest.mark.parametrize("leaf", ["weight", "scale"])
def test_changes_of_a_stack_damaged_on_the_way(
    world: World, damage: str, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next publish sends all tensors."""
    spoil, message = DAMAGED_CHANGES[damage]
    monkeypatch.setattr(world.engine, "config", replace(world.engine.config, delta=True))
    world.engine.publish(world.good, version=1)
    other = nearby(world.good, word=5)
    earlier = list(encode_publish(other, version=2, keep=True, base=world.engine.receiver.cache))
    earlier += [(f"whole {n}", tensor) for n, tensor in stacked(other)]
    name = [n for n, _ in earlier if n.startswith(STACK)][-1 if leaf == "scale" else 0]

    def transport(stream: Any) -> Any:
        sent = list(stream)
        assert dict(sent)[name].dtype == torch.uint8, "no changes"
        return iter(spoil(sent, name, earlier))

    with monkeypatch.context() as patch, pytest.raises(TransferFailed, match=message.format(name=re.escape(name))):
        patch.setattr(world.engine, "transport", transport)
        world.engine.publish(nearby(world.good, word=2), version=3)
    assert world.engine.stale
    report = world.engine.publish(world.good, version=4)
    assert not report.is_delta and greedy(world.engine) == world.expected


def test_stacks_and_matrices_are_one_publish(world: World) -> None:
    """The engine takes the tensors of a checkpoint and those of `packed_state_dict(model, stacks=True)`."""
    world.engine.publish(world.other, version=2)
    second = greedy(world.engine)
    report = world.engine.publish(world.good, version=3)
    assert greedy(world.engine) == world.expected != second
    assert world.engine.publish(stacked(world.good), version=4).tensors == report.tensors < len(world.good)
    assert greedy(world.engine) == world.expected
    with pytest.raises(UserError, match=rf"{STACK}\.\w+: is .* the engine expects"):
        world.engine.publish([(n, t[1:] if n.startswith(STACK) else t) for n, t in stacked(world.good)], version=5)
    world.engine.publish(world.good, version=1)
