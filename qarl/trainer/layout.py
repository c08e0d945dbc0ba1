"""Where the tokens of a micro-batch are in its forward, computed on the host from the lengths of its rows.

The host knows the lengths of a batch's rows (`Batch.host_lengths`). So it need not ask the device where the tokens are,
as an index by a mask does, which waits until the device has computed all that was queued before. It sends the places of
tokens, and of those that predict a token of a response, in one copy that it does not wait for.

Rows of a pack may have the same prompt, as the responses to one prompt have. Where the bits of the prompt's tokens are
the same in each row (`Policy.shared_prompt`), the pack has these tokens once: they are computed once, forward and
backward, and the responses of all these rows see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.kernels.base import upload
from qarl.kernels.cpu.layer_ops import Group, Row
from qarl.trainer.batch import TOKEN_MULTIPLE, Batch, Rows, index_of


@dataclass(frozen=True)
class Layout:
    """The rows of a micro-batch in a forward. A slot is an index into the flattened `input_ids`.

    inputs      the model's keyword arguments; `input_ids` is [1, tokens] packed or [rows, T] padded
    groups      the rows that share a prompt in a pack, which are one row in `row_lengths`
    rows        number of rows; a pack may have another one after them, which fills it up
    width       T of the batch
    responses   R of the batch
    places      int64 [tokens]; the index of each token of the rows in their flattened [rows, T]
    slots       int64 [tokens]; the slot of each of these tokens
    predictors  int64 [response tokens]; the slot whose logits predict each response token
    predicted   int64 [response tokens]; the index of each response token in the flattened [rows, R]

    The response tokens are those that the model sampled, in a conversation the tokens of its turns.
    """

    inputs: dict[str, Any]
    groups: tuple[Group, ...]
    rows: int
    width: int
    responses: int
    places: Tensor
    slots: Tensor
    predictors: Tensor
    predicted: Tensor

    @property
    def size(self) -> int:
        """The number of slots."""
        return int(self.inputs["input_ids"].numel())

    @property
    def shares_prompts(self) -> bool:
        """Whether rows have slots in common."""
        return any(len(group.rows) > 1 for group in self.groups)

    def flatten(self, tokens: Tensor, fill_value: int) -> Tensor:
        """Return [slots, ...] from `tokens` [rows, T, ...]. Slots without a token hold `fill_value`."""
        flat = tokens.new_full((self.size, *tokens.shape[2:]), fill_value)
        flat[self.slots] = tokens.flatten(0, 1)[self.places]
        return flat

    def unflatten(self, flat: Tensor) -> Tensor:
        """Return [rows, T, ...] from `flat` [slots, ...], with 0 where a row has no token."""
        tokens = flat.new_zeros((self.rows * self.width, *flat.shape[1:]))
        tokens[self.places] = flat[self.slots]
        return tokens.unflatten(0, (self.rows, self.width))

    def of_responses(self, tokens: Tensor) -> Tensor:
        """Return [response tokens, ...] from `tokens` [rows, R, ...]."""
        return tokens.flatten(0, 1)[self.predicted]

    def to_responses(self, values: Tensor) -> Tensor:
        """Return [rows, R, ...] from `values` [response tokens, ...], with 0 where a response has no token."""
        empty = values.new_zeros((self.rows * self.responses, *values.shape[1:]))
        responses = empty.index_put((self.predicted,), values)
        return responses.unflatten(0, (self.rows, self.responses))


def lay_out(batch: Batch, rows: Rows, *, packed: bool = True, shared_prompt: int = 0) -> Layout:
    """Return the layout of `batch[rows]`, packed or padded.

    `shared_prompt`: rows of a pack with the same prompt share it, if the engine has prefilled at most this number of
    tokens. It needs a batch on the host."""
    numbers = batch.numbers(rows)
    known = batch.host_lengths
    prompts = torch.tensor([known.prompts[row] for row in numbers])
    lengths = torch.tensor([known.responses[row] for row in numbers])
    input_ids = batch.input_ids[index_of(rows)]
    count = len(numbers)
    width = batch.input_ids.shape[1]
    later = [()] * count if batch.later_prefills is None else batch.parts_of(rows)
    computed = [*map(Row, (prompts + lengths).tolist(), prompts.tolist(), later)]
    members = [[row] for row in range(count)]
    if packed and shared_prompt:
        members = _rows_of_groups(input_ids, computed, shared_prompt)
    groups = tuple(Group(tuple(computed[row] for row in of_group)) for of_group in members)
    starts = _starts(members, computed)
    if not packed:
        starts = torch.arange(count).expand(2, count) * width
    row, place = _each(prompts + lengths)
    of_row, offset = _each(lengths) if batch.conversations is None else _turns(batch, numbers)
    places = row * width + place
    predicted = of_row * batch.responses.shape[1] + offset
    of_prompt, of_response = starts
    slots = torch.where(place < prompts[row], of_prompt[row], of_response[row]) + place
    before = torch.where(offset == 0, of_prompt[of_row], of_response[of_row])
    predictors = before + prompts[of_row] - 1 + offset
    used = sum(group.tokens for group in groups)
    missing = -used % TOKEN_MULTIPLE if packed else 0
    if missing:  # a row of its own
        groups = (*groups, Group.of(missing, [0]))
    together = [places, slots, predictors, predicted]
    if packed:
        sources = places.new_empty(used)
        sources[slots] = places
        positions = F.pad(torch.empty_like(sources), (0, missing))
        positions[slots] = place
        positions[used:] = torch.arange(missing)
        together += [sources, positions]
    device = batch.input_ids.device
    sizes = [len(part) for part in together]
    places, slots, predictors, predicted, *of_pack = upload(torch.cat(together), device).split(
        sizes
    )
    inputs: dict[str, Any] = {"input_ids": input_ids}
    if packed:
        sources, positions = of_pack
        tokens = F.pad(input_ids.flatten()[sources], (0, missing))
        inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
    inputs["row_lengths"] = tuple(group.tokens for group in groups)
    return Layout(
        inputs,
        groups,
        rows=count,
        width=width,
        responses=batch.responses.shape[1],
        places=places,
        slots=slots,
        predictors=predictors,
        predicted=predicted,
    )


def _turns(batch: Batch, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return for each token that the model sampled in conversations the number of its row, and its place in the
    response."""
    assert batch.conversations is not None
    rows = [batch.conversations[number].turns for number in numbers]
    offsets = [torch.arange(start, end) for turns in rows for start, end in turns]
    lengths = torch.tensor([sum(end - start for start, end in turns) for turns in rows])
    return torch.arange(len(rows)).repeat_interleave(lengths), torch.cat(offsets)


def _rows_of_groups(input_ids: Tensor, rows: Sequence[Row], longest: int) -> list[list[int]]:
    """Return the numbers of the rows of each group, in the order of the groups' first rows. Rows with the same prompt
    are a group, if the engine has prefilled at most `longest` tokens. `input_ids`: int64 [rows, T] on the host."""
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        shared = row.prompt > 0 and row.longest_prefill <= longest
        key = input_ids[number, : row.prompt].numpy().tobytes() if shared else number
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _starts(members: Sequence[Sequence[int]], rows: Sequence[Row]) -> Tensor:
    """Return int64 [2, rows]: for each row of a pack the slot of its prompt's first token, and the slot of that token
    if the whole row stood where its response is. `members`: the numbers of the rows of each group."""
    starts = torch.empty(2, len(rows), dtype=torch.int64)
    slot = 0
    for numbers in members:
        starts[0, numbers] = slot
        for number in numbers:
            starts[1, number] = slot
            slot += rows[number].length - rows[number].prompt
        slot += rows[numbers[0]].prompt
    return starts


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of counts[0] + counts[1] + ... elements the number of its part, and its own within the part."""
    part = torch.arange(len(counts)).repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    return part, torch.arange(len(part)) - before[part]
