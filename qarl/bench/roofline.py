"""Roofline of a training step. The time of a phase is the longest of its times for arithmetic, memory and links.

On GPUs some terms come on top (`TERMS`): the bytes that products do not move, as counted (`BEYOND`),
and what a decode step takes beside its products and its KV cache. Nobody has measured the latter with QaRL: the
constants are estimates for an H100 and vLLM 0.24 with CUDA graphs. They decide the time of a token when few responses
are left. Launches of a pass, copies out of the gather's buffer and changes of an int4 layout have no term: they take at
most 2% of a step of the models in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from qarl.bench.arguments import Schemes
from qarl.checks.model_size import ModelSize, wire_bytes
from qarl.config.command_arguments import Commas, OutputFile, read_request
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names

Curves = dict[str, tuple[tuple[float, float], ...]]
EFFICIENCY = {"bf16": 0.65, "w4a16": 0.55, "w8a8": 0.5, "fp8": 0.5}
MEMORY = LINK = 0.8
"""Assumed shares of the data sheet's rates: `EFFICIENCY` of large products, `MEMORY` and `LINK` of transfers."""
OPTIMIZER_BYTES, PUBLISH_PASSES, MOST_SEQUENCES, GPUS_PER_NODE = 38, 4, 256, 8
"""In order: bytes that an AdamW step moves per parameter (FP32 gradient, moments and master, BF16 weight); passes over
the published bytes; vLLM's max_num_seqs; number of GPUs in a node."""
NEWTON_SCHULZ_STEPS = 5
BLOCK = {
    False: ((84, 20, 0, 8, 10), (204, 28, 0, 8, 18)),
    True: ((84, 56, 24, 8, 10), (204, 120, 40, 8, 18)),
}
"""Whether queries and keys are normed -> bytes that a layer's norms, rotary embedding, residuals and SwiGLU move in a
forward and in a backward: for each token and hidden element, element of queries and keys, head, element of a head, and
element of a dense MLP."""
BEYOND: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "bf16": ((0, 0, 2, 22, 10, 0), (0, 0, 4, 32, 26, 0)),
    "w4a16": ((0, 4, 0, 0, 0, 0), (0, 4, 0, 0, 0, 9.73)),
    "w8a8": ((2, 0, 3, 0, 3, 0), (6, 4, 3, 0, 14, 6)),
    "fp8": ((2, 0, 5, 2, 3, 0), (6, 4, 3, 0, 14, 6)),
}
"""Trainer -> bytes that its linears and experts move beyond those of their products: for
each token and input of a dense linear, and for each weight of those; with experts, for each token and hidden element,
for each row of an expert and hidden and inner element, and for each weight of the experts. As counted for micro-batches
of 4096 tokens and 512 rows an expert or more (`benchmarks/proofs/layer_costs.py`)."""
MUON_BYTES = (138, 120)
"""Bytes that Muon moves for a matrix of n x m in FP32, n <= m: for each element, and for each of n x n (counted)."""
LOGIT_BYTES = (24, 40)
"""Bytes that log-probs and entropy move per logit beyond the product, in a forward and in a backward (estimate)."""
GRAPH_KERNEL_SECONDS = 3e-6
"""Time of a small kernel in a CUDA graph, with the gap to the next one (estimate)."""
LAYER_KERNELS, EXPERTS_KERNELS, UNCOMPILED_KERNELS = 10, 8, 8
"""Kernels of a layer in a decode step that a roofline of products does not contain (estimates). In order: norms, rotary
embedding, writes to the cache, attention and its reduction; routing and what lies between the experts' products; what
vLLM's compiler would have fused. 8-bit engines are not compiled (`qarl.rollout.engine_config.graph_arguments`)."""
UNCOMPILED = ("w8a8", "fp8")
ALL_REDUCE_SECONDS = 12e-6
"""Latency of an all-reduce between the GPUs of an engine; each layer has two (estimate)."""
SAMPLER_SECONDS, SAMPLER_PASSES = 125e-6, 8
"""Time to launch the sampler's 25 kernels one by one, and its passes over FP32 logits (estimates)."""
ENGINE_SECONDS = 8e-3
"""The least time of a decode step, because the host needs as long: scheduler, inputs, messages between processes
(estimate). vLLM schedules a step while the device computes the former one, so only the longer time counts."""
SHEETS = {
    "h100": (989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 450e9, 50e9),
    "h200": (989.4e12, 1978.9e12, 1978.9e12, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h800": (989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 200e9, 50e9),
    "a100": (312e12, 624e12, 312e12, 2.039e12, 80 * 10**9, 300e9, 25e9),
}
"""From NVIDIA's data sheets for SXM: dense FLOP/s in BF16, INT8 and FP8 (for A100 the BF16 rate, because it has no
FP8), memory in bytes/s and bytes, and bytes/s of NVLink and of a GPU's network adapter in one direction."""
TERMS: dict[str, tuple[str, str]] = {
    "prefill": ("rollout", "products and attention of the prompts"),
    "decode": ("rollout", "products of the decode steps, and reading weights and caches"),
    "small_kernels": ("rollout", "a decode step's other kernels (estimate)"),
    "all_reduce": ("rollout", "an engine's all-reduces (estimate)"),
    "sampler": ("rollout", "sampler and log-probs of a decode step (estimate)"),
    "engine": (
        "rollout",
        "the engine's host, as far as a decode step takes longer than the device (estimate)",
    ),
    "tail": ("rollout", "the longest response alone, from the mean length to its end"),
    "old_log_prob": ("old_log_prob", "products and attention"),
    "old_log_prob_elementwise": (
        "old_log_prob",
        "bytes beyond those of products (counted; of logits, estimate)",
    ),
    "forward": ("update", "products and attention"),
    "backward": ("update", "products and attention; on GPUs also the layers' forward again"),
    "update_elementwise": ("update", "bytes beyond those of products, as above"),
    "communication": (
        "update",
        "gathers and reduce-scatter, as far as they take longer than the passes",
    ),
    "optimizer": ("optimizer", "Muon or AdamW on this rank's share (Muon counted)"),
    "quantize": ("optimizer", "this rank's share into low bits"),
    "publish": ("publish", "passes over the published bytes, and a gather"),
    "constant": ("other", "Ray, tokenizer, rewards, verl's metrics, sleep and wake (assumed)"),
}
"""Term -> phase of a step, and what it is."""
PHASES = ("rollout", "old_log_prob", "update", "optimizer", "publish", "other")


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {
        phase: sum(s for term, s in seconds.items() if TERMS[term][0] == phase) for phase in PHASES
    }


@dataclass(frozen=True)
class Rates:
    """Rates of one device. `product`: scheme -> its points (rows, FLOP/s). `memory`, `link` and `network`: bytes/s.
    `said`: for each rate a line of text that says whether it was measured or assumed."""

    device: str
    product: Curves
    memory: float
    said: tuple[str, ...]
    memory_bytes: int = 0
    link: float = math.inf
    network: float = math.inf

    def flop_per_s(self, scheme: str, rows: float) -> float:
        """Return the rate of the point in `product` whose number of rows is nearest to `rows`."""
        return min(self.product[scheme], key=lambda point: abs(math.log(point[0] / max(rows, 1))))[
            1
        ]


def assumed_rates(gpu: str) -> Rates:
    """Return the rates of NVIDIA's data sheet for `gpu`, multiplied by the shares `EFFICIENCY`, `MEMORY` and `LINK`."""
    bf16, int8, fp8, memory, size, nvlink, network = SHEETS[gpu]
    peaks = {"bf16": bf16, "w4a16": bf16, "w8a8": int8, "fp8": fp8}
    product: Curves = {
        scheme: ((1.0, EFFICIENCY[scheme] * peak),) for scheme, peak in peaks.items()
    }
    said = [f"{s} product {EFFICIENCY[s] * peak / 1e12:.0f} TFLOP/s (assumed: {EFFICIENCY[s]} of the data sheet's "
            f"{peak / 1e12:.0f})" for s, peak in peaks.items()]  # fmt: skip
    for name, share, rate in (
        ("memory", MEMORY, memory),
        ("NVLink", LINK, nvlink),
        ("network", LINK, network),
    ):
        said.append(
            f"{name} {share * rate / 1e9:.0f} GB/s (assumed: {share} of the data sheet's {rate / 1e9:.0f})"
        )
    return Rates(
        gpu.upper(), product, MEMORY * memory, tuple(said), size, LINK * nvlink, LINK * network
    )


def measured_rates(path: Path) -> Rates:
    """Read rates from a file of `qarl.bench kernels`. For each scheme, use its first kernel, as the trainer does.
    Raise UserError if the file cannot be read or has no BF16 product."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        results = [entry for entry in document["results"] if entry["operation"] == "linear"]
        memory = float(document["ceilings"]["copy_bytes_per_s"])
        product = Curves()
        said = [f"memory {memory / 1e9:.1f} GB/s (measured: a copy)"]
        for scheme in EFFICIENCY:
            kernel = next(
                (
                    e["kernel"]
                    for e in results
                    if e["scheme"] == scheme and e["kernel"] != "reference"
                ),
                None,
            )
            mine = [e for e in results if (e["scheme"], e["kernel"]) == (scheme, kernel)]
            points = tuple(
                (float(e["m"]), 2.0 * e["m"] * e["n"] * e["k"] / e["seconds"]["median"])
                for e in mine
            )
            product[scheme] = points or product["bf16"]
            best = max(rate for _, rate in product[scheme]) / 1e12
            why = (
                f"measured: {kernel}"
                if points
                else "assumed: the same as bf16, since it was not measured"
            )
            said.append(f"{scheme} product up to {best:.2f} TFLOP/s ({why})")
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "the file is not from qarl.bench kernels, or has no BF16 linear product"
        raise UserError(what, where=f"rates={path}", why=str(error)) from error
    return Rates(document["device"], product, memory, tuple(said))


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Work:
    """
    model             a name from qarl/bench/models, or a folder
    gpu               h100, h200, h800 or a100; rates are assumed shares of its data sheet
    rates             a file of `qarl.bench kernels` to use instead of a data sheet, for one device
    gpus              total number; each engine uses tensor_parallel GPUs and gpu_memory_utilization of their memory
    schemes           bf16,w8a8,fp8,w4a16
    prompts, n        prompts per step, each of prompt_length tokens, and responses per prompt
    response_length   tokens: mean, or mean,longest (memory and the end of the rollout depend on the longest)
    mini_batches, micro_batch   optimizer steps per training step, rows per forward
    micro_tokens      tokens per forward, instead of micro_batch (`actor.ppo_max_token_len_per_gpu`)
    optimizer         muon or adamw; muon on GPUs by default
    lora_r            rank of adapters on a frozen base; 0 trains all weights. Their own products are left out
    constant          assumed seconds per step that depend on nothing here: Ray, tokenizer, rewards, sleep and wake
    json              the file to write"""

    model: str = "Qwen3-8B"
    gpu: Literal[*SHEETS] = "h100"  # type: ignore[valid-type]  # not written out
    rates: Path | None = None
    gpus: PositiveInt = 8
    tensor_parallel: PositiveInt = 1
    gpu_memory_utilization: PositiveFloat = 0.6
    schemes: Schemes = engine_scheme_names()
    prompts: PositiveInt = 128
    n: PositiveInt = 8
    prompt_length: PositiveInt = 1024
    response_length: Annotated[tuple[PositiveInt, ...], Commas] = (2048,)
    mini_batches: PositiveInt = 4
    micro_batch: PositiveInt = 4
    micro_tokens: PositiveInt | None = None
    optimizer: Literal["muon", "adamw"] = "adamw"
    lora_r: NonNegativeInt = 0
    constant: PositiveFloat = 5.0
    json: OutputFile | None = None

    @classmethod
    def parse(cls, part: str, words: Sequence[str]) -> Work:
        measured = any(argument.startswith("rates=") for argument in words)
        defaults: dict[str, Any] = (
            {"gpus": 1, "mini_batches": 1} if measured else {"optimizer": "muon"}
        )
        return read_request(cls, words, example="qarl bench plan model=Qwen3-8B", **defaults)

    @property
    def rows(self) -> float:
        """Rows of the mean length in a forward."""
        if self.micro_tokens is None:
            return self.micro_batch
        return self.micro_tokens / (self.prompt_length + self.response_length[0])

    @property
    def batches(self) -> int:
        """Forwards of a step on one GPU."""
        return math.ceil(self.prompts * self.n / (self.gpus * self.rows))


class Roofline:
    """The time of a step for one model, scheme and level on one kind of device."""

    def __init__(
        self,
        size: ModelSize,
        rates: Rates,
        work: Work,
        scheme: str,
        level: str,
        group_size: int,
        kv_tokens: float,
    ) -> None:
        # `kv_tokens`: how many tokens fit in an engine's KV cache.
        self.size = size
        self.rates = rates
        self.work = work
        self.scheme = scheme
        self.kv_tokens = kv_tokens
        self.low_bit = scheme != "bf16" and level != "off"
        # On GPUs a prompt is prefilled once for all its responses, and a backward recomputes the layers.
        self.on_gpu = work.rates is None
        self.engines = work.gpus // work.tensor_parallel
        self.sequences = -(-work.prompts * work.n // self.engines)
        self.length = (
            work.prompt_length + work.response_length[0] / 2
        )  # of a sequence on average, while it is decoded
        linears = size.linears()
        self.expert_weights = float(
            sum(n * k for name, (n, k) in linears.items() if ".experts." in name)
        )
        self.weights = float(sum(n * k for n, k in linears.values()))
        self.adapters = work.lora_r * sum(
            n + k for name, (n, k) in linears.items() if ".experts." not in name
        )
        self.wire = {
            s: float(sum(wire_bytes(s, group_size, shape) for shape in linears.values()))
            for s in EFFICIENCY
        }

    def step(self) -> tuple[dict[str, float], float, float]:
        """Return seconds by term (`TERMS`), bytes gathered and bytes published. Communication overlaps with the passes,
        so only the time by which it is longer counts."""
        work = self.work
        rates = self.rates
        size = self.size
        trainer = self.scheme if self.low_bit else "bf16"
        batches = work.batches
        rows = work.rows
        forward = batches * self.pass_(rows, trainer)
        backward = batches * 2 * self.pass_(rows, "bf16")
        if self.on_gpu:
            backward += batches * self.pass_(rows, trainer, head=False)
        others = (work.gpus - 1) / work.gpus
        rest = size.parameters - self.weights
        published = self.wire[self.scheme] + 2.0 * rest
        gradients = size.parameters
        trained = published if self.low_bit else 2.0 * size.parameters
        if self.adapters:  # a rank has the whole base, whose gradients nobody computes
            backward -= batches * self.frozen(rows)
            published = 2.0 * self.adapters
            gradients = self.adapters
            trained = 2.0 * (rest if self.low_bit else size.parameters) + published
        gathered = (
            others * batches * (3 * trained + 4 * gradients)
        )  # weights for three passes, FP32 gradients
        # Weights are quantized for each optimizer step, or at `off` only for the publish.
        quantizations = (
            0
            if self.scheme == "bf16" or self.adapters
            else work.mini_batches
            if self.low_bit
            else 1
        )
        link = rates.link if work.gpus <= GPUS_PER_NODE else rates.network
        seconds = {
            "prefill": self.prefill(),
            "decode": self.decode(),
            "old_log_prob": forward,
            "forward": forward,
            "backward": backward,
            "communication": max(gathered / link - 2 * forward - backward, 0.0),
            "optimizer": work.mini_batches * self.optimizer(),
            "quantize": quantizations
            * (2 * self.weights + self.wire[self.scheme])
            / work.gpus
            / rates.memory,
            "publish": PUBLISH_PASSES * published / rates.memory + others * published / link,
        }
        if self.on_gpu:
            seconds |= (
                self.beside_decode() | self.elementwise(trainer) | {"constant": work.constant}
            )
        return seconds, gathered + others * published, published

    def elementwise(self, trainer: str) -> dict[str, float]:
        """Return seconds of a GPU for bytes that products do not move. A backward runs its blocks' forward again."""
        work = self.work
        memory = self.rates.memory
        tokens = round(work.rows * (work.prompt_length + work.response_length[0]))
        forward, backward = (work.batches * self.size.layers * moved / memory
                             for moved in beyond_products(self.size, trainer, tokens))  # fmt: skip
        logits = work.batches * work.rows * work.response_length[0] * self.size.vocab / memory
        return {
            "old_log_prob_elementwise": forward + LOGIT_BYTES[0] * logits,
            "update_elementwise": 2 * forward + backward + sum(LOGIT_BYTES) * logits,
        }

    def beside_decode(self) -> dict[str, float]:
        """Return the terms of a GPU's rollout beside products and caches."""
        steps = self.decode_steps()
        each = self.decode_step(self.at_once())
        on_gpu = self.decode() / steps + sum(each.values()) if steps else ENGINE_SECONDS
        terms = {name: steps * seconds for name, seconds in each.items()}
        return terms | {"engine": steps * max(ENGINE_SECONDS - on_gpu, 0.0), "tail": self.tail()}

    def decode_step(self, rows: float) -> dict[str, float]:
        """Return seconds of a decode step of `rows` sequences beside products and cache."""
        size = self.size
        kernels = LAYER_KERNELS + (EXPERTS_KERNELS if size.experts else 0)
        kernels += UNCOMPILED_KERNELS if self.scheme in UNCOMPILED else 0
        reduced = 0.0
        if self.work.tensor_parallel > 1:
            reduced = (
                2
                * size.layers
                * (ALL_REDUCE_SECONDS + 2 * 2 * rows * size.hidden / self.rates.link)
            )
        return {
            "small_kernels": size.layers * kernels * GRAPH_KERNEL_SECONDS,
            "all_reduce": reduced,
            "sampler": SAMPLER_SECONDS + SAMPLER_PASSES * 4 * rows * size.vocab / self.rates.memory,
        }

    def tail(self) -> float:
        """Return seconds in which the longest response is decoded alone, after those of the mean length have ended."""
        work = self.work
        products = (self.product(1, self.scheme) + self.head(1)) / work.tensor_parallel
        steps = work.response_length[-1] - work.response_length[0]
        return steps * max(products + sum(self.decode_step(1.0).values()), ENGINE_SECONDS)

    def optimizer(self) -> float:
        """Return seconds of an optimizer step on this GPU's share of the parameters."""
        size = self.size
        rates = self.rates
        gpus = self.work.gpus
        if self.work.optimizer == "adamw" or self.adapters:
            return OPTIMIZER_BYTES * (self.adapters or size.parameters) / gpus / rates.memory
        rest = OPTIMIZER_BYTES * (size.parameters - size.matrix_parameters) / gpus / rates.memory
        flop = sum(newton_schulz_flop(n, k) for n, k in size.linears().values()) / gpus
        moved = muon_bytes_per_weight(size) * size.matrix_parameters / gpus
        return rest + max(flop / rates.flop_per_s("bf16", size.hidden), moved / rates.memory)

    def product(self, rows: float, scheme: str) -> float:
        """Return seconds of all linears for `rows` tokens.

        This is the longer of two times, one for arithmetic and one for reading the weights. The weights of experts
        without tokens are not read."""
        share = self.size.experts_per_token / max(self.size.experts, 1) or 1.0
        active = self.weights - (1 - share) * self.expert_weights
        read = self.weights - (1 - share) ** rows * self.expert_weights
        arithmetic = 2 * rows * active / self.rates.flop_per_s(scheme, rows)
        return max(arithmetic, self.wire[scheme] * read / self.weights / self.rates.memory)

    def head(self, rows: float) -> float:
        """Return seconds of lm_head for `rows` tokens."""
        weights = float(self.size.vocab * self.size.hidden)
        return max(
            2 * rows * weights / self.rates.flop_per_s("bf16", rows),
            2 * weights / self.rates.memory,
        )

    def layers(self, rows: float, length: float, scheme: str) -> float:
        """Return seconds of all decoder layers for `rows` whole sequences: the linears plus causal attention.
        Attention has 2 FLOP per pair of tokens and element of the query width."""
        flop = 2.0 * rows * length**2 * self.size.query_width * self.size.layers
        return self.product(rows * length, scheme) + flop / self.rates.flop_per_s(
            "bf16", rows * length
        )

    def pass_(self, rows: float, scheme: str, *, head: bool = True) -> float:
        """Return seconds of a micro-batch's forward. A backward counts as twice a forward with scheme bf16."""
        prompt = self.work.prompt_length
        response = self.work.response_length[0]
        return self.layers(rows, prompt + response, scheme) + (
            self.head(rows * response) if head else 0.0
        )

    def frozen(self, rows: float) -> float:
        """Return seconds of a micro-batch's products for the gradients of the base, which adapters do not need."""
        prompt = self.work.prompt_length
        response = self.work.response_length[0]
        return self.product(rows * (prompt + response), "bf16") + self.head(rows * response)

    def prefill(self) -> float:
        work = self.work
        prompts = -(-work.prompts * (1 if self.on_gpu else work.n) // self.engines)
        return (
            self.layers(prompts, work.prompt_length, self.scheme) + self.head(prompts)
        ) / work.tensor_parallel

    def at_once(self) -> float:
        """Return how many responses an engine decodes at once. The KV cache limits them, and each is assumed to have
        half its final length."""
        return max(min(self.sequences, MOST_SEQUENCES, self.kv_tokens / self.length), 1.0)

    def decode_steps(self) -> float:
        """Return how many decode steps an engine makes until all responses have the mean length."""
        return self.sequences * (self.work.response_length[0] - 1) / self.at_once()

    def decode(self) -> float:
        """Return seconds of the products of all decode steps of an engine, and of reading weights and caches."""
        work = self.work
        at_once = self.at_once()
        cache = (
            at_once
            * self.length
            * self.size.kv_bytes_per_token(work.tensor_parallel)
            / self.rates.memory
        )
        step = (
            self.product(at_once, self.scheme) + self.head(at_once)
        ) / work.tensor_parallel + cache
        return step * self.decode_steps()


def newton_schulz_flop(rows: int, columns: int) -> float:
    """Return FLOP of Muon's Newton-Schulz for a matrix: per step two products of n x n x m and one of n x n x n."""
    n = min(rows, columns)
    m = max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4.0 * n * n * m + 2.0 * n**3)


def beyond_products(size: ModelSize, trainer: str, tokens: int) -> tuple[float, float]:
    """Return the bytes of a layer's forward and backward that products do not move. `trainer`: its scheme."""
    dense = dense_linears(size)
    hidden = size.hidden
    inner = size.moe_intermediate
    rows, mlp = (tokens * size.experts_per_token, 0) if size.experts else (0, size.intermediate)
    sizes = [
        tokens * hidden,
        tokens * (size.query_width + size.kv_width),
        tokens * (size.heads + size.kv_heads),
    ]
    sizes += [tokens * size.head_dim, tokens * mlp]
    sizes += [tokens * sum(k for _, k in dense), sum(n * k for n, k in dense)]
    sizes += [
        tokens * hidden if size.experts else 0,
        rows * hidden,
        rows * inner,
        3 * size.experts * hidden * inner,
    ]
    both = zip(BLOCK[size.qk_norm], BEYOND[trainer], strict=True)
    forward, backward = (sum(map(mul, block + linears, sizes)) for block, linears in both)
    return forward, backward


def dense_linears(size: ModelSize) -> list[tuple[int, int]]:
    """Return [N, K] of the linears of a block that are not experts'."""
    return [shape for name, shape in size.block_linears(0).items() if ".experts." not in name]


def muon_bytes_per_weight(size: ModelSize) -> float:
    """Return the bytes that Muon moves for a weight of a block. The stacks of experts are two matrices an expert."""
    block = dense_linears(size)
    block += [
        (2 * size.moe_intermediate, size.hidden),
        (size.hidden, size.moe_intermediate),
    ] * size.experts
    moved = sum(MUON_BYTES[0] * n * k + MUON_BYTES[1] * min(n, k) ** 2 for n, k in block)
    return moved / sum(n * k for n, k in block)
