"""Ceilings of what a decoder block does besides its products: norms, residuals, rotary embedding, attention, SwiGLU, in
the trainer at each alignment level, and the head, embedding and optimizer around the blocks.

transformers' own blocks run, aligned as the trainer's are, with stand-ins for the linears that hand out tensors made
beforehand; so a time contains everything but products. Each width is doubled in turn, and a fit tells what goes with
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from qarl.align import align_model
from qarl.bench.cost.ceilings import Block, HeadCost, OptimizerCost
from qarl.bench.cost.fit import fastest_seconds, nonnegative_fit
from qarl.bench.cost.rig import RigSize, make_model
from qarl.config import OptimConfig
from qarl.kernels.logprob import log_probs_of_logits
from qarl.trainer.optim import MasterOptimizer

LEVELS = ("off", "model")
PASSES = ("forward", "forward_grad", "backward")
BASE = RigSize(layers=2, hidden=512, intermediate=2048, heads=8, kv_heads=4, vocab=512)
VARIANTS = {
    "base": BASE,
    "hidden": replace(BASE, hidden=1024),
    "intermediate": replace(BASE, intermediate=4096),
    "width": replace(BASE, heads=16, kv_heads=8),
    "plain": replace(BASE, kind="llama"),
    "plain width": replace(BASE, kind="llama", heads=16, kv_heads=8),
}
ROWS, LENGTH = 4, 256
FEW = "one row"
"""A variant with one row in place of `ROWS`: it tells what a call takes whatever its rows."""
LENGTHS = (64, 128, 256, 512, 1024)
"""Of rows whose attention is measured, at ROWS * LENGTH tokens together."""
LOGITS = (512, 32768)
PARAMETERS = ((64, 512, 512), (16, 1024, 1024), (4, 2048, 2048), (1, 16384, 1024), (1, 65536, 1024))
"""Count and shape of tensors that an optimizer steps at a time, more than caches hold; in order of size. An embedding
has the shape of one."""


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.gradient, None, None


class _Linear(nn.Module):
    """In place of a linear: an output and an input gradient that were there before."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        shape = (rows, LENGTH)
        self.output = torch.randn(*shape, linear.out_features).bfloat16()
        self.gradient = torch.randn(*shape, linear.in_features).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _StandIn.apply(x, self.output, self.gradient)
        return y


def blocks(level: str, rounds: int) -> dict[str, Block]:
    """By pass. `level`: of `LEVELS`."""
    calls: dict[str, Callable[[], object]] = {}
    for name, size in VARIANTS.items():
        calls |= {f"{name} {one}": call for one, call in _block_passes(size, level, ROWS).items()}
    calls |= {f"{FEW} {one}": call for one, call in _block_passes(BASE, level, 1).items()}
    for length in LENGTHS:
        calls |= {f"{length} {one}": call for one, call in _attention_passes(level, length).items()}
    seconds = fastest_seconds(calls, rounds)
    return {one: _block({n.removesuffix(f" {one}"): s for n, s in seconds.items() if n.endswith(f" {one}")})
            for one in PASSES}  # fmt: skip


def _block(seconds: dict[str, float]) -> Block:
    """From seconds of all layers of each variant, and of one attention at each length."""
    query = BASE.heads * BASE.head_dim
    attention = tuple((float(length), seconds[str(length)] / ROWS / LENGTH / query) for length in LENGTHS)
    rows, rest = [], []
    for name, size in {**VARIANTS, FEW: BASE}.items():
        tokens = LENGTH if name == FEW else ROWS * LENGTH
        query, pair = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
        normed = query + pair // 2 if size.kind == "qwen3" else 0
        rows.append([1.0, *(tokens * width for width in (size.hidden, size.intermediate, query + pair, normed))])
        products_aside = seconds[name] / size.layers
        share = tokens * query * seconds[str(LENGTH)] / ROWS / LENGTH / BASE.heads / BASE.head_dim
        rest.append(max(products_aside - share, 0.05 * products_aside))
    call, hidden, intermediate, width, norm = nonnegative_fit(rows, rest)
    return Block(call, hidden, intermediate, width, norm, attention)


def _block_passes(size: RigSize, level: str, rows: int) -> dict[str, Callable[[], object]]:
    model = make_model(size)
    align_model(model, level)
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, _Linear(module, rows))
    embeddings = torch.randn(rows, LENGTH, size.hidden).bfloat16().requires_grad_()
    return _passes(lambda: model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state,
                   [embeddings, *[p for p in model.model.layers.parameters() if p.requires_grad]])  # fmt: skip


def _attention_passes(level: str, length: int) -> dict[str, Callable[[], object]]:
    from transformers import AttentionInterface

    model = make_model(replace(BASE, layers=1))
    align_model(model, level)
    function: Any = AttentionInterface()[model.config._attn_implementation]
    module = model.model.layers[0].self_attn
    rows, size = max(ROWS * LENGTH // length, 1), BASE.head_dim
    # At level `model` queries and keys come out of the rotary embedding in FP32.
    dtypes = [torch.float32] * 2 if level == "model" else [torch.bfloat16] * 2
    inputs = [
        torch.randn(rows, heads, length, size).to(dtype).requires_grad_()
        for heads, dtype in zip((BASE.heads, BASE.kv_heads, BASE.kv_heads), [*dtypes, torch.bfloat16], strict=True)
    ]
    return _passes(lambda: function(module, *inputs, None, scaling=size**-0.5, dropout=0.0)[0], inputs)


def _passes(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    output = call()
    grad = torch.randn_like(output)

    def forward() -> object:
        with torch.no_grad():
            return call()

    return {
        "forward": forward,
        "forward_grad": call,
        "backward": lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True, allow_unused=True),
    }


def head(rounds: int) -> HeadCost:
    tokens, vocabulary = LOGITS
    logits = torch.randn(tokens, vocabulary).bfloat16().requires_grad_()
    chosen = torch.randint(vocabulary, (tokens,))
    places = torch.arange(tokens)
    calls = _passes(lambda: log_probs_of_logits(logits[places], chosen, temperature=1.0)[0], [logits])
    seconds = fastest_seconds(calls, rounds)
    return HeadCost(**{one: seconds[one] / (tokens * vocabulary) for one in PASSES})


def _embedding(rounds: int, shape: tuple[int, int]) -> float:
    """Seconds a parameter of an embedding's gradient."""
    table = nn.Embedding(*shape, dtype=torch.bfloat16)
    looked_up = table(torch.randint(shape[0], (ROWS * LENGTH,)))
    grad = torch.randn_like(looked_up)
    calls = {"embedding": lambda: torch.autograd.grad(looked_up, table.weight, grad, retain_graph=True)}
    return fastest_seconds(calls, rounds)["embedding"] / table.weight.numel()


def optimizer(rounds: int) -> tuple[tuple[float, OptimizerCost], ...]:
    """Of the trainer's own, with AdamW: (parameters of a tensor, its cost)."""
    return tuple(
        (float(rows * columns), _optimizer(rounds, count, (rows, columns))) for count, rows, columns in PARAMETERS
    )


def _optimizer(rounds: int, count: int, shape: tuple[int, int]) -> OptimizerCost:
    found: dict[str, float] = {}
    for dtype in ("fp32", "bf16"):
        parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for _ in range(count)]
        optim = MasterOptimizer(
            [(f"layer.{i}.weight", p) for i, p in enumerate(parameters)],
            OptimConfig(master_dtype=dtype),
            seed=0,
            total_training_steps=1000,
        )
        gradients = [torch.randn(shape).bfloat16() for _ in parameters]

        def accumulate(parameters: Any = parameters, gradients: Any = gradients, optim: Any = optim) -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optim.accumulate()

        calls: dict[str, Callable[[], object]] = {
            "first": accumulate,
            "add": accumulate,
            "clip": partial(optim.clip_grad_norm, 1e-3),
            f"step_{dtype}": optim.step,
        }
        # A round is one optimizer step: each call finds what the one before it left.
        accumulate()
        optim.step()
        found |= _one_by_one(calls, rounds)
    total = count * shape[0] * shape[1]
    costs = {name: seconds / total for name, seconds in found.items()}
    return OptimizerCost(**costs, embedding=_embedding(rounds, shape))


def _one_by_one(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """As `fastest_seconds` without its warm-up, which would call one twice in a row."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = perf_counter()
            call()
            taken[name].append(perf_counter() - start)
    return {name: min(values) for name, values in taken.items()}
