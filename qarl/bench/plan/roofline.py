"""Roofline of a training step. The time of a phase is the longest of its times for arithmetic, memory and links.

On GPUs some terms come on top (`TERMS`): the bytes that products do not move, as counted (`qarl.bench.plan.traffic`),
and what a decode step takes beside its products and its KV cache, which is estimated (`qarl.bench.plan.assumptions`).
Launches of a pass, copies out of the gather's buffer and changes of an int4 layout have no term: they take at most 2%
of a step of the models in docs/lookup/results/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qarl.bench.plan import assumptions
from qarl.bench.plan.devices import Rates
from qarl.bench.plan.multiplier import Multiplier, multiplier
from qarl.bench.plan.traffic import beyond_products, muon_bytes_per_weight, newton_schulz_flop
from qarl.bench.plan.work import Work
from qarl.checks.gpu_memory_decides import DEFAULT_SEQUENCES
from qarl.checks.model_size import ModelSize
from qarl.config.optimizers import get_optimizer
from qarl.schemes import UNQUANTIZED


@dataclass(frozen=True)
class Term:
    """A part of the predicted time: the phase of the step that it belongs to, and what it is."""

    phase: str
    what: str


TERMS: dict[str, Term] = {
    "prefill": Term("rollout", "products and attention of the prompts"),
    "decode": Term("rollout", "products of the decode steps, and reading weights and caches"),
    "small_kernels": Term("rollout", "a decode step's other kernels (estimate)"),
    "all_reduce": Term("rollout", "an engine's all-reduces (estimate)"),
    "sampler": Term("rollout", "sampler and log-probs of a decode step (estimate)"),
    "engine": Term(
        "rollout",
        "the engine's host, as far as a decode step takes longer than the device (estimate)",
    ),
    "tail": Term("rollout", "the longest response alone, from the mean length to its end"),
    "old_log_prob": Term("old_log_prob", "products and attention"),
    "old_log_prob_elementwise": Term(
        "old_log_prob", "bytes beyond those of products (counted; of logits, estimate)"
    ),
    "forward": Term("update", "products and attention"),
    "backward": Term("update", "products and attention; on GPUs also the layers' forward again"),
    "update_elementwise": Term("update", "bytes beyond those of products, as above"),
    "communication": Term(
        "update", "gathers and reduce-scatter, as far as they take longer than the passes"
    ),
    "optimizer": Term("optimizer", "Muon or AdamW on this rank's share (Muon counted)"),
    "quantize": Term("optimizer", "this rank's share into low bits"),
    "publish": Term("publish", "passes over the published bytes, and a gather"),
    "constant": Term("other", "Ray, tokenizer, rewards, verl's metrics, sleep and wake (assumed)"),
}
PHASES = ("rollout", "old_log_prob", "update", "optimizer", "publish", "other")


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {
        phase: sum(s for term, s in seconds.items() if TERMS[term].phase == phase)
        for phase in PHASES
    }


@dataclass(frozen=True)
class Prediction:
    """A predicted step: seconds by term (`TERMS`), and the bytes that GPUs gather and that are published."""

    seconds: dict[str, float]
    gathered: float
    published: float


@dataclass(frozen=True)
class Sent:
    """What a step sends: bytes that are published, bytes of the weights that ranks gather for a pass, and the number of
    gradients."""

    published: float
    trained: float
    gradients: float


@dataclass(frozen=True)
class Setup:
    """What a scheme and a level make of a run.

    engine        multiplies in the rollout
    trainer       multiplies in the trainer's forward
    compiled      whether vLLM compiles its engine on a GPU
    recomputed    the share of the rows whose old log-probs a step computes in a pass
    checkpointed  whether a backward runs its layers' forward again (`model.gradient_checkpointing`)
    sequences     the most that an engine decodes at once (`rollout.max_num_seqs`)
    """

    engine: Multiplier
    trainer: Multiplier
    compiled: bool = True
    recomputed: float = 1.0
    checkpointed: bool = False
    sequences: int = DEFAULT_SEQUENCES

    @property
    def low_bit(self) -> bool:
        """Whether the trainer multiplies by the published tensors, of which it gathers low bits."""
        return self.trainer.scheme.quantized


class Roofline:
    """The time of a step for one model, scheme and level on one kind of device."""

    def __init__(
        self, size: ModelSize, rates: Rates, work: Work, setup: Setup, kv_tokens: float
    ) -> None:
        # `kv_tokens`: how many tokens fit in an engine's KV cache.
        self.size = size
        self.rates = rates
        self.work = work
        self.setup = setup
        self.scheme = setup.engine.scheme
        self.kv_tokens = kv_tokens
        self.plain = multiplier(rates.product, UNQUANTIZED)
        # On GPUs a prompt is prefilled once for all its responses.
        self.on_gpu = rates.on_gpu
        self.engines = work.gpus // work.tensor_parallel
        self.sequences = -(-work.prompts * work.n // self.engines)
        # Tokens of a sequence on average, while it is decoded.
        self.length = work.prompt_length + work.response_length[0] / 2
        linears = size.linears()
        self.weights = 0.0
        self.expert_weights = 0.0
        self.adapters = 0
        self.wire = dict.fromkeys((self.scheme, setup.trainer.scheme, UNQUANTIZED), 0.0)
        """Scheme -> bytes of all linears as it publishes them."""
        for name, (n, k) in linears.items():
            for published_as in self.wire:
                self.wire[published_as] += published_as.wire_bytes(n, k)
            self.weights += n * k
            if ".experts." in name:
                self.expert_weights += n * k
            else:
                self.adapters += work.lora_r * (n + k)

    def step(self) -> Prediction:
        """Return the predicted step. Communication overlaps with the passes, so only the time by which it is longer
        counts."""
        work = self.work
        rates = self.rates
        batches = work.batches
        forward = batches * self.pass_(work.rows, self.setup.trainer)
        backward = self.backward()
        sent = self.sent()
        others = (work.gpus - 1) / work.gpus
        # Weights are gathered for each pass, and gradients are FP32.
        passes = 2 + self.setup.recomputed
        gathered = others * batches * (passes * sent.trained + 4 * sent.gradients)
        one_node = work.gpus <= assumptions.GPUS_PER_NODE
        link = rates.link if one_node else rates.network
        publish = assumptions.PUBLISH_PASSES * sent.published / rates.memory
        seconds = {
            "prefill": self.prefill(),
            "decode": self.decode(),
            "old_log_prob": self.setup.recomputed * forward,
            "forward": forward,
            "backward": backward,
            "communication": max(gathered / link - (passes - 1) * forward - backward, 0.0),
            "optimizer": work.mini_batches * self.optimizer(),
            "quantize": self.quantizations() * self.quantize(),
            "publish": publish + others * sent.published / link,
        }
        if self.on_gpu:
            seconds |= self.beside_decode()
            seconds |= self.elementwise()
            seconds["constant"] = work.constant
        return Prediction(seconds, gathered + others * sent.published, sent.published)

    def backward(self) -> float:
        """Return seconds of a step's backwards, with the layers' forward if they run it again."""
        rows = self.work.rows
        each = 2 * self.pass_(rows, self.plain)
        if self.setup.checkpointed:
            each += self.pass_(rows, self.setup.trainer, head=False)
        if self.adapters:
            each -= self.frozen(rows)
        return self.work.batches * each

    def sent(self) -> Sent:
        """Return what ranks and engine send each other."""
        size = self.size
        rest = size.parameters - self.weights
        published = self.wire[self.scheme] + 2.0 * rest
        if not self.adapters:
            trained = published if self.setup.low_bit else 2.0 * size.parameters
            return Sent(published, trained, size.parameters)
        # A rank has the whole base, whose gradients nobody computes.
        adapters = 2.0 * self.adapters
        base = rest if self.setup.low_bit else size.parameters
        return Sent(adapters, 2.0 * base + adapters, self.adapters)

    def quantizations(self) -> int:
        """Return how often a step quantizes the weights: for each optimizer step, or only for the publish."""
        if not self.scheme.quantized or self.adapters:
            return 0
        return self.work.mini_batches if self.setup.low_bit else 1

    def quantize(self) -> float:
        """Return seconds to quantize this rank's share of the weights."""
        moved = 2 * self.weights + self.wire[self.scheme]
        return moved / self.work.gpus / self.rates.memory

    def elementwise(self) -> dict[str, float]:
        """Return seconds of a GPU for bytes that products do not move."""
        work = self.work
        response = work.response_length[0]
        tokens = round(work.rows * (work.prompt_length + response))
        trainer = self.setup.trainer.scheme
        moved_forward, moved_backward = beyond_products(self.size, trainer, tokens)
        passes = work.batches * self.size.layers / self.rates.memory
        forward = passes * moved_forward
        backward = passes * moved_backward
        logits = work.batches * work.rows * response * self.size.vocab / self.rates.memory
        of_forward = assumptions.LOGIT_FORWARD_BYTES * logits
        of_backward = assumptions.LOGIT_BACKWARD_BYTES * logits
        forwards = 2 if self.setup.checkpointed else 1
        return {
            "old_log_prob_elementwise": self.setup.recomputed * (forward + of_forward),
            "update_elementwise": forwards * forward + backward + of_forward + of_backward,
        }

    def beside_decode(self) -> dict[str, float]:
        """Return the terms of a GPU's rollout beside products and caches."""
        steps = self.decode_steps()
        each = self.decode_step(self.at_once())
        terms = {name: steps * seconds for name, seconds in each.items()}
        waits = 0.0
        if steps:
            on_gpu = self.decode() / steps + sum(each.values())
            waits = max(assumptions.ENGINE_SECONDS - on_gpu, 0.0)
        return terms | {"engine": steps * waits, "tail": self.tail()}

    def decode_step(self, rows: float) -> dict[str, float]:
        """Return seconds of a decode step of `rows` sequences beside products and cache."""
        size = self.size
        kernels = assumptions.LAYER_KERNELS
        if size.experts:
            kernels += assumptions.EXPERTS_KERNELS
        if not self.setup.compiled:
            kernels += assumptions.UNCOMPILED_KERNELS
        reduced = 0.0
        if self.work.tensor_parallel > 1:
            transfer = 2 * 2 * rows * size.hidden / self.rates.link
            reduced = 2 * size.layers * (assumptions.ALL_REDUCE_SECONDS + transfer)
        logits = 4 * rows * size.vocab / self.rates.memory
        return {
            "small_kernels": size.layers * kernels * assumptions.GRAPH_KERNEL_SECONDS,
            "all_reduce": reduced,
            "sampler": assumptions.SAMPLER_SECONDS + assumptions.SAMPLER_PASSES * logits,
        }

    def tail(self) -> float:
        """Return seconds in which the longest response is decoded alone, after those of the mean length have ended."""
        work = self.work
        products = (self.product(1, self.setup.engine) + self.head(1)) / work.tensor_parallel
        steps = work.response_length[-1] - work.response_length[0]
        on_gpu = products + sum(self.decode_step(1.0).values())
        return steps * max(on_gpu, assumptions.ENGINE_SECONDS)

    def optimizer(self) -> float:
        """Return seconds of an optimizer step on this GPU's share of the parameters."""
        size = self.size
        rates = self.rates
        gpus = self.work.gpus
        by_adamw = self.adapters or size.parameters
        optimizer = get_optimizer(self.work.optimizer)
        orthogonalizes = optimizer.orthogonalizes and not self.adapters
        if orthogonalizes:
            by_adamw = size.parameters - size.matrix_parameters
        seconds = assumptions.ADAMW_BYTES * by_adamw / gpus / rates.memory
        if not orthogonalizes:
            return seconds
        flop = sum(newton_schulz_flop(n, k) for n, k in size.linears().values()) / gpus
        moved = muon_bytes_per_weight(size) * size.matrix_parameters / gpus
        arithmetic = flop / self.plain.flop_per_s(size.hidden)
        return seconds + max(arithmetic, moved / rates.memory)

    def product(self, rows: float, by: Multiplier) -> float:
        """Return seconds of all linears for `rows` tokens.

        This is the longer of two times, one for arithmetic and one for reading the weights. The weights of experts
        without tokens are not read."""
        share = self.size.experts_per_token / max(self.size.experts, 1) or 1.0
        active = self.weights - (1 - share) * self.expert_weights
        read = self.weights - (1 - share) ** rows * self.expert_weights
        arithmetic = 2 * rows * active / by.flop_per_s(rows)
        reading = self.wire[by.scheme] * read / self.weights / self.rates.memory
        return max(arithmetic, reading)

    def head(self, rows: float) -> float:
        """Return seconds of lm_head for `rows` tokens."""
        weights = float(self.size.vocab * self.size.hidden)
        arithmetic = 2 * rows * weights / self.plain.flop_per_s(rows)
        return max(arithmetic, 2 * weights / self.rates.memory)

    def layers(self, rows: float, length: float, by: Multiplier) -> float:
        """Return seconds of all decoder layers for `rows` whole sequences: the linears plus causal attention.
        Attention has 2 FLOP per pair of tokens and element of the query width."""
        flop = 2.0 * rows * length**2 * self.size.query_width * self.size.layers
        tokens = rows * length
        attention = flop / self.plain.flop_per_s(tokens)
        return self.product(tokens, by) + attention

    def pass_(self, rows: float, by: Multiplier, *, head: bool = True) -> float:
        """Return seconds of a micro-batch's forward. A backward counts as twice an unquantized forward."""
        response = self.work.response_length[0]
        length = self.work.prompt_length + response
        seconds = self.layers(rows, length, by)
        return seconds + self.head(rows * response) if head else seconds

    def frozen(self, rows: float) -> float:
        """Return seconds of a micro-batch's products for the gradients of the base, which adapters do not need."""
        response = self.work.response_length[0]
        tokens = rows * (self.work.prompt_length + response)
        return self.product(tokens, self.plain) + self.head(rows * response)

    def prefill(self) -> float:
        work = self.work
        repeated = 1 if self.on_gpu else work.n
        prompts = -(-work.prompts * repeated // self.engines)
        products = self.layers(prompts, work.prompt_length, self.setup.engine) + self.head(prompts)
        return products / work.tensor_parallel

    def at_once(self) -> float:
        """Return how many responses an engine decodes at once. The KV cache limits them, and each is assumed to have
        half its final length."""
        room = self.kv_tokens / self.length
        return max(min(self.sequences, self.setup.sequences, room), 1.0)

    def decode_steps(self) -> float:
        """Return how many decode steps an engine makes until all responses have the mean length."""
        return self.sequences * (self.work.response_length[0] - 1) / self.at_once()

    def decode(self) -> float:
        """Return seconds of the products of all decode steps of an engine, and of reading weights and caches."""
        work = self.work
        at_once = self.at_once()
        of_token = self.size.kv_bytes_per_token(work.tensor_parallel)
        cache = at_once * self.length * of_token / self.rates.memory
        products = self.product(at_once, self.setup.engine) + self.head(at_once)
        step = products / work.tensor_parallel + cache
        return step * self.decode_steps()
