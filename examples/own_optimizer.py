"""An optimizer of your own: Lion (arXiv 2302.06675), an update by the sign of a momentum.

    qarl train config=quickstart.yaml plugins=[examples/own_optimizer.py] optim.name=lion optim.lr=3e-5

This file is all that it takes. `qarl.config.optimizers.Optimizer` documents what may be said of an optimizer. Under
verl the parameters are FSDP2's shards, of which an elementwise update needs to know nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qarl.config.optimizers import Optimizer, register


class Lion(torch.optim.Optimizer):
    """W -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * W); m = b2 * m + (1 - b2) * g."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        seed: int,
    ) -> None:
        """`eps` and `seed` are given to every optimizer; Lion divides by nothing and rounds nothing at random."""
        parameters = [parameter for _, parameter in named_parameters]
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.float()
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                momentum = state["momentum"]
                direction = torch.lerp(gradient, momentum, first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * direction)
                momentum.lerp_(gradient, 1 - second)


# A process that imports this file as a plugin knows it by the name `qarl_plugin_own_optimizer`.
register(Optimizer("lion", factory=f"{__name__}:Lion", matrix_state_bytes=4))
