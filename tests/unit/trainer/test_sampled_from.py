"""Tokens that end a turn are left out of its first softmaxes, as vLLM's sampler leaves them out."""

from __future__ import annotations

import pytest
import torch

from qarl.kernels.log_probs import LogitsInBlocks, WholeLogits
from qarl.kernels.sampling_masks import Truncation, pack, packed_without, unpack
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.layout import lay_out
from qarl.trainer.sampled_from import leave_out_early_ends, sampled_from
from qarl.turns.conversation import Conversation, Sampled

ENDS = (2, 9)
WORDS = 11


def batch_of(conversations: list[Conversation] | None = None) -> Batch:
    responses = [[3, 4, 5, 6, 7], [8, 2]]
    rollout = RolloutBatch(
        [[1], [1]],
        responses,
        [[-1.0] * len(row) for row in responses],
        ["stop", "stop"],
        0,
        conversations=conversations,
    )
    return make_batch(rollout, torch.zeros(2), torch.ones(2), pad_token_id=0)


def logits_of(batch: Batch) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(int(batch.response_lengths.sum()), WORDS)


def test_packed_without() -> None:
    rows = torch.tensor([True, False])
    mask = unpack(packed_without(ENDS, rows, WORDS), WORDS)
    assert (~mask).nonzero().tolist() == [[0, 2], [0, 9]]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("top_k", [-1, 4])
def test_the_log_probs_of_vllms_logits(in_blocks: bool, top_k: int) -> None:
    """Beside the steps of vLLM's sampler: ends to -inf, then the temperature, then top-k."""
    batch = batch_of()
    leave_out_early_ends(batch, 2, ENDS[1:])
    layout = lay_out(batch, slice(0, 2))
    tokens = layout.of_responses(batch.responses)
    whole = logits_of(batch)
    logits: WholeLogits | LogitsInBlocks = WholeLogits(whole)
    if in_blocks:
        logits = LogitsInBlocks(whole, torch.eye(WORDS))
    truncation = Truncation(top_k=top_k)
    mask = sampled_from(batch, slice(0, 2), layout, logits, tokens, truncation, 0.5)
    ours, _ = logits.log_probs(tokens, temperature=0.5, mask=mask)

    theirs = whole.clone()
    early = torch.tensor([0, 1, 5, 6])  # of five and two tokens
    theirs[early, ENDS[1]] = -torch.inf
    theirs = theirs / 0.5
    if top_k > 0:
        least = theirs.topk(top_k, dim=1).values[:, -1:]
        inside = theirs >= least
        inside.scatter_(1, tokens[:, None], True)  # `outside`: a sampled token stays
        theirs = theirs.masked_fill(~inside, -torch.inf)
    expected = theirs.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(ours, expected)
    if top_k > 0:
        stored = sampled_from(batch, slice(0, 2), layout, logits, tokens, None, 0.5)
        assert torch.equal(stored, mask)


def test_without_the_key_there_is_no_mask() -> None:
    batch = batch_of()
    layout = lay_out(batch, slice(0, 2))
    tokens = layout.of_responses(batch.responses)
    logits = WholeLogits(logits_of(batch))
    assert sampled_from(batch, slice(0, 2), layout, logits, tokens, Truncation(), 1.0) is None


def test_each_turn_has_its_own_first_tokens() -> None:
    first, second = Conversation([1]), Conversation([1])
    first.add_turn(Sampled([3, 4], [-1.0] * 2, "stop"), "")
    first.add_context([], [5])
    first.add_turn(Sampled([6, 7], [-1.0] * 2, "stop"), "")
    second.add_turn(Sampled([8, 2], [-1.0] * 2, "stop"), "")
    batch = batch_of([first, second])
    leave_out_early_ends(batch, 1, ENDS)
    assert batch.before_min_tokens is not None
    assert batch.before_min_tokens.int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 0]]
    assert batch.to(torch.device("cpu")).ends == ENDS


def test_a_mask_is_one_bit_an_entry() -> None:
    mask = torch.ones(3, WORDS, dtype=torch.bool)
    assert torch.equal(
        unpack(packed_without((), torch.ones(3, dtype=torch.bool), WORDS), WORDS), mask
    )
    assert packed_without(ENDS, torch.ones(3, dtype=torch.bool), WORDS).shape == pack(mask).shape
