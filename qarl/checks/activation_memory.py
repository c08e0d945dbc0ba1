"""Terms of the memory estimate for what one micro-batch computes and saves (`qarl.checks.memory`).

T is the number of tokens of a micro-batch at full length, V the vocabulary and H the hidden size.

    activations   Everything that autograd saves for each token in all blocks. With recomputation: H numbers of each
                  block, and everything of one block.
    expert_rows   The rows of the T k pairs of token and expert (H, and I or 2I numbers each) that the backward of one
                  layer's experts holds at its peak. QaRL's own backward saves no row and computes them again.
    logits        T * V logits. The pass for old log-probs needs 2 bytes per logit, for at most `LOGITS_AT_A_TIME`
                  logits. The update needs 4 bytes per logit. If there are more than `LOGITS_AT_A_TIME`, the update
                  needs 6 bytes for each of `LOGITS_AT_A_TIME` logits, and 4 bytes for each weight of lm_head, unless
                  adapters leave it frozen. Both also need 12 bytes for at most `LOGITS_IN_FP32` logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.checks.block_arithmetic import BlockArithmetic
from qarl.checks.memory_parts import Part, micro_batch_tokens, quantized_linears, scheme_of
from qarl.checks.model_size import ModelSize
from qarl.config.level import Level

if TYPE_CHECKING:
    from qarl.config import Config

LOGITS_AT_A_TIME = 2**27
"""The largest number of logits that `qarl.kernels.log_probs` holds at once."""
LOGITS_IN_FP32 = 2**23
"""The largest number of these that are in FP32 at a time. On a CPU there are fewer."""


def activations(
    size: ModelSize, config: Config, level: Level, arithmetic: BlockArithmetic
) -> list[Part]:
    """Return the parts for the tensors that autograd saves in the forward of one micro-batch, without lm_head."""
    forward_bytes = []
    saved_bytes = []
    own_experts = has_own_experts(size, config, level)
    for layer in range(size.layers):
        block = size.activation_bytes_per_token(arithmetic, layer)
        forward_bytes.append(block)
        if own_experts and layer in size.sparse_layers:
            block -= size.expert_row_bytes
        saved_bytes.append(block)
    saved = sum(saved_bytes)
    if config.model.gradient_checkpointing:
        block_inputs = size.layers * size.hidden * arithmetic.block_input
        saved = block_inputs + max(saved_bytes)
    forward = micro_batch_tokens(config, log_probs=True)
    backward = micro_batch_tokens(config)
    return [
        Part("activations, log-probs", forward * max(forward_bytes), ("old_log_prob",)),
        Part("activations, update", backward * saved, ("update",)),
    ]


def has_own_experts(size: ModelSize, config: Config, level: Level) -> bool:
    """Return whether QaRL computes the experts (`qarl.kernels.experts`), and not transformers."""
    if not level.low_bit:
        return False
    quantized = any(".experts." in name for name in quantized_linears(size, config))
    return quantized or level.follows_engine


def expert_rows(size: ModelSize, config: Config, level: Level) -> list[Part]:
    """Return the part for the rows that the backward of one layer's experts holds, beside what autograd saved.

    QaRL's backward holds, in BF16: x and dy by expert (H each), gate and up and their gradients (2I each), the gradient
    of down_proj's input and that input times its weight (I each), and the rows of dx (H). With an 8-bit scheme x is
    also there in 8 bits. Transformers' backward holds three rows of H: those of the weighted sum's gradient. Each
    returns the gradient of its input, H numbers for each of T tokens. The FP32 temporaries that QaRL's backward has on
    CPUs are not counted.
    """
    if not size.sparse_layers:
        return []
    hidden = size.hidden
    inner = size.moe_intermediate
    tokens = micro_batch_tokens(config)
    each = 6 * hidden
    if has_own_experts(size, config, level):
        each += 12 * inner
        each += hidden if scheme_of(config).rounds_activations else 0
    return [
        Part(
            "rows of a layer's experts",
            tokens * (size.experts_per_token * each + 2 * hidden),
            ("update",),
        )
    ]


def logits(size: ModelSize, config: Config) -> list[Part]:
    """Return the parts for the logits of one micro-batch and their softmax, which only tokens of responses have. Heads
    that scale or cap logits also have them of prompts in verl.

    If micro-batches are limited by tokens, all their tokens are assumed to be of responses."""
    data = config.data
    tokens = [micro_batch_tokens(config, log_probs=True), micro_batch_tokens(config)]
    of_responses = size.plain_head or config.backend == "local"
    if of_responses and not config.actor.use_dynamic_bsz:
        length = data.max_prompt_length + data.max_response_length
        tokens = [count // length * data.max_response_length for count in tokens]
    forward, backward = (count * size.vocab for count in tokens)
    if not of_responses:  # computed by verl's own steps, in FP32
        return [
            Part("logits, log-probs", 8 * forward, ("old_log_prob",)),
            Part("logits, update", 14 * backward, ("update",)),
        ]
    update = 4 * backward
    if backward > LOGITS_AT_A_TIME:
        update = 6 * LOGITS_AT_A_TIME + (0 if config.lora.r else 4 * size.vocab * size.hidden)
    log_probs = 2 * min(forward, LOGITS_AT_A_TIME)
    return [
        Part("logits, log-probs", log_probs + _in_fp32(forward), ("old_log_prob",)),
        Part("logits, update", update + _in_fp32(backward), ("update",)),
    ]


def _in_fp32(logits: int) -> int:
    """Return the bytes of the FP32 numbers of a part of `logits` logits."""
    return 12 * min(logits, LOGITS_IN_FP32)
