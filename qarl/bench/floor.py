"""The floor of a training step: seconds of its products alone, in BF16, one call for each shape and number of rows.

A step cannot be faster than its products, unless low-bit ones are. `qarl bench steps` measures the floor in the same
process, right after each step, so both see the same machine. The operands are random. Each product is PyTorch's, with
q, k, v, gate and up apart:

    rollout  prefill of all prompts, a decode step for each token after the first, and lm_head before each token. What
             the responses to a prompt take from the engine's prefix cache is multiplied once
    update   forward, input gradient and weight gradient of each micro-batch, with lm_head on response tokens alone. A
             prompt that rows share is multiplied once in each micro-batch
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CALLS = 3
"""Measured calls of a product, of which the median counts."""


@dataclass(frozen=True)
class Shape:
    """A weight [N, K]: `outputs`, `inputs`."""

    outputs: int
    inputs: int


@dataclass(frozen=True)
class Work:
    """What a step multiplies.

    linears         shape -> number of linears of that shape in the decoder layers
    head            the shape of lm_head
    sequences       responses of a step
    prompt, response  tokens of each
    micro_batch     sequences of a forward and backward
    responses       responses to each prompt
    cached          tokens of a prompt that the engine computes for the first of its responses only
    shared          whether the rows of a micro-batch share their prompt
    """

    linears: Counter[Shape]
    head: Shape
    sequences: int
    prompt: int
    response: int
    micro_batch: int
    responses: int = 1
    cached: int = 0
    shared: bool = False

    @classmethod
    def of(cls, model: nn.Module, **counts: Any) -> Work:
        """Return the work of a step of a transformers causal LM. `counts`: the other fields."""
        head = model.get_output_embeddings()  # type: ignore[operator]  # nn.Module, of which every attribute may be a tensor
        linears = Counter(
            Shape(*module.weight.shape)
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not head
        )
        return cls(linears, Shape(*head.weight.shape), **counts)

    @property
    def prefilled(self) -> int:
        """Tokens of all prompts that the engine computes."""
        others = self.sequences - self.sequences // self.responses
        return self.sequences * self.prompt - others * self.cached

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch's forward."""
        prompts = -(-self.micro_batch // self.responses) if self.shared else self.micro_batch
        return prompts * self.prompt + self.micro_batch * self.response


@dataclass(frozen=True)
class Products:
    """The same product, `times` times: of `rows` rows and a weight of `shape`, by a function of `KINDS`."""

    kind: str
    rows: int
    shape: Shape
    times: int


def rollout_products(work: Work) -> list[Products]:
    """Return the products of a rollout. All prompts are prefilled at once, and all responses are equally long."""
    decodes = work.response - 1
    products = [Products("forward", work.sequences, work.head, work.response)]
    for shape, count in work.linears.items():
        products.append(Products("forward", work.prefilled, shape, count))
        products.append(Products("forward", work.sequences, shape, count * decodes))
    return products


def update_products(work: Work) -> list[Products]:
    """Return the products of one pass over all micro-batches, without padding."""
    micro_batches = -(-work.sequences // work.micro_batch)
    rows = work.micro_batch_tokens
    products = []
    for kind in KINDS:
        products.append(Products(kind, work.micro_batch * work.response, work.head, micro_batches))
        for shape, count in work.linears.items():
            products.append(Products(kind, rows, shape, count * micro_batches))
    return products


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda x, weight, grad: F.linear(x, weight),
    "input_gradient": lambda x, weight, grad: grad @ weight,
    "weight_gradient": lambda x, weight, grad: grad.t() @ x,
}
"""Kind of a product -> function of x [rows, K], weight [N, K] and the gradient of the output, [rows, N]."""


@torch.no_grad()
def seconds_of(products: list[Products]) -> float:
    """Return the seconds of these products, from the median of a few calls of each."""
    total = 0.0
    for product in products:
        shape = product.shape
        x = torch.randn(product.rows, shape.inputs).bfloat16()
        weight = torch.randn(shape.outputs, shape.inputs).bfloat16()
        grad = torch.randn(product.rows, shape.outputs).bfloat16()
        multiply = KINDS[product.kind]
        multiply(x, weight, grad)
        samples = []
        for _ in range(CALLS):
            start = time.perf_counter()
            multiply(x, weight, grad)
            samples.append(time.perf_counter() - start)
        total += statistics.median(samples) * product.times
    return total


def floor_phases(work: Work) -> dict[str, float]:
    """Return the seconds of the floor by phase, and their sum as `floor`."""
    rollout = seconds_of(rollout_products(work))
    update = seconds_of(update_products(work))
    return {"floor.rollout": rollout, "floor.update": update, "floor": rollout + update}
