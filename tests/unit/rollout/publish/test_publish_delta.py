"""Delta publishes without vLLM: equal to full ones, and every fault of them is refused or healed by a full one."""

from __future__ import annotations

import pytest
import torch
from publish_streams import Engine, feed_in_buckets, flip, lose, twice, weights

from qarl.errors import UserError
from qarl.rollout.remote.delta import Tally
from qarl.rollout.remote.records import BEGIN, COMMIT, UNIT, TransferFailed, read_record, record
from qarl.rollout.remote.wire import DeltaSender

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
V = "model.layers.0.self_attn.v_proj.weight"


def moved(tensors: list, seed: int = 0, share: float = 0.01) -> list:
    """New tensors with a few other bits."""
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for name, tensor in tensors:
        tensor = tensor.detach().clone()
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor.view(torch.int16)[chosen] ^= 1
        changed.append((name, tensor))
    return changed


def test_deltas_end_where_full_publishes_end():
    engine, tensors = Engine(), weights("llama")
    whole, first = sum(tensor.nbytes for _, tensor in tensors), engine.publish(tensors, 1)
    assert not first.known and first.bytes > whole and first.metrics() == {}
    for version in range(2, 8):
        before, tensors = tensors, moved(tensors, seed=version)
        report = engine.publish(tensors, version)
        assert engine.has(tensors) and engine.receiver.weights.version == version
        assert report.known and report.bytes < 0.15 * whole
        count = sum(int((a[1] != b[1]).sum()) for a, b in zip(before, tensors, strict=True))
        assert report.metrics()["publish/changed_words"] == count > 0
        assert report.metrics()["publish/changed_frac"] == count / sum(
            t.numel() for _, t in tensors
        )
    report = engine.publish(tensors, 8)
    assert (
        report.known
        and report.metrics()["publish/changed_words"] == 0
        and engine.receiver.weights.version == 8
    )
    tensors = moved(
        tensors, seed=9, share=0.3
    )  # with many changes, their positions are sent as a mask
    assert 0.35 * whole < engine.publish(tensors, 9).bytes < 0.4 * whole and engine.has(tensors)
    everything = [(name, -tensor) for name, tensor in tensors]
    report = engine.publish(everything, 10)
    assert report.known and whole <= report.bytes < 1.3 * whole and engine.has(everything)


def test_an_engine_that_lost_its_weights_gets_all_of_them():
    """As verl's engines, which discard their weights while they sleep."""
    engine, tensors = Engine(), weights("llama")
    engine.publish(tensors, 1)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    assert engine.publish(tensors, 2).known and engine.has(tensors)


def swap_contents(stream):
    """The payloads of two tensors of one shape, each under the other's name."""
    items = list(stream)
    at = {name: i for i, (name, _) in enumerate(items)}
    items[at[K]], items[at[V]] = (K, items[at[V]][1]), (V, items[at[K]][1])
    return iter(items)


def lose_a_unit(stream):
    items = list(stream)
    unit = [i for i, (name, _) in enumerate(items) if name == UNIT]
    return iter(items[: unit[0] + 1] + items[unit[1] + 1 :])


def other_base(stream):
    for name, tensor in stream:
        yield (
            record(BEGIN, read_record(BEGIN, tensor) | {"base": "0" * 32})
            if name == BEGIN
            else (name, tensor)
        )


def never_announced(stream):
    """A changed tensor is lost, and its entry in the unit's record too."""
    for name, tensor in stream:
        if name == UNIT:
            content = read_record(UNIT, tensor)
            content["digests"].pop(Q, None)
            name, tensor = record(UNIT, content)
        if name != Q:
            yield name, tensor


FAULTS = {
    "never announced": (never_announced, "the engine.s tensors differ from version 2"),
    "lost": (lose(Q), "did not arrive as it was sent"),
    "lost unit": (lose_a_unit, "is not complete"),
    "lost begin": (lose(BEGIN), "outside of a publish"),
    "lost end": (lose(COMMIT), "ended before its last record"),
    "repeated": (twice, "arrived twice"),
    "swapped": (swap_contents, "was damaged|cannot be applied"),
    "flipped bit": (flip(Q, at=17), f"{Q} was damaged"),
    "flipped bit in a position": (
        flip(Q),
        f"{Q} (was damaged|: )|changes of {Q} cannot be applied",
    ),
    "flipped bit in a header": (flip(Q, at=0), f"changes of {Q} cannot be applied"),
    "wrong base": (other_base, "do not apply to the tensors that the engine has kept"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_and_the_next_publish_heals_it(fault):
    engine, tensors = Engine(), weights("llama")
    engine.publish(tensors, 1)
    now = moved(tensors)
    transport, message = FAULTS[fault]
    engine.transport = transport
    with pytest.raises(Exception, match=message):
        engine.publish(now, 2)
    assert engine.receiver.stale and engine.receiver.fingerprint is None
    engine.transport = iter
    report = engine.publish(now, 2)
    assert not report.known and engine.has(now) and engine.receiver.weights.version == 2
    later = moved(now, seed=3)
    assert engine.publish(later, 3).known and engine.has(later)


def test_damage_of_a_cached_word_that_did_not_change_is_noticed():
    """Only the checksum of the whole tensor shows it; the payload arrives as it was sent."""
    engine, tensors = Engine(), weights("llama")
    engine.publish(tensors, 1)
    now = [(name, tensor + (name == Q)) for name, tensor in tensors]
    engine.receiver._weights.cache.tensors[K].view(torch.uint8).view(-1)[5] ^= 1
    with pytest.raises(TransferFailed, match=f"{K} was damaged"):
        engine.publish(now, 2)
    engine.publish(now, 2)
    assert engine.has(now)


class Remote:
    """A sender and its receiver as in two processes: nothing is shared, and buffers are used again."""

    def __init__(self) -> None:
        self.engine = Engine(clone=True)

    def stream(self, tensors: list, version: int):
        fingerprint = self.engine.receiver.fingerprint
        return list(self.engine.sender.stream(tensors, version=version, receivers=[fingerprint]))

    def feed(self, stream: list) -> None:
        feed_in_buckets(self.engine.receiver, stream)


def test_changes_of_another_version_are_refused():
    """An old delta once more, and one that skips a publish. The engine keeps what it needs to be healed."""
    remote, tensors = Remote(), weights("llama")
    streams = []
    for version in (1, 2, 3):
        streams.append(remote.stream(tensors, version))
        remote.feed(streams[-1])
        tensors = moved(tensors, seed=version)
    with pytest.raises(TransferFailed, match="changes of version 2 do not apply"):
        remote.feed(streams[1])
    assert remote.engine.receiver.stale
    remote.feed(remote.stream(tensors, 4))
    assert remote.engine.has(tensors)


@pytest.mark.parametrize(
    "fingerprints", [[], [None], ["0" * 32], ["same", None], ["same", "0" * 32]]
)
def test_one_receiver_in_doubt_means_all_tensors_for_all(fingerprints):
    sender, tensors = DeltaSender(), weights("llama")
    list(sender.stream(tensors, version=1, receivers=[None]))
    answers = [sender.cache.fingerprint if answer == "same" else answer for answer in fingerprints]
    begin = next(iter(sender.stream(tensors, version=2, receivers=answers)))
    assert read_record(*begin)["base"] is None
    list(sender.stream(tensors, version=2, receivers=answers))
    stream = list(sender.stream(tensors, version=3, receivers=[sender.cache.fingerprint] * 2))
    assert read_record(*stream[0])["base"] is not None


def test_a_sender_that_stops_half_way_sends_all_tensors_next():
    sender, tensors = DeltaSender(), weights("llama")
    list(sender.stream(tensors, version=1, receivers=[None]))
    fingerprint, now = sender.cache.fingerprint, moved(tensors)
    stream = sender.stream(now, version=2, receivers=[fingerprint])
    next(stream), next(stream)
    assert sender.cache.fingerprint is None
    assert (
        read_record(*next(iter(sender.stream(now, version=2, receivers=[fingerprint]))))["base"]
        is None
    )


@pytest.mark.parametrize("known", [False, True])
def test_a_sender_reads_one_unit_at_a_time_and_all_before_it_refuses_nan(known):
    """The other ranks of a trainer gather each tensor together with the one that sends it."""
    sender, tensors, read = DeltaSender(), dict(weights("llama")), []

    def gathered():
        for name, tensor in tensors.items():
            read.append(name)
            yield name, tensor + torch.nan

    list(sender.stream(tensors.items(), version=1, receivers=[None]))
    stream = sender.stream(
        gathered(), version=2, receivers=[sender.cache.fingerprint if known else None]
    )
    assert next(stream)[0].startswith(BEGIN)
    assert any(name == UNIT for name, _ in stream)
    assert sender.tally.known == known and len(read) == 2, (
        "the embedding, and the first of the next unit"
    )
    with pytest.raises(UserError, match="hold NaN or Inf"):
        list(stream)
    assert read == list(tensors)


def test_nan_in_the_engine_and_failed_checks_leave_no_base():
    engine, tensors = Engine(), weights("llama")
    for spoil in (
        lambda: engine.receiver.mark_stale("NaN"),
        lambda: engine.receiver.weights.abort("vLLM failed"),
    ):
        engine.publish(tensors, 1)
        spoil()
        assert engine.receiver.fingerprint is None and not engine.publish(tensors, 2).known


def test_the_tally_counts_codes_and_scales_apart():
    tally = Tally()
    assert tally.metrics() == {}
    tally.known = True
    codes, scales = torch.zeros(64, 8, dtype=torch.int32), torch.ones(64, 2, dtype=torch.bfloat16)
    tally.add("a.weight_packed", codes, 4)
    tally.add("a.weight_scale", scales, 32)
    tally.add("a.weight_shape", torch.tensor([64, 64]), 0)
    tally.add("norm.weight", torch.ones(64), 1)
    assert tally.metrics() == {
        "publish/changed_words": 37.0,
        "publish/changed_frac": 37 / (512 + 128 + 64),
        "publish/changed_codes_frac": 4 / 512,
        "publish/changed_scales_frac": 0.25,
    }
