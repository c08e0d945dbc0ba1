"""Continuous batching in one engine, simulated from event to event as vLLM's V1 scheduler does it
(`v1/core/sched/scheduler.py` and `v1/core/kv_cache_manager.py` of vLLM 0.29):

    admission    in order, while the blocks of the tokens that a response has so far are free: how long it will be
                 nobody knows; not in a step that preempts
    growth       a block for every `BLOCK` tokens
    preemption   where blocks run out, the latest admitted goes back to the head of the queue and its blocks are freed;
                 what it had is computed again when it is admitted again, and that yields its next token
    sharing      the prefix cache keeps a prompt's full blocks once for all its responses that run; the block of the
                 last token is each one's own, because that token is computed for its logits

Simpler than vLLM: a prompt takes no step of its own here (`Engine.prefill` has its seconds), and blocks that a
preempted response left in the prefix cache are not found there again: with memory that short the others have taken
nearly all of them. Events are ends and preemptions, not steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BLOCK = 16
"""Tokens: vLLM's default on a GPU (`CacheConfig.DEFAULT_BLOCK_SIZE`)."""


@dataclass(frozen=True)
class DecodeRun:
    """Seconds and steps of the decoding of all responses, and the batch size in the mean of the steps; for each time
    that a preempted response was admitted again (tokens computed again, tokens that it had)."""

    seconds: float
    steps: int
    mean_batch: float
    recomputed: tuple[tuple[int, int], ...] = ()


@dataclass
class _Response:
    """`tokens` are known, prompt included; `left` are to come."""

    prompt: int
    tokens: int
    left: int
    preempted: bool = False


@dataclass
class _Scheduler:
    """What runs, and what waits."""

    waiting: deque[_Response]
    blocks: float
    block: int
    shared: int
    max_num_seqs: int
    running: list[_Response] = field(default_factory=list)
    recomputed: list[tuple[int, int]] = field(default_factory=list)

    def used(self) -> int:
        """Blocks in the next step."""
        prompts = {one.prompt for one in self.running}
        return sum(-(-one.tokens // self.block) for one in self.running) - self.shared * (
            len(self.running) - len(prompts)
        )

    def schedule(self) -> None:
        """Preempt where the next step has no room, else admit."""
        used, before = self.used(), len(self.running)
        while used > self.blocks:
            last = self.running.pop()
            last.preempted = True
            self.waiting.appendleft(last)
            used = self.used()
        if len(self.running) == before:
            self._admit(used)

    def _admit(self, used: int) -> None:
        prompts = {one.prompt for one in self.running}
        while self.waiting and len(self.running) < self.max_num_seqs:
            one = self.waiting[0]
            cached = self.shared if one.prompt in prompts else 0
            used += -(-(one.tokens + (one.left > 1)) // self.block) - cached
            if used > self.blocks:
                return
            self.waiting.popleft()
            if one.preempted:
                self.recomputed.append((one.tokens - cached * self.block, one.tokens))
            one.tokens, one.left = one.tokens + 1, one.left - 1
            if one.left:
                prompts.add(one.prompt)
                self.running.append(one)
            else:
                used = self.used()

    def steps(self) -> int:
        """Steps until a response ends or a block is wanting: after q `block` + r more steps there are q blocks more for
        each response, and one for those whose last block had fewer than r places left."""
        shortest = min(one.left for one in self.running)
        if math.isinf(self.blocks):
            return shortest
        rounds, rest = divmod(int(self.blocks) - self.used(), len(self.running))
        places = sorted(-one.tokens % self.block for one in self.running)
        return min(shortest, rounds * self.block + places[rest] + 1)

    def advance(self, steps: int) -> None:
        for one in self.running:
            one.tokens, one.left = one.tokens + steps, one.left - steps
        self.running = [one for one in self.running if one.left]


def simulate_decoding(
    lengths: Sequence[int],
    prompt_length: int,
    step_seconds: Callable[[int, float], float],
    *,
    max_num_seqs: int,
    kv_blocks: float = math.inf,
    prompts: Sequence[int] | None = None,
    block: int = BLOCK,
) -> DecodeRun:
    """`lengths`: of the responses, in order. `prompts`: which prompt each answers, where the prefix cache is on.

    The first token of a response is the prefill's. `step_seconds(B, keys)`: of B sequences that attend to so many keys
    together; it must be linear in the keys, so that the steps between two events cost what the one in their middle
    does.

    Raises:
        ValueError: `kv_blocks` do not hold the longest response.
    """
    if lengths and -(-(prompt_length + max(lengths) - 1) // block) > kv_blocks:
        raise ValueError(f"{kv_blocks} blocks do not hold a prompt of {prompt_length} and {max(lengths)} tokens")
    of_prompt = range(len(lengths)) if prompts is None else prompts
    waiting = deque(_Response(p, prompt_length, length) for p, length in zip(of_prompt, lengths, strict=True))
    shared = 0 if prompts is None else (prompt_length - 1) // block
    batch = _Scheduler(waiting, kv_blocks, block, shared, max_num_seqs)
    seconds, steps, decoded = 0.0, 0, 0
    while batch.waiting or batch.running:
        batch.schedule()
        if not batch.running:
            continue
        count, size = batch.steps(), len(batch.running)
        keys = sum(one.tokens for one in batch.running) + size * (count - 1) / 2
        seconds += count * step_seconds(size, keys)
        steps, decoded = steps + count, decoded + count * size
        batch.advance(count)
    return DecodeRun(seconds, steps, decoded / steps if steps else 0.0, tuple(batch.recomputed))
