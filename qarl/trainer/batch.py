"""The tensors of a training step, its micro-batches, and the layout of a micro-batch in a forward.

B: responses. T: tokens of the longest prompt plus response. R: tokens of the longest response.

A micro-batch has either a fixed number of rows (`actor.ppo_micro_batch_size_per_gpu`) or, if `actor.use_dynamic_bsz`
is set, a limit on its tokens (`actor.ppo_max_token_len_per_gpu`). These keys mean the same as in verl. The rows of a
micro-batch are packed into one forward [1, tokens] without padding. Positions start at 0 in each row, and attention
stays within the row (`qarl.align.packed_attention`). So the cost of a forward depends on its tokens, not on its longest
row.

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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from qarl.rollout.requests import RolloutBatch

if TYPE_CHECKING:
    from qarl.config import ActorConfig

Rows = slice | torch.Tensor
"""Rows of a batch: a slice, or their numbers as int64 [rows]."""
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
    responses                    int64 [B, R]
    response_mask                bool [B, R]
    rollout_log_probs            FP32 [B, R]
    rewards, advantages          FP32 [B]
    rollout_top_tokens           int64 [B, R] or None; the engine's likeliest token at each position
    sampling_mask                uint8 [B, R, packed_width(V)] or None; packed masks of the tokens that top-k and top-p
                                 left in the pass for the old log-probs (`qarl.kernels.log_probs`)
    outside                      bool [B, R] or None; True if the trainer's top-k and top-p did not leave this token
    routed_experts               int16 [B, T, layers, k] or None; the experts of each token in the rollout, -1 if
                                 unknown (only in a mixture of experts)
    weights                      FP32 [B, R] or None; the weights of `rollout_correction.rollout_is`
    reference_log_probs          FP32 [B, R] or None; those of the reference policy of the KL term
    other_experts                bool [B, T] or None; True if, in the pass for the old log-probs, the trainer's own
                                 routers chose different experts for the token than the rollout
    routing_compared             bool [B] or None; the rows that `other_experts` covers
    finish_reasons               why each response ended, in vLLM's words, or None
    """

    input_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    responses: torch.Tensor
    response_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    weight_version: int
    rollout_top_tokens: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None
    outside: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    other_experts: torch.Tensor | None = None
    routing_compared: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    reference_log_probs: torch.Tensor | None = None
    finish_reasons: list[str | None] | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the same batch with every tensor on `device`."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: tokens of prompt and response of each row."""
        return self.prompt_lengths + self.response_mask.sum(1)

    def set_sampling_mask(self, rows: Rows, packed: torch.Tensor, outside: torch.Tensor) -> None:
        """Set `sampling_mask` and `outside` at the response tokens of `rows`. The arguments have a row per token."""
        if self.sampling_mask is None or self.outside is None:
            self.sampling_mask = packed.new_zeros(*self.responses.shape, packed.shape[1])
            self.outside = outside.new_zeros(self.responses.shape)
        mask = self.response_mask[rows]
        for stored, values in ((self.sampling_mask, packed), (self.outside, outside)):
            padded = stored[rows].clone()
            padded[mask] = values
            stored[rows] = padded

    def note_routing(self, rows: Rows, differing: torch.Tensor) -> None:
        """Store `differing`, bool [rows, T]: True if the trainer's routers chose other experts than the rollout."""
        if self.other_experts is None or self.routing_compared is None:
            self.other_experts = torch.zeros_like(self.input_ids, dtype=torch.bool)
            self.routing_compared = torch.zeros_like(self.prompt_lengths, dtype=torch.bool)
        self.other_experts[rows] = differing
        self.routing_compared[rows] = True

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
    mask = torch.arange(width)[None, :] < response_lengths[:, None]
    top = rollout.top_token_ids
    routed = rollout.routed_experts
    return Batch(
        input_ids=_pad(sequences, total, pad_token_id, torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt in rollout.prompt_token_ids]),
        responses=_pad(rollout.response_token_ids, width, pad_token_id, torch.int64),
        response_mask=mask,
        rollout_log_probs=_pad(rollout.rollout_log_probs, width, 0.0, torch.float32),
        rewards=rewards,
        advantages=advantages,
        weight_version=rollout.weight_version,
        rollout_top_tokens=None if top is None else _pad(top, width, pad_token_id, torch.int64),
        routed_experts=None if routed is None else _pad(routed, total, -1, torch.int16),
        finish_reasons=list(rollout.finish_reasons),
    )


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
    stop = len(batch) if stop is None else stop
    if not actor.use_dynamic_bsz:
        size = (
            actor.log_prob_micro_batch_size_per_gpu
            if log_probs
            else actor.ppo_micro_batch_size_per_gpu
        )
        assert size is not None  # the config was checked
        if only is not None:
            return [*only.split(size)]
        return [*batch.micro_batches(size, start=start, stop=stop)]
    limit = actor.ppo_max_token_len_per_gpu
    if log_probs:
        limit = actor.log_prob_max_token_len_per_gpu or limit
    assert limit is not None
    if only is None:
        only = torch.arange(start, stop, device=batch.input_ids.device)
    lengths = batch.lengths[only].tolist()
    return [only[rows] for rows in fill(lengths, limit)]


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


@dataclass(frozen=True)
class Layout:
    """The rows of a micro-batch in a forward. A slot is an index into the flattened `input_ids`.

    inputs      the model's keyword arguments; `input_ids` is [1, tokens] packed or [rows, T] padded
    valid       bool [rows, T]; whether the batch has a token here, and not padding
    slots       int64 [valid tokens]; the slot of each of these tokens
    predictors  int64 [response tokens]; the slot whose logits predict each response token
    """

    inputs: dict[str, Any]
    valid: torch.Tensor
    slots: torch.Tensor
    predictors: torch.Tensor

    @property
    def size(self) -> int:
        """The number of slots."""
        return int(self.inputs["input_ids"].numel())

    def flatten(self, tokens: torch.Tensor, fill_value: int) -> torch.Tensor:
        """Return [slots, ...] from `tokens` [rows, T, ...]. Slots without a token hold `fill_value`."""
        flat = tokens.new_full((self.size, *tokens.shape[2:]), fill_value)
        flat[self.slots] = tokens[self.valid]
        return flat

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """Return [rows, T, ...] from `flat` [slots, ...], with 0 where a row has no token."""
        tokens = flat.new_zeros((*self.valid.shape, *flat.shape[1:]))
        tokens[self.valid] = flat[self.slots]
        return tokens


def lay_out(batch: Batch, rows: Rows, *, packed: bool = True) -> Layout:
    """Return the layout of `batch[rows]`, packed or padded."""
    input_ids = batch.input_ids[rows]
    lengths = batch.lengths[rows]
    count, width = input_ids.shape
    columns = torch.arange(width, device=lengths.device)
    valid = columns[None, :] < lengths[:, None]
    row_lengths: tuple[int, ...] = tuple(lengths.tolist())
    if packed:
        tokens = input_ids[valid]
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(tokens), device=lengths.device) - starts.repeat_interleave(
            lengths
        )
        slots = torch.arange(len(tokens), device=lengths.device)
        missing = -len(tokens) % TOKEN_MULTIPLE
        if missing:  # a row of its own
            row_lengths = (*row_lengths, missing)
            positions = torch.cat([positions, torch.arange(missing, device=positions.device)])
        row = F.pad(tokens, (0, missing))
        inputs = {"input_ids": row[None], "position_ids": positions[None]}
    else:
        starts = torch.arange(count, device=lengths.device) * width
        slots = valid.flatten().nonzero()[:, 0]
        inputs = {"input_ids": input_ids}
    mask = batch.response_mask[rows]
    offsets = torch.arange(mask.shape[1], device=mask.device)
    first_predictors = starts[:, None] + batch.prompt_lengths[rows, None] - 1
    predictors = (first_predictors + offsets)[mask]
    return Layout(inputs | {"row_lengths": row_lengths}, valid, slots, predictors)
