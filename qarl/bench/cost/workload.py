"""What one training step has to do, and how long its responses are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from qarl.errors import UserError

PAD_MULTIPLE = 8
"""qarl.trainer.batch's."""


@dataclass(frozen=True)
class Workload:
    """`prompts` x `n` responses a step. `response_length`: mean, of at most `response_max` (equal: all that long).
    `mini_batches`: optimizer steps. `micro_batch_size`, `log_prob_micro_batch_size`: rows of a trainer's forward.
    `padded`: every row to the longest one, as the local backend does; else rows are packed. `prefix_caching`: an engine
    prefills a prompt once for all its responses there. `checkpointing`: blocks are computed again in the backward."""

    prompts: int
    n: int
    prompt_length: int
    response_length: float
    response_max: int
    mini_batches: int = 1
    micro_batch_size: int = 1
    log_prob_micro_batch_size: int = 1
    master_dtype: str = "fp32"
    group_size: int = 128
    padded: bool = True
    prefix_caching: bool = False
    checkpointing: bool = False
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 256
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    def lengths(self) -> list[int]:
        """Of all responses, in order of prompt."""
        return response_lengths(self.sequences, self.response_length, self.response_max, self.seed)

    def row_lengths(self) -> list[int]:
        """Tokens that the trainer computes for each response: prompt and response, padded where `padded`."""
        whole = [self.prompt_length + length for length in self.lengths()]
        if not self.padded:
            return whole
        return [-(-max(whole) // PAD_MULTIPLE) * PAD_MULTIPLE] * len(whole)


def response_lengths(count: int, mean: float, longest: int, seed: int) -> list[int]:
    """Log-normal lengths cut off at `longest`, with the given mean after the cut; standard deviation of the logarithm
    0.6. All the same where the mean is the longest."""
    return list(_lengths(count, mean, longest, seed))


@cache
def _lengths(count: int, mean: float, longest: int, seed: int) -> tuple[int, ...]:
    if not 1 <= mean <= longest:
        raise UserError(f"responses cannot have {mean:g} tokens in the mean and at most {longest}",
                        where="response_length", fix="response_length=MEAN,MAX")  # fmt: skip
    if mean >= longest:
        return (longest,) * count
    generator = random.Random(seed)
    shape = [math.exp(0.6 * generator.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, float(longest) * 1e3
    for _ in range(200):
        middle = (low + high) / 2
        found = sum(min(max(one * middle, 1.0), longest) for one in shape) / count
        low, high = (middle, high) if found < mean else (low, middle)
    return tuple(round(min(max(one * high, 1.0), longest)) for one in shape)


def deal(items: Sequence[int], hands: int) -> list[list[int]]:
    """`items` in order, each hand an equal share but for one: how a batch goes to ranks."""
    size, more = divmod(len(items), hands)
    starts = [i * size + min(i, more) for i in range(hands + 1)]
    return [list(items[a:b]) for a, b in pairwise(starts)]
