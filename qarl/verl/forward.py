"""The forward of verl's engine: the rows that attention sees, the experts that routers replay, and its log-probs.

Rows: with `use_remove_padding`, verl packs the rows of a micro-batch into one forward [1, tokens] and passes
`position_ids`. Attention finds the rows in these (`qarl.align.packed_attention`). Without it, verl pads the rows on the
right and passes a mask. QaRL replaces the mask with the lengths of the rows. The mask is not needed, because no token
attends to the padding after it. With a mask, attention would compute differently, and the log-probs would change.

Router replay: the actor's routers use the experts that verl's batch names for each token. The routing is unknown for
the last sampled token, which vLLM never routes. For such tokens, verl's batch contains zeros
(verl/experimental/agent_loop/agent_loop.py). If all experts of a token are 0, the actor's own router chooses, as in
verl's VeOmni engine (verl/workers/engine/veomni/transformer_impl.py).

Log-probs: verl would store all logits of a micro-batch. For Qwen3 and the paper's 22528 tokens, they need 38 GiB in the
update (12 bytes for each of 22528 x 151936). verl's fused kernels also avoid this, but do not give the engine's numbers
(`qarl.kernels.log_probs`). FSDP2 gathers lm_head's weight only for lm_head's forward, so `LogProbHead` replaces the
linear and computes log-probs and entropies there, in blocks of tokens, as the local backend does: only at the places
that predict a token of a response. If `request_log_probs` gave it these places before the forward, it returns their
log-probs [1, places, 1] instead of logits, and `take_log_probs` puts them where verl looks for them. verl never reads
those of prompts, which are 0. If a micro-batch does not say which tokens are of responses, all places are computed.
Logits of all tokens are still computed in these cases:

- models whose logits are scaled or capped
- rows of different temperatures
- gradients of entropies
- verl's distillation and sums of squared probabilities

Then `log_softmax_of_chosen` computes the log-probs, as the rollout engine and the local backend do. verl itself
subtracts logsumexp from the chosen logit (verl/utils/torch_functional.py). Its result differs from log_softmax in the
last bits, by up to 1.2e-6 if everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from verl.utils import tensordict_utils as tu

from qarl.checks.model import has_plain_head, no_fp32_head
from qarl.kernels.base import upload
from qarl.kernels.cpu import bf16_linear
from qarl.kernels.log_probs import chosen_log_probs, log_probs_and_entropies
from qarl.progress import live
from qarl.step.routing import RoutingReplay
from qarl.trainer.batch import TOKEN_MULTIPLE

_OTHER_OUTPUTS = (
    "calculate_sum_pi_squared",
    "distillation_use_topk",
    "distillation_only",
    "use_fused_kernels",
)


@dataclass(frozen=True)
class RowLengths:
    """The lengths of the rows of one of verl's micro-batches, which the host reads once.

    tokens     number of tokens of each row, prompt and response
    responses  number of those of the response, or None if the micro-batch does not say
    """

    tokens: tuple[int, ...]
    responses: tuple[int, ...] | None

    @classmethod
    def of(cls, micro_batch: Any) -> RowLengths:
        offsets = [micro_batch["input_ids"].offsets()]
        responses = micro_batch.get("responses", None)
        if responses is not None and responses.is_nested:
            offsets.append(responses.offsets())
        tokens, *known = torch.stack([each.long() for each in offsets]).diff().tolist()
        return cls(tuple(tokens), tuple(known[0]) if known else None)

    def predictors(self, width: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the logits of responses are: their places in the jagged `input_ids`, and in the flattened tokens
        of a forward whose rows are padded to `width`, or packed if that is None. Both are int64 [n], on the CPU."""
        lengths = torch.tensor(self.tokens)
        ends = lengths.cumsum(0)
        starts = ends - lengths
        if self.responses is None:
            first = starts
            counts = lengths
        else:
            counts = torch.tensor(self.responses)
            first = ends - counts - 1
        before = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum())) + (first - before).repeat_interleave(counts)
        if width is None:
            return places, places
        added = torch.arange(len(lengths)) * width - starts
        return places, places + added.repeat_interleave(counts)


@dataclass
class Request:
    """A request for the next forward: the log-probs of `tokens` after the positions `slots`, both int64 [m].

    slots      indices into the flattened tokens of the forward. Those from `len(places)` on only fill up
    places     int64 [n], the indices of the same positions in verl's jagged `input_ids`
    entropy    whether `entropies`, FP32 [m], are computed, too
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    temperature: float
    entropy: bool
    entropies: torch.Tensor | None = None


class LogProbHead(nn.Linear):
    """lm_head without bias. `vocabulary`: number of tokens of the tokenizer. Later rows of the weight get no
    probability."""

    vocabulary: int
    fp32: bool = False
    """Whether both operands of the product are cast to FP32, as vLLM does with `head_dtype`."""
    request: Request | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        request = self.request
        weight = self.weight
        if request is not None:
            input = input.flatten(0, -2)[request.slots]
        if self.fp32:
            input = input.float()
            weight = weight.float()
        if request is None:
            return bf16_linear.linear(input, weight)
        how: Any = {"temperature": request.temperature, "vocabulary": self.vocabulary}
        if request.entropy:
            log_probs, request.entropies = log_probs_and_entropies(
                input, weight, request.tokens, **how
            )
        else:
            log_probs, _ = chosen_log_probs(input, weight, request.tokens, likeliest=False, **how)
        return log_probs[None, :, None]


def replace_head(module: Any, vocabulary: int, head_dtype: str = "model") -> LogProbHead | None:
    """Replace the model's lm_head. Call this before FSDP wraps it. Return the new module, or None if it does not fit.

    Parameters and their names stay the same. `head_dtype`: a value of `model.head_dtype`. Raise UserError if it is fp32
    and the old one cannot be replaced.
    """
    head = module.get_output_embeddings()
    if not has_plain_head(module):
        if head_dtype == "fp32":
            raise no_fp32_head(module.config.model_type)
        return None
    with torch.device("meta"):
        new = LogProbHead(head.in_features, head.out_features, bias=False)
    new.weight, new.vocabulary = head.weight, min(vocabulary, head.out_features)
    new.fp32 = head_dtype == "fp32"
    module.set_output_embeddings(new)
    return new


def request_log_probs(
    head: LogProbHead | None,
    micro_batch: Any,
    lengths: RowLengths,
    inputs: Mapping[str, Any],
    output_args: Mapping[str, Any],
) -> None:
    """Tell `head` what to compute in the next forward. `inputs`, `output_args`: from verl's `prepare_model_inputs`."""
    if head is None:
        return
    head.request = None
    temperature = micro_batch.get("temperature", 1.0)
    if isinstance(temperature, torch.Tensor):
        return
    entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
    others = any(
        tu.get_non_tensor_data(data=micro_batch, key=key, default=False) for key in _OTHER_OUTPUTS
    )
    if others or (entropy and torch.is_grad_enabled()):
        return
    packed = "temperature_rmpad" in output_args
    places, slots = lengths.predictors(None if packed else inputs["input_ids"].shape[1])
    number = len(places)
    missing = -number % TOKEN_MULTIPLE
    both = torch.stack([F.pad(index, (0, missing)) for index in (places, slots)])
    places, slots = upload(both, inputs["input_ids"].device)
    head.request = Request(
        output_args["input_ids_rmpad_rolled"][places],
        slots,
        places[:number],
        max(float(getattr(temperature, "data", temperature)), 1e-8),
        entropy,
    )


def take_log_probs(
    head: LogProbHead | None, output: Any, micro_batch: Any
) -> dict[str, torch.Tensor] | None:
    """Return the outputs that verl expects, jagged like `input_ids`, or None if the forward computed logits.

    `output`: the model's output. FSDP2's hooks for the backward are on its tensors."""
    if head is None or head.request is None:
        return None
    request = head.request
    head.request = None
    ids = micro_batch["input_ids"]
    places = request.places
    everywhere = torch.zeros(ids.values().shape, device=places.device)
    outputs = {"log_probs": output.logits[0, :, 0], "entropy": request.entropies}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            everywhere.index_put((places,), values[: len(places)]), ids.offsets()
        )
        for name, values in outputs.items()
        if values is not None
    }


def log_softmax_of_chosen(
    logits: torch.Tensor, output_args: Any, micro_batch: Any, gather: Callable[..., Any]
) -> torch.Tensor:
    """Return log_softmax(logits / temperature) of the next token at each position, in FP32 and jagged like `input_ids`.

    `logits`: FP32, [1, tokens, V] for packed rows, [B, T, V] for padded rows. `output_args`: from verl's
    `prepare_model_inputs`. `gather`: verl's function that joins the parts of a packed sequence and removes padding.
    """
    offsets = micro_batch["input_ids"].offsets()
    labels = output_args["input_ids_rmpad_rolled"]
    packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
    if packed:
        rows = logits.squeeze(0)
        temperature = output_args["temperature_rmpad"]
    else:
        lengths = offsets.diff()
        columns = torch.arange(logits.shape[1], device=logits.device)
        valid = columns[None, :] < lengths[:, None]
        rows = logits[valid]
        temperature = output_args["temperature"].repeat_interleave(lengths)
    if not output_args.get("temperature_is_one", False):
        rows = rows / temperature.clamp(min=1e-8)[:, None]
    log_probs = rows.log_softmax(-1)
    chosen = log_probs.gather(1, labels[:, None])[:, 0]
    if packed:
        chosen = gather(chosen, output_args["pad_size"])
    return torch.nested.nested_tensor_from_jagged(chosen, offsets)


def row_inputs(
    inputs: dict[str, Any], micro_batch: Any, lengths: RowLengths, *, exact: bool
) -> dict[str, Any]:
    """Return the changes to `inputs`, the model's keyword arguments from verl's `prepare_model_inputs`.

    `exact`: whether the engine's attention operator is used, which needs the lengths of the prompts.
    """
    changes: dict[str, Any] = {}
    rows = [*lengths.tokens]
    if inputs.get("attention_mask") is not None:  # padded
        changes |= {"attention_mask": None, "position_ids": None}
    elif (
        filler := inputs["input_ids"].shape[1] - sum(rows)
    ) > 0:  # verl's pad_to_length adds a row
        rows.append(filler)
    changes["row_lengths"] = tuple(rows)
    if exact:
        prompts = micro_batch["prompts"].offsets().diff()
        added = prompts.new_tensor(rows[len(prompts) :])
        changes["prompt_lengths"] = torch.cat([prompts, added])
    return changes


class RouterReplay:
    """Replays the routing of verl's micro-batches, and counts the tokens that would have gone elsewhere.

    known   number of tokens since the last `take`, in passes that compute old log-probs, whose routing is in the batch
    other   number of those that the actor's own routers would send to different experts
    """

    def __init__(self) -> None:
        self._replay = RoutingReplay()
        self.known = 0
        self.other = 0

    def begin(self, module: Any, micro_batch: Any, input_ids: torch.Tensor) -> None:
        """Call before a forward of `input_ids`, [B, T] padded on the right or [1, tokens] packed."""
        self.stop()
        routed = micro_batch.get("routed_experts", None)
        if routed is not None:
            self._replay.begin(module, as_forward(routed, input_ids))

    def stop(self) -> None:
        """Let the model's own routers choose."""
        self._replay.stop()

    def end(self) -> None:
        """Call after a forward. If it ran without gradients (to compute log-probs), update the counts for `take`."""
        compared = self._replay.end()
        if compared is not None:
            self.known += int(compared.known.sum())
            self.other += int(compared.other.sum())

    def take(self) -> tuple[int, int]:
        """Return `other` and `known`, the token counts since the last call, and set both to 0."""
        counts = (self.other, self.known)
        self.other = 0
        self.known = 0
        return counts


def as_forward(routed: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Flatten verl's nested routing [B, tokens, layers, k] to [positions, layers, k] of the same dtype. The positions
    are those of the flattened `input_ids`. Positions without a token get -1."""
    values = routed.values()
    lengths = routed.offsets().diff()
    routing = values.new_full((*input_ids.shape, *values.shape[1:]), -1)
    if len(input_ids) != len(lengths):  # packed
        routing[0, : len(values)] = values
    else:
        columns = torch.arange(input_ids.shape[1], device=lengths.device)
        valid = columns[None, :] < lengths[:, None]
        routing[valid.to(routing.device)] = values
    return routing.flatten(0, 1)


def forwarding(name: str, data: Any, rank: int) -> AbstractContextManager[Any]:
    """Return a context in which the first rank says, a line a minute, how many of its responses have been forwarded."""
    if rank:
        return nullcontext()
    return live.phase(f"{name} (rank 0)", total=len(data), unit="responses")
