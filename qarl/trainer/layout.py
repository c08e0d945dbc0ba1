"""Where the tokens of a micro-batch are in its forward, computed on the host from the lengths of its rows.

The host knows the lengths of a batch's rows (`Batch.host_lengths`). So it need not ask the device where the tokens are,
as an index by a mask does, which waits until the device has computed all that was queued before. It sends the places of
tokens, and of those that predict a token of a response, in one copy that it does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.kernels.base import upload
from qarl.trainer.batch import TOKEN_MULTIPLE, Batch, Rows, index_of


@dataclass(frozen=True)
class Layout:
    """The rows of a micro-batch in a forward. A slot is an index into the flattened `input_ids`.

    inputs      the model's keyword arguments; `input_ids` is [1, tokens] packed or [rows, T] padded
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


def lay_out(batch: Batch, rows: Rows, *, packed: bool = True) -> Layout:
    """Return the layout of `batch[rows]`, packed or padded."""
    numbers = batch.numbers(rows)
    known = batch.host_lengths
    prompts = torch.tensor([known.prompts[row] for row in numbers])
    lengths = torch.tensor([known.responses[row] for row in numbers])
    count = len(numbers)
    width = batch.input_ids.shape[1]
    row, place = _each(prompts + lengths)
    of_row, offset = _each(lengths) if batch.conversations is None else _turns(batch, numbers)
    places = row * width + place
    predicted = of_row * batch.responses.shape[1] + offset
    row_lengths = (prompts + lengths).tolist()
    missing = -len(places) % TOKEN_MULTIPLE if packed else 0
    if missing:  # a row of its own
        place = torch.cat([place, torch.arange(missing)])
        row_lengths.append(missing)
    starts = (prompts + lengths).cumsum(0) - prompts - lengths
    if not packed:
        starts = torch.arange(count) * width
    predictors = (starts + prompts - 1)[of_row] + offset
    device = batch.input_ids.device
    together = [places, predictors, predicted, place]
    sizes = [len(part) for part in together]
    places, predictors, predicted, place = upload(torch.cat(together), device).split(sizes)
    input_ids = batch.input_ids[index_of(rows)]
    inputs: dict[str, Any] = {"input_ids": input_ids}
    slots = places
    if packed:
        tokens = input_ids.flatten()[places]
        inputs = {"input_ids": F.pad(tokens, (0, missing))[None], "position_ids": place[None]}
        slots = torch.arange(len(tokens), device=device)
    inputs["row_lengths"] = tuple(row_lengths)
    return Layout(
        inputs,
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


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of counts[0] + counts[1] + ... elements the number of its part, and its own within the part."""
    part = torch.arange(len(counts)).repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    return part, torch.arange(len(part)) - before[part]
