"""Compute log-probs and entropies inside lm_head's forward, in blocks of tokens, to save memory.

verl would store all logits of a micro-batch. For Qwen3 and the paper's 22528 tokens, they need 38 GiB in the update (12
bytes for each of 22528 x 151936). verl's fused kernels also avoid this, but do not give the engine's numbers
(`qarl.kernels.logprob`).

FSDP2 gathers lm_head's weight only for lm_head's forward, so the work is done there. `LogProbHead` replaces the linear.
If `ask` gave it the tokens before the forward, it returns log-probs [1, tokens, 1] instead of logits.

Logits are still computed in these cases:

- padded rows
- models whose logits are scaled or capped
- gradients of entropies
- verl's distillation and sums of squared probabilities
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from verl.utils import tensordict_utils as tu

from qarl.checks.model import PLAIN_HEADS, no_fp32_head
from qarl.kernels.logprob import chosen_log_probs, log_probs_and_entropies

_OTHER_OUTPUTS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels")


@dataclass
class Request:
    """A request for the next forward: the log-probs of `tokens` (int64), and `entropies` if `entropy` is true."""

    tokens: torch.Tensor
    temperature: float
    entropy: bool
    entropies: torch.Tensor | None = None


class LogProbHead(nn.Linear):
    """lm_head without bias. `vocabulary`: number of tokens of the tokenizer. Later rows of the weight are ignored."""

    vocabulary: int
    fp32: bool = False
    """Whether both operands of the product are cast to FP32, as vLLM does with `head_dtype`."""
    request: Request | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        request, weight = self.request, self.weight
        if self.fp32:
            input, weight = input.float(), weight.float()
        if request is None:
            return F.linear(input, weight)
        hidden, weight = input[0], weight[: self.vocabulary]
        temperature = request.temperature
        if request.entropy:
            log_probs, request.entropies = log_probs_and_entropies(
                hidden, weight, request.tokens, temperature=temperature
            )
        else:
            log_probs, _ = chosen_log_probs(hidden, weight, request.tokens, temperature=temperature)
        return log_probs[None, :, None]


def replace_head(module: Any, vocabulary: int, head_dtype: str = "model") -> LogProbHead | None:
    """Replace the model's lm_head. Call this before FSDP wraps it. Return the new module, or None if it does not fit.

    Parameters and their names stay the same. `head_dtype`: a value of `model.head_dtype`. Raise UserError if it is fp32
    and the old one cannot be replaced.
    """
    head = module.get_output_embeddings()
    if module.config.model_type not in PLAIN_HEADS or type(head) is not nn.Linear or head.bias is not None:
        if head_dtype == "fp32":
            raise no_fp32_head(module.config.model_type)
        return None
    with torch.device("meta"):
        found = LogProbHead(head.in_features, head.out_features, bias=False)
    found.weight, found.vocabulary = head.weight, min(vocabulary, head.out_features)
    found.fp32 = head_dtype == "fp32"
    module.set_output_embeddings(found)
    return found


def ask(head: LogProbHead | None, micro_batch: Any, output_args: Any) -> None:
    """Tell `head` what to compute in the next forward. `output_args`: from verl's `prepare_model_inputs`."""
    if head is None:
        return
    head.request = None
    temperature = micro_batch.get("temperature", 1.0)
    number = getattr(temperature, "data", temperature) if not isinstance(temperature, torch.Tensor) else None
    entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
    others = any(tu.get_non_tensor_data(data=micro_batch, key=key, default=False) for key in _OTHER_OUTPUTS)
    packed = "temperature_rmpad" in output_args
    if number is not None and packed and not others and not (entropy and torch.is_grad_enabled()):
        head.request = Request(output_args["input_ids_rmpad_rolled"], max(float(number), 1e-8), entropy)


def take(
    head: LogProbHead | None, output: Any, micro_batch: Any, output_args: Any, gather: Any
) -> dict[str, torch.Tensor] | None:
    """Return the outputs that verl expects, jagged like `input_ids`, or None if the forward computed logits.

    `output`: the model's output. FSDP2's hooks for the backward are on its tensors. `gather`: verl's function that
    joins the parts of a packed sequence and removes padding.
    """
    if head is None or head.request is None:
        return None
    request, head.request = head.request, None
    offsets = micro_batch["input_ids"].offsets()
    found = {"log_probs": output.logits[0, :, 0], "entropy": request.entropies}
    return {
        name: torch.nested.nested_tensor_from_jagged(gather(values, output_args["pad_size"]), offsets)
        for name, values in found.items()
        if values is not None
    }
