"""Attention within rows, by family: a packed forward against transformers' own on each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import LENGTHS, random_model
from torch import nn

from benchmarks.proofs.counting import counting
from qarl.align.packed_attention import (
    ROWS_ATTENTION,
    attends_in_rows,
    lengths_of_rows,
    use_rows_attention,
    varlen_attention,
)
from qarl.config.level import Level
from qarl.errors import UserError
from qarl.families import ALIGNED, MEASURED, check_rows, family_named
from qarl.quant import get_scheme
from qarl.trainer.policy import Policy


def sharpened(model: Any, cap: float) -> None:
    """Let Gemma 2's soft-cap count: scores are 20 times as large."""
    model.config.attn_logit_softcapping = cap
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
        layer.self_attn.scaling *= 20


@pytest.mark.parametrize(
    ("family", "cap"), [*((family, None) for family in (*ALIGNED, *MEASURED)), ("gemma2", 5.0)]
)
@torch.no_grad()
def test_a_packed_or_padded_row_is_the_row_alone(family, cap):
    """Told by positions alone, as verl does, and by `row_lengths`; FP32, so that only leaks and positions count."""
    model = random_model(family)
    if cap is not None:
        sharpened(model, cap)
    ids = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    if family_named(family).packs:
        model.set_attn_implementation("eager")  # transformers' sdpa drops Gemma 2's soft-cap
    alone = torch.cat(
        [model(input_ids=row, use_cache=False).logits for row in ids.split(LENGTHS, 1)], 1
    )
    if family_named(family).packs:
        model.set_attn_implementation("sdpa")
    whole = model(input_ids=ids, use_cache=False).logits
    assert (whole - alone).abs().max() > 0.1, "rows that see each other must give other logits"
    assert use_rows_attention(model) == attends_in_rows(model) == family_named(family).packs
    if not family_named(family).packs:
        return
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    padded = torch.cat(
        [nn.functional.pad(row, (0, max(LENGTHS) - row.shape[1])) for row in ids.split(LENGTHS, 1)]
    )
    for arguments in ({}, {"row_lengths": LENGTHS}):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
        rows = model(
            input_ids=padded, attention_mask=(padded > 0).long(), use_cache=False, **arguments
        ).logits
        unpadded = torch.cat([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])[
            None
        ]
        torch.testing.assert_close(unpadded, alone, rtol=1e-4, atol=1e-4)


def test_rows_that_attention_cannot_tell_apart_are_not_packed():
    config = random_model("falcon").config
    with pytest.raises(
        UserError, match=r"rows of falcon cannot be packed[\s\S]*set model.use_remove_padding=false"
    ):
        check_rows(config, packed=True)
    check_rows(config, packed=False)
    check_rows(random_model("mistral").config, packed=True)
    policy = Policy(random_model("falcon"), get_scheme("bf16"), ("lm_head",), align=Level.OFF)
    assert not policy.packed
    assert Policy(random_model("mistral"), get_scheme("bf16"), ("lm_head",), align=Level.OFF).packed


@torch.no_grad()
def test_plain_and_masked_forwards_are_transformers_own():
    """Full rows, a mask for padding on the left, and generation with a cache."""
    plain, rows = random_model("mistral"), random_model("mistral")
    use_rows_attention(rows)
    assert rows.config._attn_implementation == ROWS_ATTENTION
    ids = torch.randint(1, 64, (3, 24), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for arguments in ({}, {"attention_mask": mask}):
        assert torch.equal(
            rows(input_ids=ids, **arguments).logits, plain(input_ids=ids, **arguments).logits
        )
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(rows.generate(ids, **how), plain.generate(ids, **how))


def random_rows(batch: int, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(batch, heads, tokens, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [(1, (5, 6)), (1, (13,)), (2, (12,)), (2, (12, 13)), (1, (12, 0)), (3, (4, 4, 4, 4))],
)
def test_lengths_of_other_rows_are_refused(batch, lengths):
    query, key, _ = random_rows(batch, 12)
    with pytest.raises(ValueError, match=f"do not fit a forward of {batch} x 12"):
        lengths_of_rows(query, key, {"row_lengths": lengths})


def test_lengths_come_from_positions_that_start_again():
    query, key, _ = random_rows(1, 6)
    for positions, expected in (
        ([0, 1, 0, 0, 1, 2], (2, 1, 3)),
        ([0, 1, 2, 3, 4, 5], None),
        ([3, 4, 0, 1, 2, 3], (2, 4)),
    ):
        assert lengths_of_rows(query, key, {"position_ids": torch.tensor([positions])}) == expected
    assert lengths_of_rows(query[:, :, :1], key, {"position_ids": torch.tensor([[5]])}) is None


def test_the_host_reads_positions_once_a_forward(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor))
    query, key, _ = random_rows(1, 6)
    positions = torch.tensor([[0, 1, 0, 0, 1, 2]])
    for _ in range(2):
        assert lengths_of_rows(query, key, {"position_ids": positions}) == (2, 1, 3)
    assert len(reads) == 1
    positions[0, 1:4] = torch.tensor([1, 2, 3])
    assert lengths_of_rows(query, key, {"position_ids": positions}) == (4, 2) and len(reads) == 2
    assert lengths_of_rows(query, key, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}) == (
        3,
        2,
        1,
    )


def test_the_second_layer_copies_nothing_to_the_device():
    query, key, value = (
        torch.empty(1, heads, 70, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    counts = []
    for _ in range(2):
        with counting() as counter:
            varlen_attention(query, key, value, (30, 39, 1), 0.25, None)
        counts.append((counter.counts.copies, counter.counts.syncs, counter.counts.kernels))
    assert counts == [(1, 0, 1), (0, 0, 1)]
