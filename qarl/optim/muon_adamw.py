"""One optimizer for both backends: Muon and AdamW, for FP32 or BF16 parameters, whole or sharded by FSDP2.

The arithmetic is that of `SingleDeviceMuonWithAuxAdam` of the `muon-optimizer` package, in FP32:

    Muon     momentum; W -= lr * (weight_decay * W + orthogonalized(direction)); see `qarl.optim.muon`
    AdamW    the package's `adam_update`, with decoupled weight decay

Under FSDP2 each rank updates its shards and keeps their momentum and moments, as DTensors. Only Muon communicates
(`qarl.optim.muon`). BF16 parameters are updated in FP32 and rounded back stochastically, one parameter at a time
(`qarl.optim.rounding`). The state is always FP32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from muon import adam_update

from qarl.errors import UserError
from qarl.optim.muon import direction, local_part, region, updates, use_muon
from qarl.optim.rounding import rounding_key, stochastic_round


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of `use_muon` if `muon_lr` is given, AdamW for everything else.

    The first parameter group is AdamW's, the second one Muon's. The state dict is sufficient for a bitwise resume. It
    includes the seed of the run that saved it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        muon_momentum: float = 0.95,
        seed: int = 0,
    ) -> None:
        """Take the trainable parameters, FP32 or BF16.

        `muon_lr`: see `qarl.optim.muon`. None for AdamW alone. `seed`: for stochastic rounding.
        """
        named = {name: p for name, p in named_parameters if p.requires_grad}
        self._names = {id(p): name for name, p in named.items()}
        hidden = [p for name, p in named.items() if muon_lr is not None and use_muon(name, p)]
        chosen = {id(p) for p in hidden}
        others = [p for p in named.values() if id(p) not in chosen]
        common = {"weight_decay": weight_decay, "seed": seed}
        adam: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "use_muon": False,
            **common,
        }
        muon: dict[str, Any] = {
            "lr": muon_lr,
            "momentum": muon_momentum,
            "use_muon": True,
            **common,
        }
        groups = [{"params": others, **adam}, {"params": hidden, **muon}]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter from its `.grad`. Gradients are FP32, or BF16 for BF16 parameters, and are not
        changed.

        AdamW skips a parameter without a gradient. Muon treats the missing gradient as zero, so momentum and weight
        decay still act, and all ranks exchange the same matrices.
        """
        for group in self.param_groups:
            if group["use_muon"]:
                self._step_muon(group)
            else:
                self._step_adamw(group)

    def _step_muon(self, group: dict[str, Any]) -> None:
        def next_direction(parameter: torch.nn.Parameter) -> torch.Tensor:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
            momentum = local_part(state["momentum_buffer"])
            gradient = (
                torch.zeros_like(momentum)
                if parameter.grad is None
                else local_part(parameter.grad).float()
            )
            return direction(gradient, momentum, group["momentum"])

        for parameter, update in updates(group["params"], next_direction):
            self._apply(parameter, update, group)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            first = local_part(state["exp_avg"])
            second = local_part(state["exp_avg_sq"])
            step = state.get("step", 0) + 1
            gradient = local_part(parameter.grad).float()
            update = adam_update(gradient, first, second, step, group["betas"], group["eps"])
            self._apply(parameter, update, group)

    def _apply(
        self, parameter: torch.nn.Parameter, update: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Change this rank's part of the parameter, and count the update."""
        state = self.state[parameter]
        weight = local_part(parameter)
        state["step"] = state.get("step", 0) + 1
        working = weight.float()  # the weight itself if it is FP32
        decay = 1 - group["lr"] * group["weight_decay"]
        working.mul_(decay).add_(update, alpha=-group["lr"])
        if weight.dtype == torch.bfloat16:
            key = rounding_key(group["seed"], self._names[id(parameter)], state["step"])
            rounded = stochastic_round(working, key, region(parameter))
            weight.copy_(
                torch.where(rounded == weight, weight, rounded)
            )  # a zero update leaves -0.0 as it is

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict()`. Unlike torch, keep the state of BF16 parameters in FP32.

        Raise UserError if it is another optimizer's. torch would take over its groups, and the next step would fail."""
        saved = [group.get("use_muon") for group in state_dict["param_groups"]]
        if saved != [group["use_muon"] for group in self.param_groups]:
            raise UserError(
                "the checkpoint has the state of another optimizer",
                where="the optimizer's state in the checkpoint",
                why="optim.name or optim.master_dtype has changed since the checkpoint was written",
                fix="restore the old values, or start fresh with a new run",
            )
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in saved.items():
                if isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
