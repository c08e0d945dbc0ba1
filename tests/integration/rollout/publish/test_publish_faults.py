"""Faults of a publish, one after another on one running engine, dense and with experts.

After each: a clear error, an engine that refuses to generate, and a later good publish that gives back exactly what it
generated before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, greedy
from random_models import save_random_model
from random_moe import IGNORE, save_random_moe, wire_tensors
from same_bytes import same_bytes

from qarl.errors import UserError
from qarl.quant import get_scheme
from qarl.quant.experts import stacked
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.records import COMMIT, TransferFailed
from qarl.rollout.remote.wire import DeltaSender, encode_publish

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
STACK = "model.layers.1.mlp.experts.gate_up_proj"
LINEAR = "model.layers.1.self_attn.k_proj"
Tensors = list[tuple[str, torch.Tensor]]
SLOW = pytest.mark.slow
MODELS = [
    "dense-w4a16",
    "experts-w4a16",
    "experts-w8a8",
    pytest.param("experts-fp8", marks=SLOW),
    pytest.param("experts-bf16", marks=SLOW),
]


class World(NamedTuple):
    """`part`: a scale, or a weight in BF16. `sent`: how it and its weight are named on the wire."""

    engine: RolloutEngine
    good: Tensors
    other: Tensors
    expected: Any
    part: str
    sent: dict[str, str]


@pytest.fixture(scope="module", params=MODELS)
def world(request: Any, tmp_path_factory: Any) -> Iterator[World]:
    """A W8A8 engine without one scale answers plausible numbers; a W4A16 one NaN."""
    kind, name = request.param.split("-")
    scheme, dense = get_scheme(name, 32), kind == "dense"
    folder = (save_random_model if dense else save_random_moe)(
        tmp_path_factory.mktemp("models") / kind
    )
    good, other = (
        list(wire_tensors(folder, scheme, noise_seed=seed).items()) for seed in (None, 1)
    )
    owner, on_the_wire = (LINEAR, LINEAR) if dense else (EXPERT, STACK)
    scale = "weight_scale" if scheme.quantized else "weight"
    sent = {"weight": f"{on_the_wire}.{'weight_packed' if name == 'w4a16' else 'weight'}"}
    sent["scale"] = f"{on_the_wire}.{scale}"
    config = EngineConfig(str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        engine.publish(good, version=1)
        yield World(engine, good, other, greedy(engine), f"{owner}.{scale}", sent)


def check_recovery(world: World, because: str) -> None:
    assert world.engine.stale and world.engine.weight_version is None
    with pytest.raises(UserError, match=rf"(?s)refuses to generate.*{because}"):
        world.engine.generate(PROMPTS, SamplingConfig(4))
    world.engine.publish(world.good, version=1)
    assert world.engine.weight_version == 1
    assert greedy(world.engine) == world.expected


def without(tensors: Tensors, name: str) -> Tensors:
    return [(n, t) for n, t in tensors if n != name]


def changed(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return [(n, change(t) if n == name else t) for n, t in tensors]


def of_another_layer(tensors: Tensors, name: str) -> Tensors:
    return [(n.replace("layers.1", "layers.0") if n == name else n, t) for n, t in tensors]


FAULTS: dict[str, tuple[Callable[[Tensors, str], Tensors], str]] = {
    "missing": (without, "{part}: missing"),
    "not of this model": (
        lambda t, _: [*t, ("model.extra", torch.zeros(1))],
        r"model\.extra: not a tensor of this",
    ),
    "sent twice": (lambda t, _: [*t, t[0]], "sent twice"),
    "named as another layer's": (of_another_layer, "sent twice; {part}: missing"),
    "another dtype": (
        lambda t, n: changed(t, n, torch.Tensor.half),
        "{part}: is float16 .* the engine expects",
    ),
    "transposed": (
        lambda t, n: changed(t, n, lambda x: x.t().contiguous()),
        "{part}: is .* the engine expects",
    ),
    "NaN": (lambda t, n: changed(t, n, lambda x: x * float("nan")), "{part}: holds NaN or Inf"),
}


def state(engine: RolloutEngine) -> list[Any]:
    """What the engine multiplies by: its parameters, and for low-bit experts what the kernel made of them."""
    kernels = [
        getattr(getattr(m, "quant_method", None), "moe_kernel", None)
        for m in engine.model().modules()
    ]
    prepared = [
        getattr(kernel.fused_experts, "prepared", None) for kernel in kernels if kernel is not None
    ]
    return [*(p.detach().clone() for p in engine.model().parameters()), *prepared]


def unchanged(before: Any, after: Any) -> bool:
    return before is after or (isinstance(before, torch.Tensor) and same_bytes(before, after))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_before_the_engine_is_touched(world: World, fault: str) -> None:
    spoil, message = FAULTS[fault]
    before = state(world.engine)
    with pytest.raises(UserError, match=message.format(part=re.escape(world.part))):
        world.engine.publish(spoil(list(world.other), world.part), version=9)
    assert all(unchanged(*pair) for pair in zip(before, state(world.engine), strict=True))
    check_recovery(world, "publish of version 9 did not complete")


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[-1] ^= 1
    return tensor


def break_off(stream: Tensors, name: str, _: Any) -> Any:
    for item in stream:
        if item[0] == name:
            raise ConnectionResetError("the other end hung up")
        yield item


Damage = tuple[Callable[[Tensors, str, dict[str, torch.Tensor]], Any], str]
"""A function of a stream, a name in it and the stream of another version; and the error."""
DAMAGE: dict[str, Damage] = {
    "lost": (lambda s, n, _: without(s, n), r"layers\.1 did not arrive(?s:.*)lost: \['{name}'\]"),
    "flipped": (lambda s, n, _: changed(s, n, flipped), "{name} was damaged"),
    "of another version": (lambda s, n, old: changed(s, n, lambda _: old[n]), "{name} was damaged"),
    "no end": (lambda s, *_: without(s, COMMIT), ""),
    "breaks off": (break_off, "hung up"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("leaf", ["weight", "scale"])
def test_damage_on_the_way(world: World, damage: str, leaf: str) -> None:
    """Half of the other weights may be in the engine by then. tests/unit/rollout/publish has records that are lost."""
    spoil, message = DAMAGE[damage]
    name, old = world.sent[leaf], dict(encode_publish(stacked(world.good), version=1))
    receiver, stream = receiver_of(world), list(encode_publish(stacked(world.other), version=7))
    if damage == "no end":
        receiver.feed(spoil(stream, name, old))
    else:
        with pytest.raises(
            (TransferFailed, ConnectionResetError), match=message.format(name=re.escape(name))
        ):
            receiver.feed(spoil(stream, name, old))
    check_recovery(world, "publish of version 7 did not complete")


def receiver_of(world: World) -> StreamReceiver:
    """The receiver of a real engine, which takes streams as in a process of its own."""
    assert world.engine.weights is not None
    return StreamReceiver(world.engine.weights)


def nearby(tensors: Tensors, word: int) -> Tensors:
    """Another bit in one word of each tensor of a matrix."""
    moved = []
    for name, tensor in tensors:
        if name.startswith((LINEAR, EXPERT)) and not name.endswith("shape"):
            tensor = tensor.clone()
            tensor.view(torch.uint8).view(-1)[word * tensor.itemsize] ^= 1
        moved.append((name, tensor))
    return moved


def other_value(payload: torch.Tensor) -> torch.Tensor:
    payload = payload.clone()
    payload[16] ^= 2
    return payload


@pytest.mark.parametrize("leaf", ["weight", "scale"])
def test_changes_damaged_on_the_way(world: World, leaf: str) -> None:
    """The next publish sends all tensors. tests/unit/rollout/publish/test_publish_delta.py has the other damages."""
    name, receiver, sender = world.sent[leaf], receiver_of(world), DeltaSender()
    receiver.feed(sender.stream(stacked(world.good), version=1, receivers=[receiver.fingerprint]))
    near = stacked(nearby(world.good, word=2))
    changes = list(sender.stream(near, version=3, receivers=[receiver.fingerprint]))
    assert dict(changes)[name].dtype == torch.uint8, "no changes"
    with pytest.raises(TransferFailed, match=f"{re.escape(name)} was damaged"):
        receiver.feed(changed(changes, name, other_value))
    assert world.engine.stale
    receiver.feed(sender.stream(stacked(world.good), version=4, receivers=[receiver.fingerprint]))
    assert not sender.tally.known and greedy(world.engine) == world.expected


def test_the_tensors_themselves_fail_to_come(world: World) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from world.other[:20]
        raise OSError("the optimizer's disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        world.engine.publish(tensors(), version=7)
    check_recovery(world, "publish of version 7 did not complete: OSError")


def test_a_nan_in_the_engine_leaves_nothing_behind(world: World) -> None:
    """The KV cache stays NaN under good weights until it is zeroed, and attention reads masked places too."""
    if world.part.startswith(EXPERT):
        pytest.skip("a router chooses nothing from NaN")
    receiver: Any = world.engine.weights
    world.engine.model().get_parameter("model.norm.weight").data.fill_(1.0)
    world.engine.model().get_parameter("model.layers.0.input_layernorm.weight").data.fill_(
        float("nan")
    )
    with pytest.raises(FloatingPointError, match="not finite"):
        greedy(world.engine)
    assert any(bool(cache.isnan().any()) for cache in receiver.kv_caches())
    check_recovery(world, "log-prob that is not finite")
    assert not any(bool(cache.isnan().any()) for cache in receiver.kv_caches())


def test_stacks_and_matrices_are_one_publish(world: World) -> None:
    """The engine takes the tensors of a checkpoint and those of `packed_state_dict(model, stacks=True)`."""
    world.engine.publish(world.other, version=2)
    second = greedy(world.engine)
    report = world.engine.publish(stacked(world.good), version=3)
    assert greedy(world.engine) == world.expected != second
    assert report.tensors == world.engine.publish(world.good, version=1).tensors
