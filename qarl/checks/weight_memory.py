"""Terms of the memory estimate for the trainer's weights, gradients and optimizer state (`qarl.checks.memory`).

P is the number of weights, R the number of trainer processes over which FSDP2 shards.

    states        Masters take P * 4 bytes (FP32) or P * 2 (BF16). Moments take P * 8 (AdamW) or P * 4 (Muon's
                  matrices). FP32 gradients take P * 4. With verl these are divided by R. A step also needs 16 bytes per
                  weight of the largest parameter.
    gathered      Only with verl: two decoder blocks in the format that is sent. int4 in groups of g weights takes
                  (4 + 16 / g) / 16 of BF16's bytes, 8 bits take half. Embeddings and lm_head are in BF16. A block's
                  gradient is in BF16 until it is scattered, lm_head's until the backward ends. While the backward of a
                  block runs, FSDP2 keeps the FP32 input of the former block's reduce-scatter, and frees it before it
                  makes the next one. The scattered part takes 4 bytes divided by R.
    low_bit       The quantized weights that stay between steps (all locally, P / R with verl), their copies in a
                  kernel's layout, and the dequantized weights of the backward. With verl, W4A16 experts are gathered in
                  their kernel's layout, and the backward has one layer's in the published layout too. With adapters
                  the weights are there once, and one layer's at a time in a second layout.
    offloaded     If verl offloads, in host memory: masters and moments, divided by R.
    reference     With a KL term. Locally a second copy of the weights in the model's dtype and of what `low_bit` keeps
                  between steps. With verl P * 4 bytes, or P * 2 if its model_dtype is bf16, divided by R. On GPUs verl
                  keeps them in host memory, whatever its param_offload says (CPUOffloadPolicy, for every engine that
                  is `forward_only`), and gathers less than the update does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl.checks.memory_parts import (
    PHASES,
    Part,
    adapted_linears,
    adapter_parameters,
    bf16_weights,
    micro_batch_tokens,
    published,
    quantized_linears,
    ranks,
    scheme_of,
)
from qarl.checks.model_size import ModelSize, Shape
from qarl.config.checks import has_reference_in_verl
from qarl.config.level import Level
from qarl.config.optimizers import OTHER_STATE_BYTES, get_optimizer
from qarl.schemes import UNQUANTIZED, Scheme

if TYPE_CHECKING:
    from qarl.config import Config
    from qarl.kernels.base import Kernel

STEP_BYTES = 16
"""Temporary bytes per weight of the parameter that a step is updating: direction or bias-corrected moments, and the
results of Newton-Schulz or of the division. The fused `torch.optim.AdamW` needs no temporary memory."""


def optimizer_state(size: ModelSize, config: Config) -> int:
    """Return the bytes of the moments of everything that is trained."""
    each = get_optimizer(config.optim.name).matrix_state_bytes
    if trained := adapter_parameters(size, config):
        return each * trained
    matrices = size.matrix_parameters
    return each * matrices + OTHER_STATE_BYTES * (size.parameters - matrices)


def states(size: ModelSize, config: Config, offload: bool) -> list[Part]:
    """Return the parts for masters, moments and gradients, and for the update of one parameter."""
    verl = config.backend == "verl"
    fp32 = config.optim.master_dtype == "fp32"
    shards = ranks(config) if verl else 1
    parameters = size.parameters
    # verl loads the optimizer state for the whole update (EngineTrainModeCtx), not only for the optimizer's step.
    used = ("update", "step") if offload else PHASES
    state = Part(f"{config.optim.name} state, FP32", optimizer_state(size, config) // shards, used)
    fused = not verl and fp32 and get_optimizer(config.optim.name).fused_fp32
    trained = adapter_parameters(size, config)
    matrices = [(config.lora.r or 0) * max(shape) for shape in adapted_linears(size, config)]
    largest = max(matrices, default=size.largest_parameter)
    single = Part(
        "update of one parameter", 0 if fused else STEP_BYTES * largest // shards, ("step",)
    )
    if verl and trained:
        return [
            Part(
                "frozen BF16 weights, sharded", 2 * (bf16_weights(size, config) - trained) // shards
            ),
            Part("FP32 masters, sharded", 4 * trained // shards),
            state,
            Part("FP32 gradients, sharded", 4 * trained // shards, ("update", "step")),
            single,
        ]
    if verl:
        masters = (4 if fp32 else 2) * parameters // shards
        return [
            Part(
                f"{'FP32' if fp32 else 'BF16'} masters, sharded",
                masters,
                PHASES[1:] if offload else PHASES,
            ),
            state,
            Part("FP32 gradients, sharded", 4 * parameters // shards, ("update", "step")),
            single,
        ]
    row = config.data.max_prompt_length + config.data.max_response_length
    several = config.actor.ppo_mini_batch_size * config.rollout.n * row > micro_batch_tokens(config)
    parameters = trained or parameters
    return [
        Part("weights, BF16", 2 * bf16_weights(size, config)),
        Part("FP32 masters", 4 * parameters if fp32 else 0),
        state,
        Part("FP32 gradient sums", 4 * parameters, ("update", "step") if several else ("step",)),
        Part("BF16 gradients of a micro-batch", 2 * parameters, ("update",)),
        single,
    ]


def gathered(size: ModelSize, config: Config, level: Level) -> list[Part]:
    """Return the parts for gathered weights and for gradients before FSDP2 scatters them. For `local`, return []."""
    if config.backend != "verl":
        return []
    scheme = scheme_of(config)
    low_bit = quantized_linears(size, config) if level.low_bit else {}
    if trained := adapter_parameters(size, config):  # low-bit weights are whole on every rank
        kinds = [size.block_linears(i).items() for i in range(size.layers)]
        rest = max(
            sum(n * k for name, (n, k) in linears if name not in low_bit) for linears in kinds
        )
        each = trained // size.layers
        return [
            Part("gathered blocks (two)", 4 * (rest + each), ("old_log_prob", "update")),
            Part(
                "embeddings and lm_head, gathered in BF16",
                2 * size.embedding_parameters,
                ("old_log_prob", "update"),
            ),
            Part(
                "gradients of a block, BF16 and FP32",
                6 * each + 4 * each // ranks(config),
                ("update",),
            ),
        ]
    blocks = [
        sum(
            (scheme if name in low_bit else UNQUANTIZED).wire_bytes(*shape)
            for name, shape in linears.items()
        )
        for linears in map(size.block_linears, range(size.layers))
    ]
    head = size.vocab * size.hidden
    block = size.largest_block
    return [
        Part("gathered blocks (two)", 2 * max(blocks), ("old_log_prob", "update")),
        Part(
            "embeddings and lm_head, gathered in BF16",
            2 * size.embedding_parameters,
            ("old_log_prob", "update"),
        ),
        Part("gradients of a block and of lm_head, BF16", 2 * block + 2 * head, ("update",)),
        Part("a block's reduce-scatter, FP32", 4 * block + 4 * block // ranks(config), ("update",)),
    ]


@dataclass(frozen=True)
class LowBitBytes:
    """Bytes of the quantized weights of a model.

    wire        each weight's published tensors, by name
    prepared    the same in the layout of its kernel, or 0 if the kernel reads the published tensors
    transient   each BF16 weight [N, K] that the backward makes and drops, and the largest stack of experts
    saved       each BF16 weight that the forward makes and the backward multiplies
    """

    wire: Mapping[str, int]
    prepared: Mapping[str, int]
    transient: Sequence[int]
    saved: Sequence[int]

    @classmethod
    def of(
        cls,
        scheme: Scheme,
        quantized: Mapping[str, Shape],
        kernels: Mapping[Shape, type[Kernel]],
        stack_bytes: int,
    ) -> LowBitBytes:
        """`stack_bytes`: bytes of one layer's largest stack of experts, in BF16."""
        wire: dict[str, int] = {}
        prepared: dict[str, int] = {}
        transient = [0]
        saved = []
        for name, shape in quantized.items():
            kernel = kernels.get(shape)
            wire[name] = scheme.wire_bytes(*shape)
            prepared[name] = kernel.prepared_bytes(scheme, shape) if kernel else 0
            dequantized = UNQUANTIZED.wire_bytes(*shape)
            if is_of_expert(name):  # dequantized one layer's stack at a time
                transient.append(stack_bytes)
            elif kernel is not None and kernel.computes_input_gradient:
                transient.append(dequantized)
            elif kernel is None or not kernel.holds_dequantized:
                saved.append(dequantized)
        return cls(wire, prepared, transient, saved)


def is_of_expert(name: str) -> bool:
    return ".experts." in name


def low_bit(
    size: ModelSize, config: Config, level: Level, kernels: Mapping[Shape, type[Kernel]]
) -> list[Part]:
    """Return the parts for quantized weights, for their copies in the kernels' layout, and for dequantized weights."""
    quantized = quantized_linears(size, config) if level.low_bit else {}
    if not quantized:
        return []
    scheme = scheme_of(config)
    gate_up = (2 * size.experts * size.moe_intermediate, size.hidden)
    each = LowBitBytes.of(scheme, quantized, kernels, UNQUANTIZED.wire_bytes(*gate_up))
    wire = sum(each.wire.values())
    one_dequantized = max([*each.transient, *each.saved])
    blocks = [quantized.keys() & size.block_linears(i).keys() for i in range(size.layers)]
    restored = 0
    if scheme.packs_codes:
        restored = max(
            sum(each.wire[name] for name in block if is_of_expert(name)) for block in blocks
        )
    if config.lora.r:  # a frozen layer is stored once; a pass converts it and drops the result
        converted = max(restored, *each.prepared.values())
        return [
            Part("low-bit tensors", wire),
            Part("a layer in another layout", converted, ("old_log_prob", "update")),
            Part("dequantized weight of one layer, BF16", one_dequantized, ("update",)),
        ]
    if config.backend == "verl":
        gathered = max(
            sum(each.prepared[name] for name in block if not is_of_expert(name)) for block in blocks
        )
        return [
            Part("low-bit tensors, sharded", wire // ranks(config)),
            Part("a gathered block in the kernels' layout", gathered, ("old_log_prob", "update")),
            Part("experts of one layer, restored", restored, ("update",)),
            Part("dequantized weight of one layer, BF16", one_dequantized, ("update",)),
        ]
    dequantized = sum(each.saved) + max(each.transient)
    return [
        Part("low-bit tensors", wire),
        Part("low-bit tensors in the kernels' layout", sum(each.prepared.values())),
        Part("dequantized weights for the backward, BF16", dequantized, ("update",)),
    ]


def on_host(size: ModelSize, config: Config, offload: bool) -> list[Part]:
    """Return the parts in host memory beside GPUs: what the engine moves there while it sleeps, and what verl offloads
    while it is not used. verl's engines drop weights that it publishes whole."""
    sleeps = (config.backend == "local" or config.lora.r) and config.rollout.free_cache_engine
    masters = (4 if config.optim.master_dtype == "fp32" else 2) * (
        adapter_parameters(size, config) or size.parameters
    )
    offloaded = (masters + optimizer_state(size, config)) // ranks(config) if offload else 0
    return [
        Part("vLLM's weights while it sleeps", published(size, config) if sleeps else 0),
        Part("masters and optimizer state, offloaded", offloaded),
    ]


def has_reference(config: Config) -> bool:
    """Return whether the run has a reference policy, whose weights are those of `model.path`."""
    if config.backend == "verl":
        return has_reference_in_verl(config.verl)
    return config.actor.use_kl_loss


def reference(
    size: ModelSize, config: Config, level: Level, kernels: Mapping[Shape, type[Kernel]]
) -> list[Part]:
    """Return the part for the reference policy of a KL term, which with verl is in host memory on GPUs."""
    if not has_reference(config):
        return []
    if config.backend == "verl":
        dtype = str(config.verl.get("actor_rollout_ref.ref.fsdp_config.model_dtype", "fp32"))
        each, name = (2, "16 bits") if "16" in dtype else (4, "FP32")
        return [Part(f"reference policy, {name}, sharded", each * size.parameters // ranks(config))]
    packed = sum(
        part.bytes for part in low_bit(size, config, level, kernels) if part.phases == PHASES
    )
    return [
        Part(
            "reference policy: weights and low-bit tensors", 2 * bf16_weights(size, config) + packed
        )
    ]
