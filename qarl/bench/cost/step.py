"""One training step: seconds of each phase, on one machine or on N GPUs.

On N GPUs engines of `tensor_parallel` GPUs each get the responses in turn, as verl's balancer sends each to the engine
with fewest; the trainer's ranks get them in order, and FSDP2 shards masters, gradients and optimizer state over all of
them. A phase lasts until its slowest engine or rank is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from qarl.bench.cost.ceilings import Ceilings
from qarl.bench.cost.collectives import all_gather, reduce_scatter
from qarl.bench.cost.decoding import BLOCK
from qarl.bench.cost.parts import Part, binding, merged, total
from qarl.bench.cost.rollout import Engine
from qarl.bench.cost.trainer import Trainer
from qarl.bench.cost.workload import Workload, deal
from qarl.checks.memory import ENGINE_WORKSPACE_BYTES, ModelSize
from qarl.errors import UserError

PHASES = (
    "prefill", "decode", "old_log_prob", "forward", "backward", "communication", "optimizer", "quantize", "publish",
)  # fmt: skip
"""`communication`: what FSDP2's collectives take longer than the computation they run beside."""
ROLLOUT = PHASES[:2]


@dataclass(frozen=True)
class Layout:
    """`gpus` altogether; `tensor_parallel` of them make an engine, which takes `gpu_memory_utilization` of their memory
    for its weights and KV cache. `low_bit_gather`: FSDP2 gathers the low-bit tensors
    of the quantized weights, not BF16; `low_bit_publish`: each rank quantizes its shard before it is gathered."""

    gpus: int = 1
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.6
    low_bit_gather: bool = False
    low_bit_publish: bool = False

    @property
    def engines(self) -> int:
        return max(self.gpus // self.tensor_parallel, 1)


@dataclass(frozen=True)
class Step:
    """Parts of each phase of a step."""

    phases: dict[str, list[Part]]
    mean_batch: float
    decode_steps: int

    def seconds(self, phase: str) -> float:
        return total(self.phases.get(phase, ()))

    @property
    def rollout(self) -> float:
        return self.seconds("prefill") + self.seconds("decode")

    @property
    def update(self) -> float:
        return sum(self.seconds(phase) for phase in ("forward", "backward", "communication", "optimizer"))

    @property
    def step(self) -> float:
        return sum(self.seconds(phase) for phase in PHASES)

    def bound(self, phase: str) -> str:
        return binding(self.phases.get(phase, []))


def predict(
    size: ModelSize, ceilings: Ceilings, work: Workload, scheme: str, level: str, layout: Layout | None = None,
    *, like: Step | None = None,
) -> Step:  # fmt: skip
    """Seconds of one training step. `like`: a step with the same rollout, which is taken from it."""
    layout = layout or Layout()
    if like is None:
        phases, batch, steps = _rollout(size, ceilings, work, scheme, layout)
    else:
        phases, batch, steps = {p: like.phases[p] for p in ROLLOUT}, like.mean_batch, like.decode_steps
    trainer = Trainer(size, ceilings, scheme, level, work, ranks=layout.gpus)
    rows, responses = _slowest(work, layout.gpus)
    forward = trainer.forward(rows, responses)
    phases |= {
        "old_log_prob": trainer.old_log_prob(rows, responses),
        "forward": forward,
        "backward": trainer.backward(rows, responses),
        "optimizer": trainer.optimizer(),
        "quantize": trainer.quantize(),
        "publish": trainer.publish(),
    }
    if layout.gpus > 1:
        phases["communication"] = _communication(trainer, ceilings, phases, len(rows), layout)
        phases["publish"] += _gathered_for_publish(trainer, ceilings, layout)
    return Step({phase: merged(parts) for phase, parts in phases.items()}, batch, steps)


def _rollout(
    size: ModelSize, ceilings: Ceilings, work: Workload, scheme: str, layout: Layout
) -> tuple[dict[str, list[Part]], float, int]:
    """Of the engine that takes longest: prefill of its share, then decoding."""
    kv_bytes = None
    if ceilings.memory_bytes:
        weights = Trainer(size, ceilings, scheme, "linears", work).wire / layout.tensor_parallel
        kv_bytes = layout.gpu_memory_utilization * ceilings.memory_bytes - weights - ENGINE_WORKSPACE_BYTES
    engine = Engine(size, ceilings, scheme, work, parallel=layout.tensor_parallel, kv_bytes=kv_bytes)
    _check_room(engine, scheme)
    slowest: tuple[list[Part], float, int] = ([], 0.0, 0)
    found = work.lengths()
    hands = [range(first, len(found), layout.engines) for first in range(layout.engines)]
    if len(set(found)) == 1:
        hands = hands[:1]
    prompts = [[response // work.n for response in hand] for hand in hands]
    for hand, of_prompt in zip(hands, prompts, strict=True):
        decoded, run = engine.decode([found[response] for response in hand], of_prompt)
        if total(decoded) >= total(slowest[0]):
            slowest = decoded, run.mean_batch, run.steps
    prefill = max((engine.prefill(of_prompt) for of_prompt in prompts), key=total)
    return {"prefill": prefill, "decode": slowest[0]}, slowest[1], slowest[2]


def _check_room(engine: Engine, scheme: str) -> None:
    longest = engine.work.prompt_length + engine.work.response_max
    if engine.kv_blocks * BLOCK < longest:
        raise UserError(
            f"an engine with {scheme} weights has room for {max(engine.kv_blocks, 0) * BLOCK:.0f} tokens, "
            f"a response takes {longest}",
            where="gpu_memory_utilization, tensor_parallel",
            fix="a higher tensor_parallel or gpu_memory_utilization",
        )


def _slowest(work: Workload, ranks: int) -> tuple[list[int], int]:
    """Row lengths of the rank with most tokens, and its response tokens."""
    pairs = list(zip(work.row_lengths(), work.lengths(), strict=True))
    hands = [[pairs[i] for i in hand] for hand in deal(range(len(pairs)), min(ranks, len(pairs)))]
    hand = max(hands, key=lambda hand: sum(row for row, _ in hand))
    return [row for row, _ in hand], sum(length for _, length in hand)


def _communication(
    trainer: Trainer, ceilings: Ceilings, phases: dict[str, list[Part]], rows: int, layout: Layout
) -> list[Part]:
    """FSDP2 gathers the weights before each block of each pass, and scatters FP32 gradients. It runs beside the
    computation: only what is longer than that shows."""
    size, work = trainer.size, trainer.work
    gathered = 2.0 * size.parameters
    if layout.low_bit_gather and trainer.low_bit:
        gathered = float(trainer.wire)
    update, scored = (-(-rows // batch) for batch in (work.micro_batch_size, work.log_prob_micro_batch_size))
    hidden = {
        "old_log_prob": all_gather(ceilings.links, gathered, layout.gpus, calls=size.layers).times(scored),
        "forward": all_gather(ceilings.links, gathered, layout.gpus, calls=size.layers).times(update),
        "backward": all_gather(ceilings.links, gathered, layout.gpus, calls=size.layers).times(update),
    }
    gradients = reduce_scatter(ceilings.links, 4.0 * size.parameters, layout.gpus, calls=size.layers).times(update)
    found = []
    for phase, part in hidden.items():
        parts = [part, gradients] if phase == "backward" else [part]
        longer = max(total(parts) - total(phases[phase]), 0.0)
        found += [one.times(longer / total(parts)) for one in parts if total(parts)]
    return found


def _gathered_for_publish(trainer: Trainer, ceilings: Ceilings, layout: Layout) -> list[Part]:
    """Every rank gathers every whole weight for its engine; in BF16, or quantized before."""
    size = float(trainer.wire) if layout.low_bit_publish else 2.0 * trainer.size.parameters
    return [all_gather(ceilings.links, size, layout.gpus, calls=trainer.size.layers)]
