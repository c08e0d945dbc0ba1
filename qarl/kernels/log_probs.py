"""Log-probs of chosen tokens from hidden states and lm_head, without a tensor of [tokens, vocabulary].

Rows are processed in blocks:

    logits = bf16(hidden @ weight.T)      the engine, too, samples from BF16 logits
    y = log_softmax(fp32(logits) / temperature)[token]

If the engine sampled by top-k or top-p, the softmax is over the tokens that it sampled from, a packed mask
(`qarl.kernels.sampling_masks`).

Rows of the weight beyond the tokenizer's `vocabulary` are multiplied like all others, and their logits then become
`NO_LOGIT`, as verl masks them in vLLM. A product with a slice of the weight, such as 151665 rows of Qwen2.5's 151936,
would have rows that are aligned to 2 bytes, for which cuBLAS has only slow kernels.

`log_probs_of_logits` does the same with all logits at once. Its results are the same bit for bit if the BF16 product of
a row does not depend on other rows (with AMX that of `qarl.kernels.cpu.bf16_linear`, which multiplies here; without it
PyTorch's from 17 rows on). Only the gradient of `weight` can differ in the last BF16 bit. It is summed over blocks in
FP32 and rounded once. A policy's forward returns `WholeLogits` or `LogitsInBlocks`.

FP32 numbers exist only for a part of the rows at a time (`rows_in_fp32`). On a CPU a part stays in a core's cache.
Autograd's own backward of these steps would write and read each FP32 tensor in memory five times, which in a new
process also means page faults: with 49,152 words it took a tenth of an update. The backward here is

    dlogits = (1[token] - softmax(fp32(logits) / temperature)) * dy / temperature, rounded once to the logits' dtype

Memory beyond inputs and outputs: 2 bytes for each logit of a block (`LOGITS_AT_A_TIME` of them) in the forward, and 4
in the backward, for BF16 logits, and 12 for each of the `LOGITS_IN_FP32` of a part. If there are several blocks, a
gradient of `weight` needs 4 more bytes per weight.

Existing functions do not fit (Liger-Kernel at ead96b6, verl 0.9.1):

    verl   `FusedLinearForPPO` divides BF16 logits by the temperature in BF16, and sums gradients in BF16
    verl   `linear_cross_entropy` keeps its logits in FP32, but the engine rounds them
    Liger  `LigerFusedLinearScaledCrossEntropyFunction` sums gradients in BF16
    Liger  `LigerFusedLinearCrossEntropyFunction` needs a loss that is a sum over tokens, which TBPO's is not
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from qarl.kernels import chains
from qarl.kernels.cpu.bf16_linear import product_with
from qarl.kernels.grouped import has_triton
from qarl.kernels.sampling_masks import Truncation, packed_sampling_mask, packed_width, unpack

LOGITS_AT_A_TIME = 2**27
"""Number of logits in a block. The backward of a block needs 0.8 GiB for them."""
NO_LOGIT = -1e30
"""The logit of what is no token. Its probability is exactly 0. With -inf the entropy would be NaN."""
LOGITS_IN_FP32 = 2**23
"""Largest number of logits in FP32 at a time. On a CPU there are fewer."""
_LOGITS_IN_CACHE = 2**18
"""The same for each thread of a CPU: 1 MiB, about a core's second-level cache."""
_ROW_MULTIPLE = 64  # blocks of whole tiles
_WEIGHT_ROWS = 16384  # rows of the weight's gradient that are computed at a time


def rows_at_a_time(vocabulary: int) -> int:
    """Return the number of rows in a block: a multiple of `_ROW_MULTIPLE`, with about `LOGITS_AT_A_TIME` logits."""
    return max(LOGITS_AT_A_TIME // vocabulary // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE


def chosen_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float,
    rows: int | None = None,
    mask: torch.Tensor | None = None,
    vocabulary: int | None = None,
    likeliest: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP32 log-probs [T] of `tokens`, and the likeliest token at each place as int64 [T] (no gradient).

    Args:
        hidden: [T, H], in the dtype of `weight`; BF16 gives the engine's arithmetic.
        weight: lm_head's weight [V, H].
        tokens: int64 [T].
        rows: number of rows in a block; by default `rows_at_a_time(V)`.
        mask: packed masks of the tokens in the softmax, uint8 [T, packed_width(V)]; None for all tokens.
        vocabulary: number of tokens. Later rows of the weight have no probability, and their gradients are 0.
        likeliest: whether the likeliest tokens are needed. If not, there are none, int64 [0].
    """
    chosen: tuple[torch.Tensor, torch.Tensor] = _ChosenLogProbs.apply(
        hidden,
        weight,
        tokens,
        temperature,
        rows or rows_at_a_time(weight.shape[0]),
        mask,
        vocabulary,
        likeliest,
    )
    return chosen


@torch.no_grad()
def log_probs_and_entropies(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float,
    rows: int | None = None,
    vocabulary: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of `chosen_log_probs`, bit for bit, and the entropies in nats, FP32 [T], without gradients.

    Needs 2 bytes for each BF16 logit of a block, and 12 for each of a part.
    """
    log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
    entropies = torch.empty_like(log_probs)
    multiply = product_with(weight)
    for block in _blocks(len(hidden), rows or rows_at_a_time(weight.shape[0])):
        log_probs[block], entropies[block] = _with_entropies(
            within(multiply(hidden[block]), vocabulary), tokens[block], temperature
        )
    return log_probs, entropies


def within(logits: torch.Tensor, vocabulary: int | None) -> torch.Tensor:
    """Set the columns of logits [..., V] from `vocabulary` on to `NO_LOGIT`, in place, and return them. None: none."""
    if vocabulary is not None:
        logits[..., vocabulary:] = max(NO_LOGIT, torch.finfo(logits.dtype).min)
    return logits


def log_probs_of_logits(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float,
    mask: torch.Tensor | None = None,
    likeliest: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `chosen_log_probs`, from logits [T, V] of any float dtype."""
    chosen: tuple[torch.Tensor, torch.Tensor] = _LogProbsOfLogits.apply(
        logits, tokens, temperature, mask, likeliest
    )
    return chosen


@dataclass(frozen=True)
class WholeLogits:
    """The logits before a number of tokens, [T, V], of any float dtype."""

    logits: torch.Tensor

    def log_probs(
        self,
        tokens: torch.Tensor,
        *,
        temperature: float,
        mask: torch.Tensor | None = None,
        likeliest: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and the likeliest tokens (`log_probs_of_logits`)."""
        return log_probs_of_logits(
            self.logits, tokens, temperature=temperature, mask=mask, likeliest=likeliest
        )

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[1]

    def sampling_mask(
        self,
        tokens: torch.Tensor,
        truncation: Truncation,
        *,
        temperature: float,
        among: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `packed_sampling_mask` of the logits."""
        return packed_sampling_mask(
            self.logits, tokens, truncation, temperature=temperature, among=among
        )


@dataclass(frozen=True)
class LogitsInBlocks:
    """The logits before a number of tokens, as hidden states [T, H] and lm_head's weight [V, H].

    They are computed from these one block of rows at a time, in the forward and again in the backward."""

    hidden: torch.Tensor
    weight: torch.Tensor

    def log_probs(
        self,
        tokens: torch.Tensor,
        *,
        temperature: float,
        mask: torch.Tensor | None = None,
        likeliest: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and the likeliest tokens (`chosen_log_probs`)."""
        return chosen_log_probs(
            self.hidden,
            self.weight,
            tokens,
            temperature=temperature,
            mask=mask,
            likeliest=likeliest,
        )

    @property
    def vocabulary(self) -> int:
        return len(self.weight)

    @torch.no_grad()
    def sampling_mask(
        self,
        tokens: torch.Tensor,
        truncation: Truncation,
        *,
        temperature: float,
        among: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `packed_sampling_mask` of the logits."""
        packed = self.hidden.new_empty(
            len(self.hidden), packed_width(len(self.weight)), dtype=torch.uint8
        )
        outside = torch.empty_like(tokens, dtype=torch.bool)
        multiply = product_with(self.weight)
        for block in _blocks(len(self.hidden), rows_at_a_time(len(self.weight))):
            logits = multiply(self.hidden[block])
            packed[block], outside[block] = packed_sampling_mask(
                logits,
                tokens[block],
                truncation,
                temperature=temperature,
                among=None if among is None else among[block],
            )
        return packed, outside


class _LogProbsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        mask: torch.Tensor | None,
        likeliest: bool,
    ) -> Any:
        ctx.temperature = temperature
        ctx.mask = mask
        log_probs, top = _log_probs(logits, tokens, temperature, mask, likeliest)
        ctx.save_for_backward(logits, tokens, log_probs)
        ctx.mark_non_differentiable(top)
        return log_probs, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, tokens, log_probs = ctx.saved_tensors
        grad = _logit_gradient(
            logits, tokens, log_probs, ctx.temperature, ctx.mask, grad_outputs[0]
        )
        return grad, None, None, None, None


def _log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    mask: torch.Tensor | None,
    likeliest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and the likeliest tokens of `log_probs_of_logits`, without autograd."""
    log_probs = logits.new_empty(len(logits), dtype=torch.float32)
    top = torch.empty_like(tokens) if likeliest else None
    for part, chosen, sampled_from, log_prob, found in _parts(logits, tokens, mask, log_probs, top):
        scaled = _scaled(part, temperature, sampled_from)
        log_prob.copy_(scaled.log_softmax(-1).gather(1, chosen[:, None])[:, 0])
        if found is not None:
            found.copy_(scaled.argmax(-1))
    return log_probs, tokens.new_empty(0) if top is None else top


def _with_entropies(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of `tokens` and the entropies, FP32 [T], from logits [T, V]."""
    log_probs = logits.new_empty(len(logits), dtype=torch.float32)
    entropies = torch.empty_like(log_probs)
    for part, chosen, log_prob, entropy in _parts(logits, tokens, log_probs, entropies):
        every = _scaled(part, temperature).log_softmax(-1)
        log_prob.copy_(every.gather(1, chosen[:, None])[:, 0])
        entropy.copy_(every.exp().mul_(every).sum(-1).neg_())
    return log_probs, entropies


def _logit_gradient(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    temperature: float,
    mask: torch.Tensor | None,
    grad_output: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of `logits` [T, V], in their dtype, from that of their `log_probs`, FP32 [T].

    On GPUs it is one pass, which needs no softmax, if it is over all tokens."""
    if mask is None and has_triton(logits.device):
        log_sums = _scaled(logits.gather(1, tokens[:, None])[:, 0], temperature) - log_probs
        return chains.log_softmax_backward(
            logits, log_sums, tokens, grad_output, temperature=temperature
        )
    gradient = torch.empty_like(logits)
    of_scaled = (grad_output / temperature)[:, None]
    for part, chosen, sampled_from, grad, result in _parts(
        logits, tokens, mask, of_scaled, gradient
    ):
        probabilities = _scaled(part, temperature, sampled_from).softmax(-1)
        probabilities.mul_(-grad).scatter_add_(1, chosen[:, None], grad)
        result.copy_(probabilities)
    return gradient


def _scaled(
    logits: torch.Tensor, temperature: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return FP32 logits / temperature, and -inf for tokens that a packed `mask` leaves out."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    if mask is None:
        return scaled
    return scaled.masked_fill(~unpack(mask, scaled.shape[1]), -torch.inf)


def rows_in_fp32(logits: torch.Tensor) -> int:
    """Return the number of rows of `logits` [T, V] that are in FP32 at a time, on their device."""
    limit = LOGITS_IN_FP32
    if logits.device.type == "cpu":
        limit = min(_LOGITS_IN_CACHE * torch.get_num_threads(), limit)
    return max(limit // logits.shape[1], 1)


def _parts(logits: torch.Tensor, *others: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield `logits` and `others`, which have as many rows or are None, for `rows_in_fp32` rows at a time."""
    rows = rows_in_fp32(logits)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        yield tuple(None if tensor is None else tensor[part] for tensor in (logits, *others))


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        rows: int,
        mask: torch.Tensor | None,
        vocabulary: int | None,
        likeliest: bool,
    ) -> Any:
        ctx.temperature = temperature
        ctx.rows = rows
        ctx.mask = mask
        ctx.vocabulary = vocabulary
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        top = torch.empty_like(tokens if likeliest else tokens[:0])
        multiply = product_with(weight)
        for block in _blocks(len(hidden), rows):
            logits = within(multiply(hidden[block]), vocabulary)
            sampled_from = None if mask is None else mask[block]
            log_probs[block], top[block] = _log_probs(
                logits, tokens[block], temperature, sampled_from, likeliest
            )
            del logits  # the next block needs its memory
        ctx.save_for_backward(hidden, weight, tokens, log_probs)
        ctx.mark_non_differentiable(top)
        return log_probs, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, tokens, log_probs = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        blocks = _blocks(len(hidden), ctx.rows)
        total = (
            torch.zeros_like(weight, dtype=torch.float32)
            if need_weight and len(blocks) != 1
            else None
        )
        grad_weight = None
        multiply = product_with(weight)
        for block in blocks:
            logits = within(multiply(hidden[block]), ctx.vocabulary)
            mask = None if ctx.mask is None else ctx.mask[block]
            upstream = grad_outputs[0][block]
            grad = _logit_gradient(
                logits, tokens[block], log_probs[block], ctx.temperature, mask, upstream
            )
            del logits
            if grad_hidden is not None:
                grad_hidden[block] = grad @ weight
            if total is not None:
                _add_product(total, grad, hidden[block])
            elif need_weight:
                grad_weight = grad.t() @ hidden
        return (
            grad_hidden,
            grad_weight if total is None else total.to(weight.dtype),
            *[None] * 6,
        )


def _blocks(length: int, rows: int) -> list[slice]:
    """Return slices of nearly equal size, at most `rows`. A much shorter last one could get a different BF16 kernel."""
    size = -(-length // max(-(-length // rows), 1))
    return [slice(start, min(start + size, length)) for start in range(0, length, size or 1)]


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad [T, V]ᵀ @ hidden [T, H] to `total`, FP32 [V, H], without rounding the product to BF16."""
    for start in range(0, total.shape[0], _WEIGHT_ROWS):
        part = slice(start, start + _WEIGHT_ROWS)
        if total.is_cuda:
            total[part] += torch.mm(grad[:, part].t(), hidden, out_dtype=torch.float32)
        else:  # PyTorch multiplies BF16 into FP32 on GPUs only
            total[part].addmm_(grad[:, part].t().float(), hidden.float())
