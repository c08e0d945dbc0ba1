"""How far rounding moves a model's log-probs, measured on the trainer alone.

Below level `exact`, trainer and engine do the same operations, but each rounds intermediate results in its own way. How
far that moves log-probs depends on the model, its temperature and its scheme, so no constant can limit it. In
`other_roundings` every module's output is moved at random by about one rounding, and the change passes through the same
layers, low-bit kernels and softmax as the differences between trainer and engine do. `Roots` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

DRAWS = 2
"""Number of forwards with other roundings. In a trained model few tokens carry the noise, so one draw is uncertain."""
_SIZE = 0.25
"""Standard deviation of the moves, in units of the dtype's eps, which is one to two rounding steps. Before it is
rounded again, a moved number is so one quarter of a step off, or half of one."""


@contextmanager
def other_roundings(model: Any, *, seed: int) -> Iterator[None]:
    """Move the outputs of the model's innermost modules at random in every forward of this context.

    Embeddings and the output embedding are left alone: they are the same operation on both sides. `model`: a
    transformers model, which FSDP may shard. `seed`: seed of the moves. Global generators are not used.
    """
    head = model.get_output_embeddings()
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, inputs: Any, output: Any) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        device = output.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        moves = torch.randn(output.shape, generator=generators[device], device=device)
        size = _SIZE * torch.finfo(output.dtype).eps
        return (output.float() * (1 + size * moves)).to(output.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            innermost = next(module.children(), None) is None
            if innermost and module is not head and not isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(move).remove)
        yield


class Roots:
    """Sums over tokens of the square roots of |δ| (`delta`) and of |noise| (`noise`), and the number of `tokens`.

    Square roots, because a mean of a trained model's |δ| is decided by a few tokens (`qarl.metrics.mismatch_limit`)."""

    def __init__(self) -> None:
        self.delta = 0.0
        self.noise = 0.0
        self.tokens = 0.0

    @torch.no_grad()
    def add(
        self,
        model: Any,
        log_probs: Callable[[], torch.Tensor],
        rollout: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Compare a few responses. `log_probs` runs the forward of `model` and returns FP32 log-probs [B, T].

        `rollout`: the engine's log-probs, [B, T]. `mask`: whether a position has a token, [B, T]."""
        mask = mask.bool()
        own = log_probs()[mask].double()
        self.delta += float((own - rollout.to(own.device)[mask]).abs().sqrt().sum())
        self.tokens += float(mask.sum())
        for seed in range(DRAWS):
            with other_roundings(model, seed=seed):
                self.noise += float((log_probs()[mask].double() - own).abs().sqrt().sum()) / DRAWS
