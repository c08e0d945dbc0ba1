"""The trainer's forward beside what it must equal: every linear, while it computes the log-probs of a small batch.

A forward hook on each linear hands its input on, as it is, to what the trainer must agree with: the engine's own layer,
or without an engine the FP32 product with the layer's dequantized tensors. So nothing accumulates from layer to layer
and nothing is sampled: a linear that multiplies by other numbers shows by its name. vLLM holds q, k, v and gate, up as
one layer, whose output is taken apart again. What is no linear of a decoder layer (norms, embedding, lm_head) is
compared tensor by tensor, lm_head both ways.

The sequences are few and short: it is arithmetic that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from qarl.bench.steps.checks import FIRST_TOKENS, UNIT, log_prob_bound
from qarl.quant.linear import QuantLinear
from qarl.rollout.engine import RolloutBatch, RolloutEngine, SamplingConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

SEQUENCES = 8
PROMPT_TOKENS = 4
TOKENS = 16
"""Of a response."""
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""vLLM's linears of a decoder layer, and the trainer's that each stands for."""
HEAD = "lm_head"
BITWISE = ("vllm_cpu_wna16", "vllm_cpu_int8")
"""Kernels whose result does not depend on what is fused along N: sums in the order of K, or of integers
(`qarl.kernels.cpu.vllm_ops`)."""
CHANNEL = 4
"""Times the bound that a single output channel may be off: one wrong channel of thousands hardly shows in the whole."""


class Expected(NamedTuple):
    """What linears that share an input must give side by side, [M, N] of [M, K], and how far off they may be."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    bound: float


Layers = Mapping[tuple[str, ...], Expected]
"""By the names of the trainer's linears."""


def sample(engine: RolloutEngine, prompts: Sequence[Sequence[int]], length: int) -> Batch:
    """Responses of at most `TOKENS` tokens to the first few prompts, cut short, from the weights the engine has.

    Fewer prompts are asked several times.
    """
    asked = [list(prompt[:PROMPT_TOKENS]) for prompt in islice(cycle(prompts), SEQUENCES)]
    engine.reset_prefix_cache()
    sampling = SamplingConfig(min(length, TOKENS), ignore_eos=True)
    found = engine.generate(asked, sampling, list(range(len(asked))))
    engine.reset_prefix_cache()
    return as_batch(found)


def as_batch(rollout: RolloutBatch) -> Batch:
    """The first few responses, padded; rewards play no part."""
    few = RolloutBatch(
        rollout.prompt_token_ids[:SEQUENCES],
        rollout.response_token_ids[:SEQUENCES],
        rollout.rollout_log_probs[:SEQUENCES],
        rollout.finish_reasons[:SEQUENCES],
        rollout.weight_version,
    )
    zeros = torch.zeros(len(few.prompt_token_ids))
    return make_batch(few, zeros, zeros, pad_token_id=0)


@torch.no_grad()
def log_probs(policy: Policy, batch: Batch) -> torch.Tensor:
    """Of the first few responses' tokens under `policy` at temperature 1: FP32 [tokens], on the CPU."""
    batch = batch.to(policy.device)
    rows = slice(0, SEQUENCES)
    return policy.response_log_probs(batch, rows, temperature=1.0)[batch.response_mask[rows]].cpu()


def sampled(batch: Batch) -> torch.Tensor:
    """The engine's log-probs of the same tokens."""
    return batch.rollout_log_probs[batch.response_mask].cpu()


def abs_mean(found: torch.Tensor, other: torch.Tensor) -> float:
    return float((found - other).abs().mean())


def first_abs_median(found: torch.Tensor, other: torch.Tensor, batch: Batch) -> float:
    """Of the first tokens of each response; all are of one length."""
    delta = (found - other).abs().view(len(batch), -1)
    return float(delta[:, :FIRST_TOKENS].median())


def bound_of(policy: Policy, layers: int, found: torch.Tensor, *, spread: float | None = None) -> float | None:
    """`log_prob_bound` for the log-probs `found`; `spread`: theirs, where they are too few to tell."""
    return log_prob_bound(
        policy.scheme.name,
        policy.align,
        layers=layers,
        spread=float(found.std()) if spread is None else spread,
        largest=float(found.abs().max()),
        tokens=len(found),
    )


def compare_with_engine(policy: Policy, engine: RolloutEngine, batch: Batch, layers: int) -> dict[str, Any]:
    """Every check of `policy` and `engine` at the same weights on a batch that the engine has sampled."""
    found, checks = beside_engine(policy, engine, batch)
    rollout = sampled(batch)
    return checks | {
        "first_abs_median": first_abs_median(found, rollout, batch),
        "layers_expected": sum(map(len, PARTS.values())) * layers + 1,
        "sample_abs_mean": abs_mean(found, rollout),
        "sample_bound": bound_of(policy, layers, rollout),
        "sample_spread": float(rollout.std()),
    }


def beside_engine(policy: Policy, engine: RolloutEngine, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs of `batch`, and the checks of every linear and every other tensor against the engine's.

    lm_head is compared as a product too: on a CPU vLLM multiplies by a packed copy of it, which may be stale.
    """
    model: Any = engine.model()
    kernels = {layer.kernel.name for layer in policy.quantized_layers().values()}
    bound = 0.0 if kernels and kernels <= set(BITWISE) else UNIT
    head, rows = model.lm_head, policy.model.get_output_embeddings().out_features
    layers: dict[tuple[str, ...], Expected] = {
        (HEAD,): Expected(lambda x: head.quant_method.apply(head, x)[..., :rows], UNIT)
    }
    for name, module in model.named_modules():
        prefix, _, leaf = name.rpartition(".")
        if leaf in PARTS and ".layers." in name:
            layers[tuple(f"{prefix}.{part}" for part in PARTS[leaf])] = Expected(_first_output(module), bound)
    found, checks = _beside(policy, batch, layers, "the engine's layer")
    return found, checks | {"unlike_tensors": unlike_tensors(policy, model)}


def beside_dequantized(policy: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs of `batch`, and the checks of every quantized linear against the tensors it would publish."""
    quantized = policy.quantized_layers()
    layers: Layers = {(name,): Expected(_product(layer), UNIT) for name, layer in quantized.items()}
    return _beside(policy, batch, layers, "the FP32 product with its published tensors")


def _first_output(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = module(x)[0]
        return output

    return multiply


def _product(layer: QuantLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        weight = layer.quantized().dequantize(torch.float32)
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(layer.kernel.dequantized_input(x).float(), weight, bias)

    return multiply


def _beside(policy: Policy, batch: Batch, layers: Layers, against: str) -> tuple[torch.Tensor, dict[str, Any]]:
    with _hooked(policy.model, layers) as errors:
        found = log_probs(policy, batch)
    bounds = {name: expected.bound for names, expected in layers.items() for name in names}

    def severity(name: str) -> tuple[float, float]:
        error, bound = errors[name], bounds[name]
        beyond = not error <= bound  # NaN is
        return (error / bound if bound and math.isfinite(error) else math.inf if beyond else 0.0, -bound)

    worst = max(errors, key=severity, default="")
    checks = {
        "layer_error": errors.get(worst, 0.0),
        "layer_bound": bounds.get(worst, 0.0),
        "layer_worst": worst,
        "layer_against": against,
        "layers_compared": len(errors),
    }
    return found, checks


@contextmanager
def _hooked(model: nn.Module, layers: Layers) -> Iterator[dict[str, float]]:
    """While it is open, a forward compares the linears in `layers`: name -> `error_of` its output."""
    errors: dict[str, float] = {}
    handles = []

    def hook(names: tuple[str, ...], expected: Expected) -> Callable[..., None]:
        outputs: list[torch.Tensor] = []

        def compare(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            outputs.append(output.flatten(0, -2))
            if len(outputs) == len(names):
                theirs = expected.multiply(args[0].flatten(0, -2))
                parts = theirs.split([one.shape[-1] for one in outputs], -1)
                errors.update({name: error_of(*pair) for name, *pair in zip(names, outputs, parts, strict=True)})
                outputs.clear()

        return compare

    try:
        for names, expected in layers.items():
            call = hook(names, expected)
            handles += [model.get_submodule(name).register_forward_hook(call) for name in names]
        yield errors
    finally:
        for handle in handles:
            handle.remove()


def error_of(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`, both [M, N]; or a `CHANNEL`th of what the worst
    output channel has, where that is more."""
    difference, expected = output.float() - expected.float(), expected.float()
    channels = difference.norm(dim=0) / expected.norm(dim=0)
    channels = channels.masked_fill((difference == 0).all(0), 0.0)  # one that is zero on both sides
    return float(torch.maximum(difference.norm() / expected.norm(), channels.max() / CHANNEL))


def unlike_tensors(policy: Policy, engine_model: nn.Module) -> list[str]:
    """Names of the trainer's parameters outside of the decoder layers' linears that the engine holds otherwise."""
    theirs = dict(engine_model.named_parameters())
    linears = {part for parts in PARTS.values() for part in parts}
    unlike = []
    for name, parameter in policy.model.named_parameters():
        if name.split(".")[-2] in linears:
            continue
        other = theirs.get(name)
        # vLLM may pad the vocabulary.
        if other is None or not torch.equal(other[: len(parameter)].to(parameter.device), parameter):
            unlike.append(name)
    return unlike


@torch.no_grad()
def move_weights(policy: Policy, seed: int) -> None:
    """Add noise of a sixteenth of its size to every parameter: enough for codes and scales of any scheme to change."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        size = parameter.float().square().mean().sqrt().clamp(min=2.0**-6)
        parameter.add_(torch.randn_like(parameter) * (size / 16).to(parameter.dtype))
