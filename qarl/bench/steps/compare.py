"""The trainer's forward beside what it must equal: every linear, while it computes the log-probs of a small batch.

A forward hook on each linear hands its input on, as it is, to what the trainer must agree with: the engine's own layer,
or without an engine the FP32 product with the layer's dequantized tensors. So nothing accumulates from layer to layer
and nothing is sampled: a linear that multiplies by other numbers shows by its name. vLLM holds q, k, v and gate, up as
one layer; their outputs are compared side by side. What is no linear of a decoder layer (norms, embedding, lm_head) is
compared tensor by tensor.

The sequences are few and short: it is arithmetic that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

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
OWN_OPERATORS = "vllm_cpu_"
"""Kernels of this name are bit for bit the engine's, whatever is beside them (`qarl.kernels.registry`)."""

Expected = Callable[[torch.Tensor], torch.Tensor]
Layers = Mapping[tuple[str, ...], Expected]
"""Names of the trainer's linears that share an input -> what their outputs side by side must be, of [M, K]."""


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
        "layers_expected": len(PARTS) * layers,
        "sample_abs_mean": abs_mean(found, rollout),
        "sample_bound": bound_of(policy, layers, rollout),
        "sample_spread": float(rollout.std()),
    }


def beside_engine(policy: Policy, engine: RolloutEngine, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs of `batch`, and the checks of every linear and every other tensor against the engine's."""
    model = engine.model()
    layers: dict[tuple[str, ...], Expected] = {}
    for name, module in model.named_modules():
        prefix, _, leaf = name.rpartition(".")
        if leaf in PARTS and ".layers." in name:
            layers[tuple(f"{prefix}.{part}" for part in PARTS[leaf])] = _engine_output(module)
    kernels = {layer.kernel.name for layer in policy.quantized_layers().values()}
    bitwise = kernels and all(name.startswith(OWN_OPERATORS) for name in kernels)
    found, checks = _beside(policy, batch, layers, "the engine's layer")
    return found, checks | {"layer_bound": 0.0 if bitwise else UNIT, "unlike_tensors": unlike_tensors(policy, model)}


def beside_dequantized(policy: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs of `batch`, and the checks of every quantized linear against the tensors it would publish."""
    layers: Layers = {(name,): _product(layer) for name, layer in policy.quantized_layers().items()}
    found, checks = _beside(policy, batch, layers, "the FP32 product with its published tensors")
    return found, checks | {"layer_bound": UNIT}


def _engine_output(module: nn.Module) -> Expected:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = module(x)[0]
        return output

    return multiply


def _product(layer: QuantLinear) -> Expected:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        weight = layer.quantized().dequantize(torch.float32)
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(layer.kernel.dequantized_input(x).float(), weight, bias)

    return multiply


def _beside(policy: Policy, batch: Batch, layers: Layers, against: str) -> tuple[torch.Tensor, dict[str, Any]]:
    with _hooked(policy.model, layers) as errors:
        found = log_probs(policy, batch)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf, default="")
    checks = {
        "layer_error": errors.get(worst, 0.0),
        "layer_worst": worst,
        "layer_against": against,
        "layers_compared": len(errors),
    }
    return found, checks


@contextmanager
def _hooked(model: nn.Module, layers: Layers) -> Iterator[dict[str, float]]:
    """While it is open, a forward compares the linears in `layers`: names -> RMS of the difference over that of the
    output."""
    errors: dict[str, float] = {}
    handles = []

    def hook(names: tuple[str, ...], expected: Expected) -> Callable[..., None]:
        outputs: list[torch.Tensor] = []

        def compare(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            outputs.append(output.flatten(0, -2))
            if len(outputs) == len(names):
                theirs = expected(args[0].flatten(0, -2)).float()
                difference = torch.cat(outputs, -1).float() - theirs
                label = "/".join((names[0], *(name.rpartition(".")[2] for name in names[1:])))
                errors[label] = float(difference.norm() / theirs.norm())
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
