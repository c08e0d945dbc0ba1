"""Estimates the memory of each part of a run, in bytes per GPU, from the configs of the model and of the run.

This is pure arithmetic without torch. The terms are functions of `weight_memory`, `activation_memory` and
`engine_memory`, which give the arithmetic. The result lists the parts, each with the phases in which it takes memory.
The doctor and dry runs print this list. The estimate adds up tensor sizes and ignores the allocator, so real use is a
few percent higher. It assumes sequences of full length.

    local    One process holds everything.
    verl     FSDP2 shards masters, gradients, optimizer state and low-bit tensors over nnodes * n_gpus_per_node ranks.

On GPUs vLLM sleeps while the trainer works (`rollout.free_cache_engine`). On a CPU it stays loaded.

The activations that autograd saves per token and layer are counted operator by operator, for transformers' blocks and
those of `qarl.align`. A test compares the count with autograd. benchmarks/proofs/memory.py compares the plan with the
peak of real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from qarl.checks import activation_memory, engine_memory, weight_memory
from qarl.checks.block_arithmetic import block_arithmetic
from qarl.checks.memory_parts import GIB, PHASES, Part, adapter_parameters, published
from qarl.checks.model_size import ModelSize, Shape
from qarl.config.level import Level
from qarl.errors import UserError

if TYPE_CHECKING:
    from qarl.config import Config
    from qarl.kernels.base import Kernel

RUNTIME_BYTES = 3 * GIB // 2
"""A rough allowance for a process's libraries, CUDA context and communication buffers."""
TIGHT = 0.9
"""An estimate above this share of the memory is tight, because estimates do not count fragmentation."""
KV_BLOCK = 128
"""Number of tokens per block of vLLM's KV cache on CPUs (vllm/platforms/cpu.py)."""
OFFLOAD = tuple(
    f"actor_rollout_ref.actor.fsdp_config.{what}_offload" for what in ("param", "optimizer")
)
"""verl's keys that move masters and optimizer state to host memory while they are not used."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per GPU (on CPU per rank) of each part, the KV cache, and one token in that cache.

    `host`: the parts that the processes of one GPU keep in host memory. On a CPU they are in `parts`. `processes`:
    number of GPUs on one machine."""

    parts: tuple[Part, ...]
    kv_cache: int
    kv_bytes_per_token: int
    host: tuple[Part, ...] = ()
    processes: int = 1

    @property
    def host_total(self) -> int:
        """Bytes of `host` on one machine."""
        return self.processes * sum(part.bytes for part in self.host)

    def host_lines(self) -> list[str]:
        """Return one line for each part in host memory, and one for their sum on one machine. Without parts, return
        []."""
        lines = [f"{p.name}: {readable(p.bytes)} for each GPU" for p in self.host]
        many = f", {self.processes} GPUs" if self.processes > 1 else ""
        return (
            [*lines, f"together on one machine{many}: {readable(self.host_total)}"] if lines else []
        )

    def total(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs the most memory, and its bytes."""
        return max(((phase, self.total(phase)) for phase in PHASES), key=lambda item: item[1])

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the KV cache, or 0 if the weights leave no room for a KV cache."""
        return max(self.kv_cache, 0) // self.kv_bytes_per_token

    def table(self) -> list[str]:
        """Return lines of text: a header with the unit, one line per part with its bytes by phase, and the sums."""
        unit, scale = ("GiB", GIB) if self.peak[1] >= 10 * GIB else ("MiB", GIB // 1024)
        width = max(len(part.name) for part in self.parts)

        def line(name: str, cells: Iterable[str]) -> str:
            return f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells).rstrip()

        def cell(size: int) -> str:
            return f"{size / scale:.1f}"

        rows = [
            line(p.name, (cell(p.bytes) if phase in p.phases else "" for phase in PHASES))
            for p in self.parts
        ]
        return [
            line(unit, PHASES),
            *rows,
            line("together", (cell(self.total(phase)) for phase in PHASES)),
        ]


def estimate(
    size: ModelSize,
    config: Config,
    *,
    device: str,
    gpu_memory_bytes: int = 0,
    level: Level | None = None,
    kernels: Mapping[Shape, type[Kernel]] | None = None,
) -> MemoryEstimate:
    """Estimate the memory of the run on one GPU, or of one rank on CPU.

    Args:
        device: "cuda" or "cpu".
        gpu_memory_bytes: memory of the GPU. vLLM takes the share `rollout.gpu_memory_utilization`.
        level: the level that is applied, if it differs from `quant.align`.
        kernels: maps [N, K] to the trainer's kernel. For a shape without an entry, the kernel is assumed to read
            the published tensors.
    """
    level = level or config.quant.align
    if config.model.gradient_checkpointing is None:
        config = _recomputing(config, recomputes(size, config, device, gpu_memory_bytes))
    arithmetic = block_arithmetic(level, device)
    reference = weight_memory.reference(size, config, level, kernels or {})
    on_host = config.backend == "verl" and device == "cuda"
    offload = all(config.verl.get(key) for key in OFFLOAD)
    engine, kv_cache = engine_memory.engine(size, config, device, gpu_memory_bytes)
    parts = [
        *weight_memory.states(size, config, offload),
        *weight_memory.gathered(size, config, level),
        *weight_memory.low_bit(size, config, level, kernels or {}),
        *(() if on_host else reference),
        *activation_memory.activations(size, config, level, arithmetic),
        *activation_memory.expert_rows(size, config, level),
        *activation_memory.logits(size, config),
        *engine,
        Part("libraries and runtime (allowance)", RUNTIME_BYTES),
    ]
    host = [*weight_memory.on_host(size, config, offload), *(reference if on_host else [])]
    return MemoryEstimate(
        tuple(part for part in parts if part.bytes),
        kv_cache,
        size.kv_bytes_per_token(config.rollout.tensor_model_parallel_size),
        tuple(part for part in host if part.bytes and device == "cuda"),
        config.trainer.n_gpus_per_node if config.backend == "verl" else 1,
    )


def recomputes(size: ModelSize, config: Config, device: str, gpu_memory_bytes: int) -> bool:
    """Return whether the trainer recomputes activations on a device with `gpu_memory_bytes` (0 on a CPU).

    If `model.gradient_checkpointing` is null, it does so on a GPU on which the update would be tight otherwise. The
    answer depends on nothing else, so the doctor's is the trainer's."""
    asked = config.model.gradient_checkpointing
    if asked is not None:
        return asked
    if device != "cuda" or not gpu_memory_bytes:
        return False
    without = estimate(
        size, _recomputing(config, False), device=device, gpu_memory_bytes=gpu_memory_bytes
    )
    return without.total("update") > TIGHT * gpu_memory_bytes


def _recomputing(config: Config, recomputed: bool) -> Config:
    model = config.model.model_copy(update={"gradient_checkpointing": recomputed})
    return config.model_copy(update={"model": model})


def checkpoint_bytes(size: ModelSize, config: Config) -> dict[str, int]:
    """Return two sizes on disk: the export for vLLM, and a checkpoint (BF16 model, FP32 masters if any, moments). With
    verl, FP32 masters are the only copy of the model in it."""
    export = published(size, config)
    trained = adapter_parameters(size, config)
    masters = 4 if config.backend == "verl" else 6
    weights = (masters if config.optim.master_dtype == "fp32" else 2) * (trained or size.parameters)
    return {
        "export": export + 2 * trained,
        "resumable": weights + weight_memory.optimizer_state(size, config),
    }


def largest_checkpoint_file(size: ModelSize, config: Config) -> int:
    """Return the bytes of a checkpoint's largest file, without its header: the optimizer's, with the masters if there
    are any. verl has one of masters and one of the optimizer for each rank."""
    trained = adapter_parameters(size, config) or size.parameters
    state = weight_memory.optimizer_state(size, config)
    has_masters = config.optim.master_dtype == "fp32"
    if config.backend == "verl":
        return max(state, (4 if has_masters else 2) * trained) // weight_memory.ranks(config)
    return state + (4 * trained if has_masters else 0)


def readable(size: int) -> str:
    """Return a size in GiB, or in MiB if it is below 1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / GIB * 1024:.1f} MiB"


def check_kv_cache(config: Config, size: ModelSize) -> None:
    """Raise UserError if vLLM's KV cache on a CPU is too small for one sequence of full length.

    vLLM would not start, and its error would name gpu_memory_utilization, which has no effect on a CPU.
    """
    length = config.data.max_prompt_length + config.data.max_response_length
    blocks = -(-length // KV_BLOCK) + 1
    needed = blocks * KV_BLOCK * size.kv_bytes_per_token()
    gib = config.rollout.cpu_kvcache_space_gib
    if int(gib * GIB) < needed:
        raise UserError(
            f"rollout.cpu_kvcache_space_gib={gib:g} is too small for one sequence of {length} tokens",
            where="rollout.cpu_kvcache_space_gib",
            why=f"max_prompt_length + max_response_length need {readable(needed)} of vLLM's KV cache: {blocks} blocks "
            f"of {KV_BLOCK} tokens, including one that vLLM keeps free",
            fix=f"set it to at least {math.ceil(needed / GIB * 1000) / 1000:g} for each sequence that vLLM should "
            "decode at the same time",
        )


def available_memory() -> int:
    """Return the free bytes of this machine, or those of this process's container if they are fewer."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # without a limit the file holds the word max
        return free
    return min(free, limit - used)
