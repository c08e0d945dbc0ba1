"""AdamW of `QaRLTrainer`, which TRL's checkpoints save and resume like any optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from qarl.optim.muon_adamw import MuonAdamW
from qarl.trainer.master_optimizer import write_back


class MasterAdamW(MuonAdamW):
    """AdamW on FP32 copies of BF16 parameters. After a step, each parameter is its FP32 copy, rounded to nearest.

    The copies are part of `state_dict`, so TRL's own checkpoints contain them and a run resumes bit for bit. With
    `master_dtype=bf16` there are no copies, and updates are rounded stochastically (`qarl.optim`).

    In a single process, autograd sums the gradients of all micro-batches in FP32 (`Tensor.grad_dtype`). With several
    processes they are summed in BF16, as TRL does for any BF16 model, because DistributedDataParallel reduces gradients
    in the dtype of the weights.

    `decayed`: names of the parameters that have weight decay, as in transformers."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        decayed: Iterable[str],
        keep_masters: bool = True,
        sum_in_fp32: bool = True,
        **settings: Any,
    ) -> None:
        """`settings`: lr, betas, eps, weight_decay and seed of `MuonAdamW`."""
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        super().__init__(named, **settings)
        self._keep_masters = keep_masters
        names = set(decayed)
        (group,) = self.param_groups
        plain = [p for name, p in named if name not in names]
        group["params"] = [p for name, p in named if name in names]
        self.add_param_group(group | {"params": plain, "weight_decay": 0.0})
        if sum_in_fp32:
            for _, parameter in named:
                parameter.grad_dtype = torch.float32

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch also takes closures
        """Update every parameter. If a gradient is not finite, change nothing: neither weights nor state."""
        gradients = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            super().step()

    def _apply(
        self, parameter: torch.nn.Parameter, update: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if not self._keep_masters:
            super()._apply(parameter, update, group)
            return
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if "master" not in state:
            state["master"] = parameter.detach().float()
        master: torch.Tensor = state["master"]
        decay = 1 - group["lr"] * group["weight_decay"]
        master.mul_(decay).add_(update, alpha=-group["lr"])
        write_back(parameter, master)
