"""The simulation of continuous batching: small cases worked by hand, and a scheduler that goes step by step."""

from __future__ import annotations

from typing import Any

import pytest

from qarl.bench.cost.decoding import simulate_decoding
from qarl.bench.cost.workload import response_lengths


class TestDecoding:
    def test_equal_responses_step_together(self) -> None:
        # 3 responses of 5 tokens after 10: 4 steps (the first token is the prefill's) with 33, 36, 39, 42 keys
        run = simulate_decoding([5, 5, 5], 10, lambda batch, keys: keys, max_num_seqs=8)
        assert (run.steps, run.seconds, run.mean_batch) == (4, 33 + 36 + 39 + 42, 3)

    def test_the_batch_shrinks_as_responses_end(self) -> None:
        # left to decode: 1, 3, 3. One step of 3, two of 2.
        run = simulate_decoding([2, 4, 4], 10, lambda batch, keys: batch, max_num_seqs=8)
        assert (run.steps, run.seconds) == (3, 3 + 2 + 2)
        assert run.mean_batch == pytest.approx(7 / 3)

    def test_a_slot_is_taken_again(self) -> None:
        # two at a time, left 1, 3, 2: steps with {1, 3}, {3 less 1, 2}, both end: 3 steps of 2
        run = simulate_decoding([2, 4, 3], 10, lambda batch, keys: batch, max_num_seqs=2)
        assert (run.steps, run.seconds) == (3, 6)

    def test_a_response_is_admitted_by_what_it_has_so_far(self) -> None:
        # 16 blocks of one token. Whole responses take 7 at the last step, two of them fit; three start with 5 each.
        # One step of 3; then 6 each, 18, do not fit: the third goes. 6 and 7 of the other two fit: steps 2 and 3.
        # It has 6 tokens and 2 to come: 6 again, which yields one; a step alone for the last.
        run = self.decode([4] * 3, 4, kv_blocks=16)
        assert (run.steps, run.seconds) == (4, 3 + 2 + 2 + 1)
        assert run.recomputed == ((6, 6),)

    def test_what_is_computed_again_yields_a_token(self) -> None:
        # 12 hold 5 + 5 and 6 + 6, not 7 + 7: the second has one token to come, and needs no step of its own.
        run = self.decode([4, 4], 4, kv_blocks=12)
        assert (run.steps, run.seconds, run.recomputed) == (3, 2 + 2 + 1, ((7, 7),))

    def test_the_preempted_are_served_before_the_waiting(self) -> None:
        # Two seats, 11 blocks. A (left 1) and B (3) start with 5 each: a step, A ends, B has 6. C's 5 fit beside it: a
        # step with 6 + 5; 7 + 6 do not fit, C goes. A step with B's 7, it ends. C has 6: again, then a step with 7 and
        # one with 8, beside D's 5 at first. 7 + 5 do not fit 11: D waits for the end of C, and then takes three steps.
        run = self.decode([2, 4, 5, 4], 4, kv_blocks=11, max_num_seqs=2)
        assert run.recomputed == ((6, 6),)
        assert (run.steps, run.seconds) == (1 + 1 + 1 + 2 + 3, 2 + 2 + 1 + 2 + 3)

    def test_a_block_is_taken_whole(self) -> None:
        # Blocks of 4: 5 to 8 tokens take 2, 9 a third. 5 blocks hold two responses for four steps.
        run = self.decode([6, 6], 4, kv_blocks=5, block=4)
        assert (run.steps, run.recomputed) == (5, ((9, 9),))
        assert run.seconds == 4 * 2 + 1
        assert self.decode([6, 6], 4, kv_blocks=6, block=4).seconds == 5 * 2

    def test_a_prompt_is_held_once_while_a_response_of_it_runs(self) -> None:
        # 9 tokens: two full blocks of 4 and a place in the third, which lasts for both steps. Two prompts of two.
        shared = self.decode([3] * 4, 9, kv_blocks=8, block=4, prompts=[0, 0, 1, 1])
        assert (shared.steps, shared.mean_batch) == (2, 4)
        assert self.decode([3] * 4, 9, kv_blocks=8, block=4).mean_batch == 2
        # Other prompts share nothing: two by two.
        assert self.decode([3] * 4, 9, kv_blocks=8, block=4, prompts=[0, 1, 2, 3]).mean_batch == 2
        # The last token of 8 is computed for its logits, with its block: one is shared, 3 + 2 + 2 + 2 do not fit 8.
        assert self.decode([3] * 4, 8, kv_blocks=8, block=4, prompts=[0] * 4).mean_batch < 4

    def test_a_cached_prompt_is_not_computed_again(self) -> None:
        # One block of 4 is shared. 6 blocks: 1 + 2 x 2 at 9 to 12 tokens of each, 1 + 2 x 3 at 13. The second of them
        # goes with 13 tokens, and comes when the first has ended: all 13. With a third response that runs on, less 4.
        run = self.decode([10, 10], 7, kv_blocks=6, block=4, prompts=[0, 0])
        assert run.recomputed == ((13, 13),)
        beside = self.decode([8, 10, 9], 7, kv_blocks=8, block=4, prompts=[0, 0, 0])
        assert beside.recomputed == ((9, 13),)

    def test_a_response_that_never_fits(self) -> None:
        with pytest.raises(ValueError, match="5 blocks do not hold a prompt of 4 and 4 tokens"):
            self.decode([4], 4, kv_blocks=5)

    def test_events_and_single_steps_agree(self) -> None:
        """Against the scheduler as vLLM runs it, step by step, on random lengths and tight memory."""
        recomputed = 0
        for seed in range(20):
            lengths = response_lengths(24, 12, 40, seed=seed)
            prompts = [i // 3 for i in range(24)] if seed % 2 else None
            run = self.decode(lengths, 7, kv_blocks=30, block=4, prompts=prompts, max_num_seqs=6 + seed % 3 * 6)
            assert (run.seconds, run.steps, len(run.recomputed)) == self.step_by_step(
                lengths, 7, 30, 4, prompts, 6 + seed % 3 * 6
            )
            recomputed += len(run.recomputed)
        assert recomputed > 20

    def decode(self, lengths: list[int], prompt: int, *, block: int = 1, max_num_seqs: int = 99, **more: Any) -> Any:
        """A step takes a second for each response."""
        return simulate_decoding(
            lengths, prompt, lambda batch, keys: batch, block=block, max_num_seqs=max_num_seqs, **more
        )

    def step_by_step(
        self, lengths: list[int], prompt: int, blocks: int, block: int, prompts: list[int] | None, seats: int
    ) -> tuple[float, int, int]:
        has, waiting = [prompt] * len(lengths), list(range(len(lengths)))
        running: list[int] = []
        seconds, steps, again = 0.0, 0, 0
        dropped: set[int] = set()

        def blocks_of(some: list[int]) -> int:
            names = set()
            for one in some:
                shared = (prompt - 1) // block if prompts else 0
                names |= {(prompts[one] if prompts else one, -1, i) for i in range(shared)}
                names |= {(one, 1, i) for i in range(shared, -(-has[one] // block))}
            return len(names)

        while waiting or running:
            preempted = False
            while blocks_of(running) > blocks:
                waiting.insert(0, running.pop())
                dropped.add(waiting[0])
                preempted = True
            while waiting and not preempted and len(running) < seats:
                one = waiting[0]
                final = has[one] + 1 == prompt + lengths[one]
                has[one] += not final
                if blocks_of([*running, one]) > blocks:
                    has[one] -= not final
                    break
                waiting.pop(0)
                again += one in dropped
                dropped.discard(one)
                if not final:
                    running.append(one)
            if running:
                seconds, steps = seconds + len(running), steps + 1
            for one in running:
                has[one] += 1
            running = [one for one in running if has[one] < prompt + lengths[one]]
        return seconds, steps, again

    def test_a_step_at_a_time_gives_the_same(self) -> None:
        lengths = response_lengths(12, 20, 60, seed=1)

        def cost(batch: float, keys: float) -> float:
            return 3.0 + 0.5 * batch + 0.01 * keys

        run = simulate_decoding(lengths, 7, cost, max_num_seqs=64)
        by_hand, left, there = 0.0, [n - 1 for n in lengths if n > 1], 8
        while left:
            by_hand += cost(len(left), len(left) * there)
            left = [n - 1 for n in left if n > 1]
            there += 1
        assert run.seconds == pytest.approx(by_hand)
