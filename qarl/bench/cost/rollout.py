"""Seconds of a rollout on one engine: prefills, and decoding by simulation."""

from __future__ import annotations

from collections.abc import Sequence

from qarl.bench.cost.ceilings import Ceilings
from qarl.bench.cost.collectives import all_reduce
from qarl.bench.cost.decoding import BLOCK, DecodeRun, simulate_decoding
from qarl.bench.cost.parts import (
    Part,
    attention_shapes,
    bytes_a_weight,
    distinct_experts,
    merged,
    mlp_shapes,
    product_part,
    scaled,
    total,
)
from qarl.bench.cost.workload import Workload
from qarl.checks.memory import ModelSize


class Engine:
    """One engine on `parallel` GPUs, with `kv_bytes` on each for its KV cache."""

    def __init__(
        self, size: ModelSize, ceilings: Ceilings, scheme: str, work: Workload, *, parallel: int = 1,
        kv_bytes: float | None = None,
    ) -> None:  # fmt: skip
        self.size, self.ceilings, self.scheme, self.work, self.parallel = size, ceilings, scheme, work, parallel
        self.linear = ceilings.product("engine", "forward", scheme)
        self.plain = ceilings.product("engine", "forward", "bf16")
        self.bytes_a_weight = bytes_a_weight(scheme, work.group_size)
        self.kv_blocks = float("inf") if kv_bytes is None else kv_bytes // (BLOCK * size.kv_bytes_per_token(parallel))

    def prefill(self, of_prompt: Sequence[int]) -> list[Part]:
        """Of all prompts, and the first tokens of their responses. `of_prompt`: which prompt each response answers."""
        work, cost = self.work, self.ceilings.engine
        sequences = len(of_prompt)
        prompts = len(set(of_prompt)) if work.prefix_caching else sequences
        at_once = max(min(work.max_num_batched_tokens // work.prompt_length, work.max_num_seqs, prompts), 1)
        found = [Part("requests", cost.request + cost.request_sequence * sequences, "overhead")]
        whole, rest = divmod(prompts, at_once)
        for count, times in ((at_once, whole), (rest, 1)):
            if not count:
                continue
            pairs = count * work.prompt_length * (work.prompt_length + 1) / 2
            width = self.size.query_width / self.parallel
            attention = self.size.layers * pairs * width * cost.prefill_pair
            step = [*self._step(count, count * work.prompt_length), Part("attention", attention, "compute")]
            found += scaled(step, times)
        return merged(found)

    def decode_step(self, batch: float, keys: float) -> list[Part]:
        """One token for each of `batch` sequences that have `keys` tokens together."""
        cost, size = self.ceilings.engine, self.size
        a_key = cost.decode_key * size.query_width + cost.decode_kv * 2 * size.kv_width
        attention = size.layers * keys * a_key / self.parallel
        return [*self._step(batch, batch), Part("attention", attention, "memory")]

    def decode(self, lengths: Sequence[int], of_prompt: Sequence[int]) -> tuple[list[Part], DecodeRun]:
        """Of responses of these lengths; parts in the proportions of the mean step, and what preempted responses had
        to compute again."""
        work = self.work
        run = simulate_decoding(
            lengths,
            work.prompt_length,
            lambda batch, keys: total(self.decode_step(batch, keys)),
            kv_blocks=self.kv_blocks,
            max_num_seqs=work.max_num_seqs,
            prompts=of_prompt if work.prefix_caching else None,
        )
        if not run.steps:
            return [], run
        context = work.prompt_length + sum(length * length for length in lengths) / sum(lengths) / 2
        mean = self.decode_step(run.mean_batch, run.mean_batch * context)
        again = sum(self._recompute(tokens, keys) for tokens, keys in run.recomputed)
        return [*merged(scaled(mean, run.seconds / total(mean))), Part("recomputation", again, "compute")], run

    def _recompute(self, tokens: int, keys: int) -> float:
        """Seconds of the last `tokens` of a response's `keys`, in a step of their own."""
        pairs = tokens * (2 * keys - tokens + 1) / 2
        width = self.size.query_width / self.parallel
        return total(self._step(1, tokens)) + self.size.layers * pairs * width * self.ceilings.engine.prefill_pair

    def _step(self, sequences: float, tokens: float) -> list[Part]:
        """A forward of `tokens` tokens, without attention, and the sampling of `sequences` tokens."""
        size, cost, ceilings = self.size, self.ceilings.engine, self.ceilings
        sparse = len(size.sparse_layers)
        dense = size.layers - sparse
        width = size.query_width + size.kv_width
        overhead = cost.step + cost.step_sequence * sequences
        overhead += size.layers * (cost.layer + cost.layer_sequence * sequences)
        active = dense * size.intermediate + sparse * size.experts_per_token * size.moe_intermediate
        elements = size.layers * (cost.token_hidden * size.hidden + cost.token_width * width / self.parallel)
        elements += cost.token_intermediate * active / self.parallel
        attention = attention_shapes(size, fused=True, parallel=self.parallel)
        parts = [
            Part("overhead", overhead, "overhead"),
            Part("norms, rotary, activation", tokens * elements, "memory"),
            self._product("linears", tokens, attention).times(size.layers),
        ]
        if dense:
            mlp = mlp_shapes(size, size.intermediate, fused=True, parallel=self.parallel)
            parts.append(self._product("linears", tokens, mlp).times(dense))
        if sparse:
            parts.append(self._experts(tokens).times(sparse))
        head = product_part(ceilings, self.plain, "lm_head", sequences, [(size.vocab / self.parallel, size.hidden)])
        parts += [head, Part("sampling", sequences * size.vocab * cost.logit, "memory")]
        if self.parallel > 1:
            parts.append(all_reduce(ceilings.links, 2 * tokens * size.hidden, self.parallel).times(2 * size.layers))
        return parts

    def _product(self, name: str, rows: float, shapes: list[tuple[float, float]]) -> Part:
        return product_part(self.ceilings, self.linear, name, rows, shapes, weight_bytes=self.bytes_a_weight)

    def _experts(self, tokens: float) -> Part:
        """Grouped products with the experts that the tokens are expected to need."""
        size = self.size
        touched = distinct_experts(size.experts, size.experts_per_token, tokens)
        rows = tokens * size.experts_per_token / touched
        one = mlp_shapes(size, size.moe_intermediate, fused=True, parallel=self.parallel)
        part = product_part(self.ceilings, self.linear, "experts", rows, one, weight_bytes=self.bytes_a_weight, calls=0)
        return part.times(touched)
