"""Seconds of the trainer's phases on one GPU (or the CPU), communication apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from qarl.bench.cost.ceilings import Ceilings, OptimizerCost, QuantizeCost, within
from qarl.bench.cost.parts import Part, attention_shapes, bytes_a_weight, merged, mlp_shapes, product_part
from qarl.bench.cost.workload import Workload
from qarl.checks.memory import LOGITS_AT_A_TIME, ModelSize, wire_bytes


class Trainer:
    """The trainer of one scheme at one level, which has the rows `lengths` (prompt and response) to compute."""

    def __init__(
        self, size: ModelSize, ceilings: Ceilings, scheme: str, level: str, work: Workload, *, ranks: int = 1
    ) -> None:
        self.size, self.ceilings, self.work, self.ranks = size, ceilings, work, ranks
        self.scheme, self.level = scheme, level
        self.low_bit = scheme != "bf16" and level != "off"
        """Whether the forward multiplies by the low-bit tensors."""
        quantized = size.linears().values()
        self.weights = sum(n * k for n, k in quantized)
        self.table = size.vocab * size.hidden
        self.wire_low_bit = sum(wire_bytes(scheme, work.group_size, shape) for shape in quantized)
        self.wire = self.wire_low_bit + 2 * (size.parameters - self.weights)

    def pass_(self, direction: str, rows: Sequence[int], responses: int) -> list[Part]:
        """One pass over rows of these lengths with `responses` tokens to score. `direction`: forward (without
        gradients), forward_grad or backward."""
        size, tokens = self.size, float(sum(rows))
        block = self.ceilings.block(self.level, direction)
        sparse = len(size.sparse_layers)
        dense, pair = size.layers - sparse, 2 * size.kv_width
        normed = size.query_width + size.kv_width if size.qk_norm else 0
        width = dense * size.intermediate + sparse * size.experts_per_token * size.moe_intermediate
        elements = size.layers * (
            block.hidden * size.hidden
            + block.attention_width * (size.query_width + pair)
            + block.qk_norm_width * normed
        )
        attention = size.layers * size.query_width * sum(length * block.attention_at(length) for length in rows)
        parts = [
            Part("overhead", size.layers * block.call, "overhead"),
            Part("norms, rotary, activation", tokens * (elements + block.intermediate * width), "memory"),
            Part("attention", attention, "compute"),
            self._product(direction, tokens, attention_shapes(size, fused=False)).times(size.layers),
        ]
        if dense:
            mlp = mlp_shapes(size, size.intermediate, fused=False)
            parts.append(self._product(direction, tokens, mlp).times(dense))
        if sparse:
            one = mlp_shapes(size, size.moe_intermediate, fused=False)
            share = tokens * size.experts_per_token / size.experts
            parts.append(self._product(direction, share, one, calls=0).times(sparse * size.experts))
        return [*parts, *self._head(direction, len(rows), tokens, responses)]

    def _product(
        self, direction: str, rows: float, shapes: list[tuple[float, float]], calls: float | None = None
    ) -> Part:
        scheme = self.scheme if self.low_bit else "bf16"
        one_way = "backward" if direction == "backward" else "forward"
        product = self.ceilings.product("trainer", one_way, scheme)
        weight_bytes = bytes_a_weight(scheme, self.work.group_size) if one_way == "forward" else 2.0
        return product_part(self.ceilings, product, "linears", rows, shapes, weight_bytes=weight_bytes, calls=calls)

    def _head(self, direction: str, rows: int, tokens: float, responses: int) -> list[Part]:
        """lm_head and log-softmax. Beyond `LOGITS_AT_A_TIME` logits are made in blocks, and again in the backward
        (`qarl.kernels.logprob`); else for every place from the last of the prompt on."""
        size, cost = self.size, self.ceilings.head
        places = tokens - rows * (self.work.prompt_length - 1)
        in_blocks = places * size.vocab > LOGITS_AT_A_TIME
        scored = responses if in_blocks else places
        shape = [(float(size.vocab), float(size.hidden))]

        def product(one_way: str) -> Part:
            found = self.ceilings.product("trainer", one_way, "head")
            return product_part(self.ceilings, found, "lm_head", scored, shape)

        logits = responses * size.vocab
        if direction != "backward":
            seconds = cost.forward if in_blocks else getattr(cost, direction)
            return [product("forward"), Part("log-softmax", logits * seconds, "memory")]
        parts = [product("backward"), Part("log-softmax", logits * cost.backward, "memory")]
        if in_blocks:
            parts += [product("forward"), Part("log-softmax", logits * cost.forward_grad, "memory")]
        embedding = self.ceilings.optimizer_at(self.table).embedding
        return [*parts, Part("embedding", self.table * embedding * (2 if size.tied else 1), "memory")]

    def old_log_prob(self, rows: Sequence[int], responses: int) -> list[Part]:
        return self._over(rows, responses, self.work.log_prob_micro_batch_size, ("forward",))

    def forward(self, rows: Sequence[int], responses: int) -> list[Part]:
        return self._over(rows, responses, self.work.micro_batch_size, ("forward_grad",))

    def backward(self, rows: Sequence[int], responses: int) -> list[Part]:
        """With the blocks' second forward where checkpointing is on, the gradients' way into FP32 sums, and the
        dequantized weights that the first backward after an update makes."""
        work = self.work
        again = ("forward_grad",) if work.checkpointing else ()
        parts = self._over(rows, responses, work.micro_batch_size, ("backward", *again), head_again=False)
        batches = -(-len(rows) // work.micro_batch_size)
        first, later = min(work.mini_batches, batches), max(batches - work.mini_batches, 0)
        added = self._over_parameters(lambda cost: first * cost.first + later * cost.add)
        parts.append(Part("gradient sums", added, "memory"))
        if self.low_bit:
            dequantize = self._quantize_cost().dequantize * self.weights * work.mini_batches
            parts.append(Part("dequantize", dequantize, "memory"))
        return parts

    def _over(
        self, rows: Sequence[int], responses: int, size: int, directions: Sequence[str], *, head_again: bool = True
    ) -> list[Part]:
        """All rows, `size` at a time. `head_again=False`: lm_head takes part in the first of `directions` only."""
        parts: list[Part] = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            share = round(responses * len(some) / len(rows))
            for number, direction in enumerate(directions):
                found = self.pass_(direction, some, share)
                if number and not head_again:
                    found = [part for part in found if part.name not in ("lm_head", "log-softmax")]
                parts += found
        return merged(parts)

    def optimizer(self) -> list[Part]:
        """Clipping and steps of this rank's shard, once for each mini-batch."""
        step = f"step_{self.work.master_dtype}"
        seconds = self._over_parameters(lambda cost: cost.clip + float(getattr(cost, step)))
        return [Part("clip and step", seconds * self.work.mini_batches, "memory")]

    def _over_parameters(self, seconds: Callable[[OptimizerCost], float]) -> float:
        """Seconds a parameter, over this rank's shard of every tensor: the linears, embedding and lm_head, and the
        rest (norms, biases, routers), all of it small."""
        size = self.size
        tensors = Counter(n * k for n, k in size.linears().values())
        tensors[self.table] += 1 if size.tied else 2
        tensors[1] += size.parameters - sum(parameters * count for parameters, count in tensors.items())
        found = 0.0
        for parameters, count in tensors.items():
            shard = parameters / self.ranks
            found += count * shard * seconds(self.ceilings.optimizer_at(shard))
        return found

    def quantize(self) -> list[Part]:
        """All weights after each optimizer step; at level `off` for the publish alone, without a kernel's layout."""
        if self.scheme == "bf16":
            return []
        cost, times = self._quantize_cost(), self.work.mini_batches if self.low_bit else 1
        parts = [Part("quantize", cost.quantize * self.weights * times, "memory")]
        if self.low_bit:
            parts.append(Part("prepare", cost.prepare * self.weights * times, "memory"))
        return parts

    def publish(self) -> list[Part]:
        """Checks, checksums at both ends, and the writing into the engine."""
        cost, size = self.ceilings.publish, self.size
        tables = within(cost.tied if size.tied else cost.untied, self.table)
        apply = cost.apply[self.scheme] * self.weights + tables * self.table
        return [
            Part("validate", cost.validate * self.wire, "memory"),
            Part("transfer", cost.transfer * self.wire, "memory"),
            Part("apply", apply, "memory"),
            Part("overhead", cost.call * self.tensors, "overhead"),
        ]

    @property
    def tensors(self) -> int:
        """On the wire."""
        linears = len(self.size.linears())
        each = {"bf16": 1, "w4a16": 3}.get(self.scheme, 2)
        return linears * each + 2 * self.size.layers + 2

    def _quantize_cost(self) -> QuantizeCost:
        return self.ceilings.quantize[self.scheme]
