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
from torch import Tensor
from torch.nn import Parameter

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
        named_parameters: Iterable[tuple[str, Parameter]],
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
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self._names = {id(p): name for name, p in named}
        hidden: list[Parameter] = []
        others: list[Parameter] = []
        for name, parameter in named:
            if muon_lr is not None and use_muon(name, parameter):
                hidden.append(parameter)
            else:
                others.append(parameter)
        adam: dict[str, Any] = {"params": others, "lr": lr, "betas": tuple(betas), "eps": eps}
        muon: dict[str, Any] = {"params": hidden, "lr": muon_lr, "momentum": muon_momentum}
        adam["use_muon"] = False
        muon["use_muon"] = True
        groups = [group for group in (adam, muon) if group["params"]]
        for group in groups:
            group["weight_decay"] = weight_decay
            group["seed"] = seed
        super().__init__(groups, {})

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
        def next_direction(parameter: Parameter) -> Tensor:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
            momentum = local_part(state["momentum_buffer"])
            grad = parameter.grad
            gradient = torch.zeros_like(momentum) if grad is None else local_part(grad).float()
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

    def _apply(self, parameter: Parameter, update: Tensor, group: dict[str, Any]) -> None:
        """Change this rank's part of the parameter, and count the update."""
        state = self.state[parameter]
        weight = local_part(parameter)
        state["step"] = state.get("step", 0) + 1
        lr = group["lr"]
        working = weight.float()  # the weight itself if it is FP32
        working.mul_(1 - lr * group["weight_decay"])
        working.add_(update, alpha=-lr)
        if weight.dtype == torch.bfloat16:
            key = rounding_key(group["seed"], self._names[id(parameter)], state["step"])
            rounded = stochastic_round(working, key, region(parameter))
            # A zero update leaves -0.0 as it is.
            weight.copy_(torch.where(rounded == weight, weight, rounded))

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
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)
