"""A training step by roofline: each phase takes as long as its arithmetic, or its bytes from memory or over links."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from qarl.checks.memory import ModelSize, wire_bytes
from qarl.config.schema import ROLLOUT_SCHEMES
from qarl.errors import UserError

Curves = dict[str, tuple[tuple[float, float], ...]]
EFFICIENCY = {"bf16": 0.65, "w4a16": 0.55, "w8a8": 0.5, "fp8": 0.5}
MEMORY = LINK = 0.8
"""Assumed shares of the data sheet's rates: tensor cores in a large product, memory, links."""
OPTIMIZER_BYTES, PUBLISH_PASSES, MOST_SEQUENCES, GPUS_PER_NODE = 38, 4, 256, 8
"""Bytes of a parameter and AdamW step (FP32 gradient, moments and master, BF16 weight); passes over published bytes;
vLLM's max_num_seqs."""
SHEETS = {
    "h100": (989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 450e9, 50e9),
    "h200": (989.4e12, 1978.9e12, 1978.9e12, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h800": (989.4e12, 1978.9e12, 1978.9e12, 3.35e12, 80 * 10**9, 200e9, 50e9),
    "a100": (312e12, 624e12, 312e12, 2.039e12, 80 * 10**9, 300e9, 25e9),
}
"""NVIDIA's data sheets, SXM: dense FLOP/s in BF16, INT8 and FP8 (A100: BF16's), bytes/s and bytes of memory, bytes/s of
NVLink and of a GPU's network adapter in one direction."""


@dataclass(frozen=True)
class Rates:
    """One device. `product`: scheme -> (rows, FLOP/s); `memory`, `link`, `network`: bytes/s; `said`: each in a line,
    with "assumed" if nobody measured it."""

    device: str
    product: Curves
    memory: float
    said: tuple[str, ...]
    memory_bytes: int = 0
    link: float = math.inf
    network: float = math.inf

    def flop_per_s(self, scheme: str, rows: float) -> float:
        """At the nearest measured number of rows."""
        return min(self.product[scheme], key=lambda point: abs(math.log(point[0] / max(rows, 1))))[1]


def assumed_rates(gpu: str) -> Rates:
    """Shares of a data sheet."""
    bf16, int8, fp8, memory, size, nvlink, network = SHEETS[gpu]
    peaks = {"bf16": bf16, "w4a16": bf16, "w8a8": int8, "fp8": fp8}
    product: Curves = {scheme: ((1.0, EFFICIENCY[scheme] * peak),) for scheme, peak in peaks.items()}
    said = [f"{s} product {EFFICIENCY[s] * peak / 1e12:.0f} TFLOP/s (assumed: {EFFICIENCY[s]} of the data sheet's "
            f"{peak / 1e12:.0f})" for s, peak in peaks.items()]  # fmt: skip
    for name, share, rate in (("memory", MEMORY, memory), ("NVLink", LINK, nvlink), ("network", LINK, network)):
        said.append(f"{name} {share * rate / 1e9:.0f} GB/s (assumed: {share} of the data sheet's {rate / 1e9:.0f})")
    return Rates(gpu.upper(), product, MEMORY * memory, tuple(said), size, LINK * nvlink, LINK * network)


def measured_rates(path: Path) -> Rates:
    """From a file of `qarl.bench kernels`: the first kernel of each scheme, which the trainer takes too."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        results = [entry for entry in document["results"] if entry["operation"] == "linear"]
        memory = float(document["ceilings"]["copy_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("not a file of qarl.bench kernels", where=f"rates={path}", why=str(error)) from error
    product: Curves = {}
    said = [f"memory {memory / 1e9:.1f} GB/s (measured: a copy)"]
    for scheme in EFFICIENCY:
        kernel = next((e["kernel"] for e in results if e["scheme"] == scheme and e["kernel"] != "reference"), None)
        mine = [e for e in results if (e["scheme"], e["kernel"]) == (scheme, kernel)]
        found = tuple((float(e["m"]), 2.0 * e["m"] * e["n"] * e["k"] / e["seconds"]["median"]) for e in mine)
        product[scheme] = found or product.get("bf16", ())
        if not product[scheme]:
            raise UserError("no linear product in BF16 was measured", where=f"rates={path}")
        best = max(rate for _, rate in product[scheme]) / 1e12
        why = f"measured: {kernel}" if found else "assumed: as bf16's, since it was not measured"
        said.append(f"{scheme} product up to {best:.2f} TFLOP/s ({why})")
    return Rates(document["device"], product, memory, tuple(said))


@dataclass(frozen=True)
class Work:
    """
    model             a name of qarl/bench/models, or a folder
    gpu               h100, h200, h800, a100: shares of their data sheets
    rates             a file of `qarl.bench kernels`, in place of a data sheet: one device
    gpus              altogether; tensor_parallel of them make an engine, with gpu_memory_utilization of their memory
    schemes           bf16,w8a8,fp8,w4a16
    prompts, n        prompts of a step, of prompt_length tokens, and responses to each
    response_length   tokens: mean, or mean,longest (memory depends on the longest)
    mini_batches, micro_batch   optimizer steps of a training step, rows of a forward
    json              the file to write
    """

    model: str = "Qwen3-8B"
    gpu: str = "h100"
    rates: Path | None = None
    gpus: int = 8
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.6
    schemes: tuple[str, ...] = ROLLOUT_SCHEMES
    prompts: int = 128
    n: int = 8
    prompt_length: int = 1024
    response_length: tuple[int, ...] = (2048,)
    mini_batches: int = 4
    micro_batch: int = 4
    json: Path | None = None


class Roofline:
    """One model, scheme and level on one kind of device."""

    def __init__(
        self, size: ModelSize, rates: Rates, work: Work, scheme: str, level: str, group_size: int, kv_tokens: float
    ) -> None:
        # There is room for `kv_tokens` in an engine's KV cache.
        self.size, self.rates, self.work, self.scheme, self.kv_tokens = size, rates, work, scheme, kv_tokens
        self.low_bit = scheme != "bf16" and level != "off"
        self.on_gpu = work.rates is None  # a prompt is prefilled once, and a backward computes the blocks again
        self.engines = work.gpus // work.tensor_parallel
        linears = size.linears()
        self.expert_weights = float(sum(n * k for name, (n, k) in linears.items() if ".experts." in name))
        self.weights = float(sum(n * k for n, k in linears.values()))
        self.wire = {s: float(sum(wire_bytes(s, group_size, shape) for shape in linears.values())) for s in EFFICIENCY}

    def step(self) -> tuple[dict[str, float], float, float]:
        """Seconds by phase (communication: what is longer than the passes beside it); bytes gathered and published."""
        work, rates, size, trainer = self.work, self.rates, self.size, self.scheme if self.low_bit else "bf16"
        batches = -(-work.prompts * work.n // (work.gpus * work.micro_batch))
        forward = batches * self.pass_(work.micro_batch, trainer)
        backward = batches * 2 * self.pass_(work.micro_batch, "bf16")
        if self.on_gpu:
            backward += batches * self.pass_(work.micro_batch, trainer, head=False)
        weights = 2.0 * size.parameters * (work.gpus - 1) / work.gpus
        gathered = batches * (3 * weights + 2 * weights)  # of three passes, and FP32 gradients
        link = rates.link if work.gpus <= GPUS_PER_NODE else rates.network
        published = self.wire[self.scheme] + 2.0 * (size.parameters - self.weights)
        times = work.mini_batches if self.low_bit else int(self.scheme != "bf16")
        seconds = {
            "prefill": self.prefill(),
            "decode": self.decode(),
            "old_log_prob": forward,
            "forward": forward,
            "backward": backward,
            "communication": max(gathered / link - 2 * forward - backward, 0.0),
            "optimizer": work.mini_batches * OPTIMIZER_BYTES * size.parameters / work.gpus / rates.memory,
            "quantize": times * (2 * self.weights + self.wire[self.scheme]) / rates.memory,
            "publish": PUBLISH_PASSES * published / rates.memory + weights / link,
        }
        return seconds, gathered + weights, published

    def product(self, rows: float, scheme: str) -> float:
        """Seconds of all linears for `rows` tokens: arithmetic, or the weights from memory, experts only if asked."""
        share = self.size.experts_per_token / max(self.size.experts, 1) or 1.0
        active = self.weights - (1 - share) * self.expert_weights
        read = self.weights - (1 - share) ** rows * self.expert_weights
        arithmetic = 2 * rows * active / self.rates.flop_per_s(scheme, rows)
        return max(arithmetic, self.wire[scheme] * read / self.weights / self.rates.memory)

    def head(self, rows: float) -> float:
        """lm_head."""
        weights = float(self.size.vocab * self.size.hidden)
        return max(2 * rows * weights / self.rates.flop_per_s("bf16", rows), 2 * weights / self.rates.memory)

    def rows(self, rows: int, length: float, scheme: str) -> float:
        """All blocks of whole rows: the linears, and causal attention, 2 FLOP a pair and element of the query width."""
        flop = 2.0 * rows * length**2 * self.size.query_width * self.size.layers
        return self.product(rows * length, scheme) + flop / self.rates.flop_per_s("bf16", rows * length)

    def pass_(self, rows: int, scheme: str, *, head: bool = True) -> float:
        """The forward of a micro-batch; a backward is twice that in BF16."""
        prompt, response = self.work.prompt_length, self.work.response_length[0]
        return self.rows(rows, prompt + response, scheme) + (self.head(rows * response) if head else 0.0)

    def prefill(self) -> float:
        work = self.work
        prompts = -(-work.prompts * (1 if self.on_gpu else work.n) // self.engines)
        return (self.rows(prompts, work.prompt_length, self.scheme) + self.head(prompts)) / work.tensor_parallel

    def decode(self) -> float:
        """All responses of an engine, as many at once as its KV cache holds half grown."""
        work, length = self.work, self.work.prompt_length + self.work.response_length[0] / 2
        sequences = -(-work.prompts * work.n // self.engines)
        at_once = max(min(sequences, MOST_SEQUENCES, self.kv_tokens / length), 1.0)
        cache = at_once * length * self.size.kv_bytes_per_token(work.tensor_parallel) / self.rates.memory
        one = (self.product(at_once, self.scheme) + self.head(at_once)) / work.tensor_parallel + cache
        return one * sequences * (work.response_length[0] - 1) / at_once
