"""Faults of a publish, one after another on one running engine.

After each: a clear error, an engine that refuses to generate, and a later good publish that gives back exactly what it
generated before.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import PROMPTS, SCHEME, greedy, load_model
from publish_streams import flip, lose, twice
from random_models import save_random_model

from qarl.errors import UserError
from qarl.quant import packed_state_dict
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.rollout.publish.wire import BEGIN, COMMIT, UNIT, TransferFailed

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]

SCALE = "model.layers.1.self_attn.k_proj.weight_scale"
PACKED = "model.layers.1.mlp.down_proj.weight_packed"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[tuple[RolloutEngine, list, list, object]]:
    """Engine, the tensors of two models, and what the engine generates from the first."""
    folder = save_random_model(tmp_path_factory.mktemp("models") / "qwen3")
    good = list(packed_state_dict(load_model(folder)))
    other = list(packed_state_dict(load_model(folder, noise_seed=1)))
    config = EngineConfig(str(folder), SCHEME, ("lm_head",), max_model_len=64, kv_cache_gib=0.25)
    with RolloutEngine(config) as engine:
        engine.publish(good, version=1)
        yield engine, good, other, greedy(engine)


def assert_refuses_and_recovers(engine, good, expected, because: str) -> None:
    assert engine.stale and engine.weight_version is None
    with pytest.raises(UserError, match=rf"(?s)refuses to generate.*{because}"):
        engine.generate(PROMPTS, SamplingConfig(4))
    engine.publish(good, version=1)
    assert engine.weight_version == 1
    assert greedy(engine) == expected


def without(tensors, name):
    return [(n, t) for n, t in tensors if n != name]


def replaced(tensors, name, change):
    return [(n, change(t) if n == name else t) for n, t in tensors]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: without(t, SCALE), f"{SCALE}: missing"),
        (lambda t: without(t, "model.norm.weight"), r"model\.norm\.weight: missing"),
        (lambda t: [*t, ("model.extra", torch.zeros(1))], r"model\.extra: not a tensor of this model"),
        (lambda t: [*t, t[0]], "sent twice"),
        (lambda t: replaced(t, SCALE, lambda s: s[:, :1].clone()), f"{SCALE}: is bfloat16 .* expects bfloat16"),
        (lambda t: replaced(t, SCALE, lambda s: s.float()), f"{SCALE}: is float32 .* expects bfloat16"),
        (lambda t: replaced(t, SCALE, lambda s: s * float("nan")), f"{SCALE}: holds NaN or Inf"),
        (lambda t: replaced(t, "lm_head.weight", lambda w: w / 0), r"lm_head\.weight: holds NaN or Inf"),
    ],
)
def test_tensors_that_do_not_fit(world, spoil, message):
    engine, good, other, expected = world
    with pytest.raises(UserError, match=message):
        engine.publish(spoil(list(other)), version=9)
    assert_refuses_and_recovers(engine, good, expected, "publish of version 9 did not complete")


def test_nothing_is_written_before_all_is_checked(world):
    engine, good, other, expected = world
    before = {name: p.detach().clone() for name, p in engine.model().named_parameters()}
    with pytest.raises(UserError, match="missing"):
        engine.publish(without(other, SCALE), version=9)
    assert all(torch.equal(p, before[name]) for name, p in engine.model().named_parameters())
    assert_refuses_and_recovers(engine, good, expected, "publish of version 9")


def swap_two(stream):
    items = list(stream)
    items[3], items[4] = items[4], items[3]
    return iter(items)


def break_at(name):
    def transport(stream):
        for item in stream:
            if item[0] == name:
                raise ConnectionResetError("the other end hung up")
            yield item

    return transport


def damaged_record(stream):
    return ((n, t[:-1] if n == UNIT else t) for n, t in stream)


@pytest.mark.parametrize(
    ("transport", "error", "message"),
    [
        (flip(PACKED), TransferFailed, rf"{PACKED} was damaged"),
        (flip(SCALE), TransferFailed, rf"{SCALE} was damaged"),
        (flip("lm_head.weight"), TransferFailed, r"lm_head\.weight was damaged"),
        (lose(PACKED), TransferFailed, rf"(?s)layers\.1 did not arrive as it was sent.*lost: \['{PACKED}'\]"),
        (lose(COMMIT), TransferFailed, "ended before its last record"),
        (lose(BEGIN), TransferFailed, "outside of a publish"),
        (lose(UNIT), TransferFailed, "(?s)not complete.*missing"),
        (swap_two, TransferFailed, "was damaged"),
        (twice, TransferFailed, r"layers\.0 arrived twice"),
        (damaged_record, TransferFailed, "did not arrive as it was sent"),
        (break_at(PACKED), ConnectionResetError, "hung up"),
    ],
)
def test_damage_on_the_way(world, monkeypatch, transport, error, message):
    """Half of the other weights may be in the engine by then."""
    engine, good, other, expected = world
    monkeypatch.setattr(engine, "transport", transport)
    with pytest.raises(error, match=message):
        engine.publish(other, version=7)
    monkeypatch.undo()
    assert_refuses_and_recovers(engine, good, expected, "publish of version 7 did not complete")


def test_the_tensors_themselves_fail_to_come(world):
    engine, good, other, expected = world

    def tensors():
        yield from other[:20]
        raise OSError("the optimizer's disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        engine.publish(tensors(), version=7)
    assert_refuses_and_recovers(engine, good, expected, "publish of version 7 did not complete: OSError")


def test_a_nan_in_the_engine_leaves_nothing_behind(world):
    """The KV cache stays NaN under good weights until it is zeroed, and attention reads masked places too."""
    engine, good, _, expected = world
    engine.model().get_parameter("model.norm.weight").data.fill_(1.0)
    engine.model().get_parameter("model.layers.0.input_layernorm.weight").data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        greedy(engine)
    assert any(bool(cache.isnan().any()) for cache in engine.receiver.kv_caches())
    assert_refuses_and_recovers(engine, good, expected, "log-prob that is not finite")
    assert not any(bool(cache.isnan().any()) for cache in engine.receiver.kv_caches())
