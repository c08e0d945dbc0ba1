"""Layers that FSDP2 gathers in low bits, on 1 to 4 gloo ranks, against the same layers on one process without FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from same_bytes import same_bytes
from sharded_layers import GROUP, IGNORE, SCHEMES, WORLDS, Model, loss_of, make_input, make_model

from qarl.quant import get_scheme, packed_state_dict, quantize_model

pytestmark = pytest.mark.long

CASES = pytest.mark.parametrize(("world", "scheme"), list(product(WORLDS, SCHEMES)))
Results = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    output = tmp_path_factory.mktemp("ranks") / "output"
    run_ranks("sharded_layers.py", 4, output)
    reports = [torch.load(f"{output}.{rank}", weights_only=False) for rank in range(4)]
    return lambda world, scheme: [reports[rank][world, scheme] for rank in range(world)]


def local_model(scheme: str, masters: dict[str, torch.Tensor] | None = None) -> Model:
    """The model on one process, in BF16."""
    model = make_model()
    if masters is not None:
        model.load_state_dict(masters)
    model.bfloat16()
    quantize_model(model, scheme=get_scheme(scheme, GROUP), ignore=IGNORE)
    return model


def local_gradients(scheme: str, inputs: list[int]) -> list[dict[str, torch.Tensor]]:
    """The BF16 gradients of each input alone."""
    gradients = []
    for number in inputs:
        model = local_model(scheme)
        loss_of(model(make_input(number)), number).backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    return gradients


@CASES
def test_the_forward_is_bit_equal_to_one_process(results: Results, world: int, scheme: str) -> None:
    with torch.no_grad():
        expected = local_model(scheme)(make_input(0))
    for rank in results(world, scheme):
        assert torch.equal(rank["output"], expected) and torch.equal(rank["bf16_masters"], expected)
        assert torch.equal(rank["moved_output"], rank["second_output"])


@CASES
def test_gradients_are_the_mean_of_the_ranks(results: Results, world: int, scheme: str) -> None:
    """Each rank's BF16 gradient has the bits of one process. The ranks' gradients are added in FP32, whose order is the
    backend's: 3 roundings of at most half a unit of 2^-23 for each of the at most 3 additions and the division."""
    parts = local_gradients(scheme, list(range(world)))
    for rank in results(world, scheme):
        assert rank["gradients"].keys() == parts[0].keys()
        for name in parts[0]:
            each = torch.stack([part[name].double() for part in parts])
            error = (rank["gradients"][name].double() - each.mean(0)).abs()
            assert bool((error <= 4 * 2**-24 * each.abs().mean(0)).all()), name
            if world == 1:
                assert torch.equal(rank["gradients"][name], each[0].float()), name


@CASES
def test_micro_batches_accumulate(results: Results, world: int, scheme: str) -> None:
    """FSDP2 adds FP32 sums of the ranks, or without synchronisation each rank adds its BF16 gradients first."""
    parts = local_gradients(scheme, [*range(world), *range(4, 4 + world)])
    for rank in results(world, scheme):
        for gradients, bound in zip(rank["accumulated"], (2**-21, 2**-8), strict=True):
            for name in parts[0]:
                each = torch.stack([part[name].double() for part in parts])
                error = (gradients[name].double() - 2 * each.mean(0)).abs()
                assert bool((error <= bound * 2 * each.abs().mean(0)).all()), name


@CASES
def test_what_is_published_is_what_one_process_publishes(
    results: Results, world: int, scheme: str
) -> None:
    expected = dict(packed_state_dict(local_model(scheme), stacks=True))
    for rank in results(world, scheme):
        for published in (rank["published"], rank["unconverted"]):
            assert published.keys() == expected.keys()
            for name, tensor in expected.items():
                assert same_bytes(published[name], tensor), name


@CASES
def test_an_update_changes_forward_and_publish(results: Results, world: int, scheme: str) -> None:
    for rank in results(world, scheme):
        model = local_model(scheme, rank["masters"])
        with torch.no_grad():
            assert torch.equal(rank["second_output"], model(make_input(0)))
        assert not torch.equal(rank["second_output"], rank["output"])
        published = dict(packed_state_dict(model, stacks=True))
        for tensors in (rank["second_published"], *rank["checkpointed"]):
            assert tensors.keys() == published.keys()
            assert all(same_bytes(tensors[name], tensor) for name, tensor in published.items())


@CASES
def test_each_rank_quantizes_once_per_update_and_clips_by_the_whole_norm(
    results: Results, world: int, scheme: str
) -> None:
    """Gathered tensors are freed after the forward."""
    for rank in results(world, scheme):
        assert (
            set(rank["before"]) == {1} and set(rank["after"]) == {2} and set(rank["third"]) == {3}
        )
        assert (
            all(rank["moved"])
            and len(rank["stored_bytes"]) == 8
            and set(rank["stored_bytes"]) == {0}
        )
        expected = torch.stack(
            [tensor.double().norm() for tensor in rank["gradients"].values()]
        ).norm()
        assert float(rank["norm"]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_marlins_layout_is_made_once_and_gathered(results: Results, world: int) -> None:
    """Two blocks have two stacks each. Experts are gathered in the layout (a stand-in of the kernel reads no other),
    and loss, gradients and publish are those of the wire tensors. Three experts leave some ranks padding.

    With recomputation, a block's kernel runs once, because nothing after it is saved."""
    for wire, marlin in results(world, "marlin"):
        assert marlin["before"] == [4, 0] and marlin["after"] == [4, 2]
        assert torch.equal(wire["loss"], marlin["loss"])
        for part in ("gradients", "published"):
            assert wire[part].keys() == marlin[part].keys()
            assert all(
                same_bytes(marlin[part][name], tensor) for name, tensor in wire[part].items()
            )


def padded(shape: torch.Size, world: int) -> int:
    return -(-shape[0] // world) * shape[1:].numel()


@pytest.mark.parametrize(("world", "scheme"), list(product(WORLDS[1:], SCHEMES)))
def test_the_bytes_of_quantized_weights_on_the_wire(
    results: Results, world: int, scheme: str
) -> None:
    """Codes and scales, and for all other parameters BF16. FSDP2 pads every shard to the first one's rows."""
    expected = 0
    for name, parameter in make_model().named_parameters():
        numbers = padded(parameter.shape, world)
        if parameter.dim() == 1 or name.startswith("head"):
            expected += 2 * numbers
        elif scheme == "w4a16":
            expected += numbers // 2 + 2 * numbers // GROUP
        else:
            expected += numbers + 4 * numbers // parameter.shape[-1]
    assert [rank["sent"] for rank in results(world, scheme)] == [expected] * world


@CASES
def test_a_bad_weight_on_one_rank_is_an_error_on_all(
    results: Results, world: int, scheme: str
) -> None:
    first, *others = (rank["nan"] for rank in results(world, scheme))
    assert all("values of blocks.0.experts.down_proj are NaN or Inf" in text for text in first)
    assert all(
        "rank 0 could not quantize its part of the weights" in text
        for texts in others
        for text in texts
    )


def test_a_weight_that_changes_between_forward_and_backward_is_refused(results: Results) -> None:
    for scheme in SCHEMES:
        assert results(1, scheme)[0]["changed"].startswith("blocks.0.wide.weight has changed")
