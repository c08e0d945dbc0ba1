"""The tensors of a training step, and its micro-batches.

B: responses. T: tokens of the longest prompt plus response. R: tokens of the longest response.

A micro-batch has either a fixed number of rows (`actor.ppo_micro_batch_size_per_gpu`) or, if `actor.use_dynamic_bsz`
is set, a limit on its tokens (`actor.ppo_max_token_len_per_gpu`). These keys mean the same as in verl. The rows of a
micro-batch are packed into one forward [1, tokens] without padding (`qarl.trainer.layout`). Positions start at 0 in
each row, and attention stays within the row (`qarl.align.packed_attention`). So the cost of a forward depends on its
tokens, not on its longest row.

With a limit on tokens, a batch is split into as few micro-batches as possible, with nearly equal numbers of tokens.
Like verl (`rearrange_micro_batches` in verl/utils/seqlen_balancing.py) this uses the differencing method of Karmarkar
and Karp. verl balances an estimate of the work, with a term for the square of a row's length. QaRL balances tokens.

With `model.use_remove_padding=false`, rows are padded to the longest row of the batch instead. This is for debugging.
The log-probs of a row are the same in both layouts.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qarl.kernels.base import upload
from qarl.rollout.requests import RolloutBatch
from qarl.turns.conversation import Conversation, Span

if TYPE_CHECKING:
    from qarl.config import ActorConfig


@dataclass(frozen=True, eq=False)
class Pack:
    """Rows of a batch: their `numbers`, and `index`, which has the same numbers on the batch's device, int64 [rows]."""

    numbers: tuple[int, ...]
    index: torch.Tensor


Rows = slice | torch.Tensor | Pack
"""Rows of a batch. Of a tensor, int64 [rows], the host knows the numbers only after it has waited for the device."""


def index_of(rows: Rows) -> slice | torch.Tensor:
    """Return what selects `rows` from the first dimension of a batch's tensors."""
    return rows.index if isinstance(rows, Pack) else rows


class HostLengths(NamedTuple):
    """The number of tokens of each row's prompt, of its response, and of those that the model sampled."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    sampled: tuple[int, ...]


TOKEN_MULTIPLE = 64
"""A pack is filled up to a multiple of this number of tokens. PyTorch may compute a BF16 product of fewer than 17 rows
in another order, and on a CPU oneDNN prepares each product again for each number of rows (in
the quickstart 23 ms for a pack of a new size)."""


def request_seed(seed: int, step: int, index: int) -> int:
    """Return a sampling seed that depends only on the run's seed, the step and the request's index in the batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass
class Batch:
    """Tensors of all responses of one training step:

    input_ids                    int64 [B, T]; prompt, then response, then padding
    prompt_lengths               int64 [B]
    response_lengths             int64 [B]; in a conversation with the tokens of the environment
    responses                    int64 [B, R]
    response_mask                bool [B, R]; the tokens that the model sampled
    rollout_log_probs            FP32 [B, R]
    rewards, advantages          FP32 [B]
    rollout_top_tokens           int64 [B, R] or None; the engine's likeliest token at each position
    sampling_mask                uint8 [B, R, packed_width(V)] or None; packed masks of the tokens that top-k and top-p
                                 left in the pass for the old log-probs (`qarl.kernels.log_probs`)
    before_min_tokens            bool [B, R] or None; True where the engine sampled none of the tokens `ends`, because
                                 the turn had fewer than `rollout.min_tokens` tokens
    outside                      bool [B, R] or None; True if the trainer's top-k and top-p did not leave this token
    routed_experts               int16 [B, T, layers, k] or None; the experts of each token in the rollout, -1 if
                                 unknown (only in a mixture of experts)
    weights                      FP32 [B, R] or None; the weights of `rollout_correction.rollout_is`
    reference_log_probs          FP32 [B, R] or None; those of the reference policy of the KL term
    other_experts                bool [B, T] or None; True if, in the pass for the old log-probs, the trainer's own
                                 routers chose different experts for the token than the rollout
    routing_compared             bool [B] or None; the rows that `other_experts` covers
    finish_reasons               why each response ended, in vLLM's words, or None
    conversations                the conversation that each response is, or None if there was no environment
    later_prefills               start and end in its row of each part of a conversation that the engine prefilled after
                                 a turn, or None if the trainer need not follow them
    """

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    responses: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    weight_version: int
    rollout_top_tokens: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None
    before_min_tokens: torch.Tensor | None = None
    ends: tuple[int, ...] = ()
    outside: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    other_experts: torch.Tensor | None = None
    routing_compared: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    reference_log_probs: torch.Tensor | None = None
    finish_reasons: list[str | None] | None = None
    conversations: list[Conversation] | None = None
    later_prefills: list[tuple[Span, ...]] | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with every tensor on `device`."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        moved = replace(self, **tensors)
        moved.host_lengths = self.host_lengths  # the host need not ask the other device
        return moved

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: tokens of prompt and response of each row."""
        return self.prompt_lengths + self.response_lengths

    @cached_property
    def host_lengths(self) -> HostLengths:
        """The lengths of the rows on the host, which asks the device for them once."""
        sampled = self.response_mask.sum(1)
        lengths = torch.stack([self.prompt_lengths, self.response_lengths, sampled])
        return HostLengths(*map(tuple, lengths.tolist()))

    def numbers(self, rows: Rows) -> Sequence[int]:
        """Return the numbers of `rows`."""
        if isinstance(rows, Pack):
            return rows.numbers
        if isinstance(rows, slice):
            return range(len(self))[rows]
        numbers: list[int] = rows.tolist()
        return numbers

    def pack(self, *packs: Sequence[int]) -> list[Pack]:
        """Return the rows of each of `packs`. One copy, which the host does not wait for, has the numbers of all."""
        sizes = [len(numbers) for numbers in packs]
        every = torch.tensor([*chain(*packs)], dtype=torch.int64)
        indices = upload(every, self.input_ids.device).split(sizes)
        return [Pack(tuple(numbers), index) for numbers, index in zip(packs, indices, strict=True)]

    def set_sampling_mask(self, rows: Rows, packed: torch.Tensor, outside: torch.Tensor) -> None:
        """Set `sampling_mask` and `outside` of `rows`: uint8 [rows, R, packed_width(V)] and bool [rows, R]."""
        if self.sampling_mask is None or self.outside is None:
            self.sampling_mask = packed.new_zeros(*self.responses.shape, packed.shape[2])
            self.outside = outside.new_zeros(self.responses.shape)
        index = index_of(rows)
        self.sampling_mask[index] = packed
        self.outside[index] = outside

    def parts_of(self, rows: Rows) -> list[tuple[Span, ...]]:
        """Return `later_prefills` of `rows`."""
        assert self.later_prefills is not None
        return [self.later_prefills[number] for number in self.numbers(rows)]

    def note_routing(self, rows: Rows, differing: torch.Tensor) -> None:
        """Store `differing`, bool [rows, T]: True if the trainer's routers chose other experts than the rollout."""
        if self.other_experts is None or self.routing_compared is None:
            self.other_experts = torch.zeros_like(self.input_ids, dtype=torch.bool)
            self.routing_compared = torch.zeros_like(self.prompt_lengths, dtype=torch.bool)
        index = index_of(rows)
        self.other_experts[index] = differing
        self.routing_compared[index] = True

    def micro_batches(self, size: int, *, start: int = 0, stop: int | None = None) -> list[slice]:
        """Return slices of at most `size` rows that together cover the rows from `start` to `stop`."""
        stop = len(self) if stop is None else stop
        return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def make_batch(
    rollout: RolloutBatch, rewards: torch.Tensor, advantages: torch.Tensor, *, pad_token_id: int
) -> Batch:
    """Return the batch of a rollout. Its tensors are padded on the right; a forward packs their rows
    (`lay_out`)."""
    sequences = [
        prompt + response
        for prompt, response in zip(
            rollout.prompt_token_ids, rollout.response_token_ids, strict=True
        )
    ]
    total = max(map(len, sequences))
    response_lengths = torch.tensor([len(response) for response in rollout.response_token_ids])
    width = max(1, int(response_lengths.max()))
    if rollout.conversations is None:
        mask = torch.arange(width)[None, :] < response_lengths[:, None]
    else:
        masks = [conversation.mask for conversation in rollout.conversations]
        mask = _pad(masks, width, 0, torch.bool)
    top = rollout.top_token_ids
    routed = rollout.routed_experts
    return Batch(
        input_ids=_pad(sequences, total, pad_token_id, torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt in rollout.prompt_token_ids]),
        response_lengths=response_lengths,
        responses=_pad(rollout.response_token_ids, width, pad_token_id, torch.int64),
        response_mask=mask,
        rollout_log_probs=_pad(rollout.rollout_log_probs, width, 0.0, torch.float32),
        rewards=rewards,
        advantages=advantages,
        weight_version=rollout.weight_version,
        rollout_top_tokens=None if top is None else _pad(top, width, pad_token_id, torch.int64),
        routed_experts=None if routed is None else _pad(routed, total, -1, torch.int16),
        finish_reasons=list(rollout.finish_reasons),
        conversations=rollout.conversations,
        later_prefills=_later_prefills(rollout.conversations),
    )


def _later_prefills(conversations: Sequence[Conversation] | None) -> list[tuple[Span, ...]] | None:
    """Return those of conversations in sessions, which the trainer's attention follows."""
    if conversations is None or not all(each.in_session for each in conversations):
        return None
    return [conversation.later_prefills for conversation in conversations]


def _pad(
    rows: Sequence[Sequence[float] | torch.Tensor], width: int, value: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers or tensors [tokens, ...] of all responses as one [B, width, ...], filled up with `value`."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    shape = (len(rows), width, *tensors[0].shape[1:])
    padded = torch.full(shape, value, dtype=dtype)
    for i, row in enumerate(tensors):
        padded[i, : len(row)] = row
    return padded


def micro_batches(
    batch: Batch,
    actor: ActorConfig,
    *,
    log_probs: bool = False,
    start: int = 0,
    stop: int | None = None,
    only: torch.Tensor | None = None,
) -> list[Rows]:
    """Return the micro-batches that together cover the rows from `start` to `stop`, each row once.

    `log_probs`: whether they are for the old log-probs, whose micro-batches have separate config keys. `only`: cover
    these rows instead, int64 [rows].
    """
    chosen: Sequence[int] = range(start, len(batch) if stop is None else stop)
    if only is not None:
        chosen = only.tolist()
    if actor.use_dynamic_bsz:
        limit = actor.ppo_max_token_len_per_gpu
        if log_probs:
            limit = actor.log_prob_max_token_len_per_gpu or limit
        assert limit is not None
        known = batch.host_lengths
        lengths = [known.prompts[row] + known.responses[row] for row in chosen]
        return [*batch.pack(*([chosen[i] for i in pack] for pack in fill(lengths, limit)))]
    size = (
        actor.log_prob_micro_batch_size_per_gpu if log_probs else actor.ppo_micro_batch_size_per_gpu
    )
    assert size is not None  # the config was checked
    if only is None:
        return [*batch.micro_batches(size, start=start, stop=stop)]
    return [*batch.pack(*(chosen[i : i + size] for i in range(0, len(chosen), size)))]


def fill(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Distribute rows over packs of at most `limit` tokens. Use the fewest packs for which `balanced` keeps the limit.

    Return the row numbers of each pack in ascending order. The packs are ordered by their first row. The same `lengths`
    always give the same packs.

    Raises:
        ValueError: a row has more than `limit` tokens.
    """
    if lengths and max(lengths) > limit:
        raise ValueError(
            f"a row of {max(lengths)} tokens does not fit into a micro-batch of {limit} tokens"
        )
    for count in range(-(-sum(lengths) // limit), len(lengths) + 1):
        packs = balanced(lengths, count)
        if all(sum(lengths[row] for row in pack) <= limit for pack in packs):
            return packs
    return []


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into `count` sets of nearly equal sums by the differencing method of Karmarkar and Karp.

    Each row starts as a partition into `count` sets, one with the row and the others empty. In each step, the two most
    uneven partitions are joined: the largest set of one with the smallest set of the other, and so on.
    """
    Sets = list[tuple[int, list[int]]]
    heap: list[tuple[int, int, Sets]] = []
    for row, length in enumerate(lengths):
        sets: Sets = [(length, [row])]
        sets += [(0, []) for _ in range(count - 1)]
        heapq.heappush(heap, (-length, row, sets))
    while len(heap) > 1:
        _, first, largest = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined: Sets = []
        for (a, rows), (b, more) in zip(largest, reversed(other), strict=True):
            joined.append((a + b, rows + more))
        joined.sort(key=lambda item: (-item[0], item[1]))
        unevenness = joined[-1][0] - joined[0][0]
        heapq.heappush(heap, (unevenness, min(first, second), joined))
    if not heap:
        return []
    _, _, sets = heap[0]
    return sorted(sorted(rows) for _, rows in sets if rows)
