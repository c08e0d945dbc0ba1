"""What one training step has to do, and how long its responses are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qarl.errors import UserError

PAD_MULTIPLE = 8
"""qarl.trainer.batch's."""


@dataclass(frozen=True)
class Workload:
    """`prompts` x `n` responses a step. `response_length`: mean, of at most `response_max` (equal: all that long).
    `mini_batches`: optimizer steps. `micro_batch_size`, `log_prob_micro_batch_size`: rows of a trainer's forward.
    `padded`: every row to the longest one, as the local backend does; else rows are packed. `prefix_caching`: a prompt
    is prefilled once for its n responses. `checkpointing`: blocks are computed again in the backward."""

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
    if not 1 <= mean <= longest:
        raise UserError(f"responses cannot have {mean:g} tokens in the mean and at most {longest}",
                        where="response_length", fix="response_length=MEAN,MAX")  # fmt: skip
    if mean >= longest:
        return [longest] * count
    generator = random.Random(seed)
    shape = [math.exp(0.6 * generator.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, float(longest) * 1e3
    for _ in range(200):
        middle = (low + high) / 2
        found = sum(min(max(one * middle, 1.0), longest) for one in shape) / count
        low, high = (middle, high) if found < mean else (low, middle)
    return [round(min(max(one * high, 1.0), longest)) for one in shape]


def deal(items: Sequence[int], hands: int) -> list[list[int]]:
    """`items` in order, each hand an equal share but for one: how a batch goes to replicas and ranks."""
    size, more = divmod(len(items), hands)
    starts = [i * size + min(i, more) for i in range(hands + 1)]
    return [list(items[a:b]) for a, b in pairwise(starts)]


@dataclass(frozen=True)
class DecodeRun:
    """Seconds and steps of the decoding of all responses, and the batch size in the mean of the steps."""

    seconds: float
    steps: int
    mean_batch: float


def simulate_decoding(
    lengths: Sequence[int],
    prompt_length: int,
    step_seconds: Callable[[int, float], float],
    *,
    kv_tokens: float,
    max_num_seqs: int,
) -> DecodeRun:
    """Continuous batching in one engine. The first token of a response is the prefill's.

    A response starts, in order, once its whole length fits the KV cache beside those that run, and fewer than
    `max_num_seqs` do; the next event is the end of the shortest. `step_seconds(B, keys)`: of B sequences that attend to
    so many keys together; it must be linear in the keys, so that the steps between two events cost what the one in
    their middle does.
    """
    waiting = [length - 1 for length in lengths if length > 1]
    waiting.reverse()
    running: list[list[int]] = []  # [tokens left, tokens there]
    seconds, steps, decoded = 0.0, 0, 0
    used = 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            need = prompt_length + 1 + waiting[-1]
            if running and used + need > kv_tokens:
                break
            running.append([waiting.pop(), prompt_length + 1])
            used += need
        batch, count = len(running), min(left for left, _ in running)
        keys = sum(there for _, there in running) + batch * (count - 1) / 2
        seconds += count * step_seconds(batch, keys)
        steps, decoded = steps + count, decoded + count * batch
        for one in running:
            one[0] -= count
            one[1] += count
        used -= sum(there for left, there in running if not left)
        running = [one for one in running if one[0]]
    return DecodeRun(seconds, steps, decoded / steps if steps else 0.0)
