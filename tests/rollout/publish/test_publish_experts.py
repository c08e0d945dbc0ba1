"""Faults of a publish in the tensors of one expert: each is refused before the engine is touched, and the next good
publish gives back exactly what the engine generated before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, greedy
from random_moe import IGNORE, save_random_moe, wire_tensors

from qarl.errors import UserError
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish.wire import TransferFailed

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

EXPERT = "model.layers.1.mlp.experts.3"
SCALE = f"{EXPERT}.up_proj.weight_scale"
Tensors = list[tuple[str, torch.Tensor]]


class World(NamedTuple):
    engine: RolloutEngine
    good: Tensors
    other: Tensors
    expected: Any
    weight: str


@pytest.fixture(scope="module", params=["w4a16", "w8a8"])
def world(request: Any, tmp_path_factory: Any) -> Iterator[World]:
    """A W8A8 engine without one scale answers plausible numbers; a W4A16 one NaN."""
    scheme = get_scheme(request.param, 32)
    folder = save_random_moe(tmp_path_factory.mktemp("models") / "moe")
    good, other = (list(wire_tensors(folder, scheme, noise_seed=seed).items()) for seed in (None, 1))
    config = EngineConfig(str(folder), scheme, IGNORE, max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        engine.publish(good, version=1)
        leaf = "weight_packed" if scheme.name == "w4a16" else "weight"
        yield World(engine, good, other, greedy(engine), f"{EXPERT}.down_proj.{leaf}")


def renamed(tensors: Tensors, name: str, to: str) -> Tensors:
    return [(to if n == name else n, t) for n, t in tensors]


def changed(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return [(n, change(t) if n == name else t) for n, t in tensors]


FAULTS: dict[str, tuple[Callable[[Tensors, str], Tensors], str]] = {
    "a scale is missing": (lambda t, w: [item for item in t if item[0] != SCALE], f"{SCALE}: missing"),
    "a weight is missing": (lambda t, w: [item for item in t if item[0] != w], "down_proj.weight.*: missing"),
    "a whole expert is missing": (
        lambda t, w: [i for i in t if not i[0].startswith(f"{EXPERT}.")],
        f"{SCALE}: missing",
    ),
    "doubled": (lambda t, w: [*t, *(item for item in t if item[0] == SCALE)], f"{SCALE}: sent twice"),
    "named as another expert's": (
        lambda t, w: renamed(t, SCALE, SCALE.replace("experts.3", "experts.4")),
        rf"experts\.4\.up_proj\.weight_scale: sent twice; {SCALE}: missing",
    ),
    "of an expert too many": (
        lambda t, w: renamed(t, SCALE, SCALE.replace("experts.3", "experts.8")),
        r"experts\.8\.up_proj\.weight_scale: not a tensor of this model",
    ),
    "stacked": (
        lambda t, w: [*t, ("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 128, 128))],
        "gate_up_proj: not a tensor of this model",
    ),
    "NaN in a scale": (lambda t, w: changed(t, SCALE, lambda s: s * float("nan")), f"{SCALE}: holds NaN or Inf"),
    "one scale too few": (lambda t, w: changed(t, SCALE, lambda s: s[:-1].clone()), f"{SCALE}: is .* expects"),
    "the weight transposed": (lambda t, w: changed(t, w, lambda x: x.t().contiguous()), "is .* the engine expects"),
    "a scale of another dtype": (lambda t, w: changed(t, SCALE, torch.Tensor.half), f"{SCALE}: is float16"),
    "the router's weight is missing": (
        lambda t, w: [item for item in t if item[0] != "model.layers.1.mlp.gate.weight"],
        r"mlp\.gate\.weight: missing",
    ),
}


def state(engine: RolloutEngine) -> list[Any]:
    """What the engine multiplies by: its parameters, and for experts what the kernel made of them."""
    found: list[Any] = [p.detach().clone() for p in engine.model().parameters()]
    for block in engine.model().model.layers:  # type: ignore[union-attr, arg-type]  # vLLM's modules
        found.append(block.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts.prepared)  # type: ignore[union-attr]  # as above
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_before_the_engine_is_touched(world: World, fault: str) -> None:
    spoil, message = FAULTS[fault]
    before = state(world.engine)
    with pytest.raises(UserError, match=message):
        world.engine.publish(spoil(world.other, world.weight), version=9)
    after = state(world.engine)
    assert all(
        a is b or (isinstance(a, torch.Tensor) and torch.equal(a, b)) for a, b in zip(before, after, strict=True)
    )
    assert world.engine.stale
    with pytest.raises(UserError, match=r"(?s)refuses to generate.*publish of version 9 did not complete"):
        world.engine.generate(PROMPTS, SamplingConfig(4))
    world.engine.publish(world.good, version=1)
    assert greedy(world.engine) == world.expected


@pytest.mark.parametrize("what", ["lost", "flipped"])
def test_an_experts_tensor_damaged_on_the_way(world: World, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers before it are written by then."""

    def transport(stream: Any) -> Any:
        for name, tensor in stream:
            if name == SCALE and what == "lost":
                continue
            if name == SCALE:
                tensor = tensor.clone()
                tensor.view(torch.uint8).view(-1)[-1] ^= 1
            yield name, tensor

    monkeypatch.setattr(world.engine, "transport", transport)
    with pytest.raises(TransferFailed, match=r"experts\.3\.up_proj\.weight_scale"):
        world.engine.publish(world.other, version=7)
    monkeypatch.undo()
    assert world.engine.stale
    world.engine.publish(world.good, version=1)
    assert greedy(world.engine) == world.expected
