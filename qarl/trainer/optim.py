"""The optimizer step for low-precision parameters, with FP32 arithmetic, FP32 gradient sums and defined rounding.

A BF16 number has 8 significant bits. So an update below 1/512 of a weight is lost if it is added in BF16 and rounded to
nearest. At learning rates near 1e-6 nearly every update is lost. `optim.master_dtype` chooses one of two solutions:

- `fp32`: the optimizer owns an FP32 copy of each parameter. After a step the parameter is that copy rounded to nearest.
- `bf16`: no copy is kept between steps. The update is computed in FP32 and rounded back stochastically, so that it is
  right on average. This saves 4 bytes per parameter in forward and backward, but not at the peak of the step itself.

In both cases the gradients of all micro-batches are summed in FP32, because a sum in BF16 would lose small gradients.

AdamW is `torch.optim.AdamW` in its fused form, which makes one pass over each parameter without temporary tensors. Muon
is `SingleDeviceMuonWithAuxAdam` of the `muon-optimizer` package, whose other classes need a process group. As in
verl, weight decay applies to every parameter, including norms and biases. Also as in verl, the schedule counts training
steps, not optimizer steps, and starts at zero. So with a warmup the first step has learning rate 0. After
`total_training_steps` our cosine schedule stays at its minimum, while verl's rises again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from qarl.errors import UserError

if TYPE_CHECKING:
    from qarl.config import OptimConfig


def stochastic_round(source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round FP32 to BF16, up or down at random, with the probability that makes the expected value exact.

    For example, a value that lies a quarter of the way from one BF16 neighbour to the next is rounded to the farther
    one with probability 1/4. BF16 values, NaN and Inf do not change. Above the largest BF16 value, the next is Inf.

    `source`: FP32, any shape, on the generator's device. Returns BF16 of the same shape.
    """
    # BF16 is the upper half of FP32, so neighbours are 2**16 bit patterns apart, for both signs. Add noise, truncate.
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    rounded = (source.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(source.isfinite(), rounded, source).to(torch.bfloat16)


def lr_scale(training_step: int, optim_config: OptimConfig, total_training_steps: int) -> float:
    """Return the factor of the learning rate in `training_step` (from 0): linear warmup, then constant or cosine."""
    warmup = optim_config.lr_warmup_steps
    if training_step < warmup:
        return training_step / warmup
    if optim_config.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (training_step - warmup) / max(1, total_training_steps - warmup))
    floor = optim_config.min_lr_ratio
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def use_muon(name: str, parameter: torch.Tensor) -> bool:
    """Return whether Muon updates this parameter. It updates matrices, except embeddings and lm_head.

    Stacked expert weights [experts, out, in] count as matrices, because Muon orthogonalizes the last two dimensions.
    """
    if "embed" in name or "lm_head" in name:
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)


class MasterOptimizer:
    """AdamW or Muon in FP32 for parameters of lower precision, with FP32 gradient sums and a learning-rate schedule.

    Call `accumulate()` after the `backward()` of each micro-batch. After the last one of a mini-batch, call
    `clip_grad_norm()`, then `step()` (or `zero_grad()` if the norm is not finite). Call `scheduler_step()` once per
    training step.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        optim_config: OptimConfig,
        *,
        seed: int,
        total_training_steps: int,
    ) -> None:
        """Take the trainable parameters. They must be on one device, and if `master_dtype=bf16` they must be BF16.

        `seed`: for stochastic rounding. `total_training_steps`: length of the cosine schedule.
        """
        self.config = optim_config
        self.total_training_steps = total_training_steps
        self.training_step = 0
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._keep_masters = optim_config.master_dtype == "fp32"
        self._check_parameters()
        device = next(iter(self._parameters.values())).device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.gradients: dict[str, torch.Tensor] = {}
        self._working = {
            name: torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for name, p in self._parameters.items()
        }
        self._inner = self._build_inner()
        if not self._keep_masters:
            self._drop_working()
        self._apply_schedule()

    def _check_parameters(self) -> None:
        if not self._parameters:
            raise UserError("the model has no trainable parameter", fix="unfreeze at least one parameter")
        for name, parameter in self._parameters.items():
            if not self._keep_masters and parameter.dtype != torch.bfloat16:
                raise UserError(
                    f"optim.master_dtype=bf16 needs BF16 parameters, but {name} is {parameter.dtype}",
                    why="stochastic rounding is implemented only from FP32 to BF16",
                    fix="load the model in bfloat16, or set optim.master_dtype=fp32",
                )

    def _build_inner(self) -> torch.optim.Optimizer:
        config = self.config
        adam: dict[str, Any] = {
            "lr": config.lr,
            "betas": tuple(config.betas),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        if config.name == "adamw":
            return torch.optim.AdamW(self._working.values(), **adam, fused=True)

        from muon import SingleDeviceMuonWithAuxAdam

        hidden = [p for name, p in self._working.items() if use_muon(name, p)]
        others = [p for name, p in self._working.items() if not use_muon(name, p)]
        muon = {"lr": config.muon_lr, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}
        groups = [{"params": hidden, "use_muon": True, **muon}, {"params": others, "use_muon": False, **adam}]
        return SingleDeviceMuonWithAuxAdam([group for group in groups if group["params"]])

    @property
    def lr(self) -> float:
        """The current learning rate of AdamW. With `optim.name=muon` only some parameters use it (`use_muon`)."""
        return self.config.lr * self._scale

    @property
    def muon_lr(self) -> float | None:
        """Muon's current learning rate, as a spectral norm per update. None if Muon is not used."""
        return self.config.muon_lr * self._scale if self.config.name == "muon" else None

    @property
    def _scale(self) -> float:
        return lr_scale(self.training_step, self.config, self.total_training_steps)

    def scheduler_step(self) -> None:
        """Move the learning rate to the next training step."""
        self.training_step += 1
        self._apply_schedule()

    def _apply_schedule(self) -> None:
        for group in self._inner.param_groups:
            group["lr"] = self.muon_lr if group.get("use_muon") else self.lr

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add each parameter's `.grad` to its FP32 sum, and free the `.grad`."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if name in self.gradients:
                self.gradients[name] += parameter.grad
            else:
                self.gradients[name] = parameter.grad.to(torch.float32, copy=True)
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradient sums to a global L2 norm of at most `max_norm`. Return the norm before scaling.

        If the norm is not finite, nothing is scaled, and the caller should call `zero_grad()` instead of `step()`.
        """
        gradients = list(self.gradients.values())
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm) and norm > max_norm:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters with the accumulated gradients, then drop the gradients.

        AdamW skips a parameter without a gradient. Muon takes zero for the gradient, so it still applies weight decay.
        Raises RuntimeError if nothing was accumulated.
        """
        if not self.gradients:
            raise RuntimeError("step() without gradients: call accumulate() after each backward()")
        for name, working in self._working.items():
            if not self._keep_masters:
                working.data = self._parameters[name].detach().to(torch.float32)
            working.grad = self.gradients.get(name)
            if working.grad is None and self.config.name == "muon":
                working.grad = torch.zeros_like(working)
        self._inner.step()
        for name in self._working:
            self._write_back(name)
        if not self._keep_masters:
            self._drop_working()
        self.zero_grad()

    def _write_back(self, name: str) -> None:
        parameter, working = self._parameters[name], self._working[name].detach()
        rounded = working.to(parameter.dtype) if self._keep_masters else stochastic_round(working, self._generator)
        # A zero update would turn -0.0 into +0.0. Equal numbers keep their bytes, so digests change only with values.
        parameter.copy_(torch.where(rounded == parameter, parameter, rounded))

    def _drop_working(self) -> None:
        for working in self._working.values():
            working.grad = None
            working.data = working.new_empty(0)

    def zero_grad(self) -> None:
        """Drop all gradients: the FP32 sums and every `.grad`."""
        self.gradients.clear()
        for parameter in (*self._parameters.values(), *self._working.values()):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return all state that a bitwise resume needs, except the parameters. The tensors are not copied.

        `torch.load(weights_only=True)` can read it. Raises RuntimeError between `accumulate()` and `step()`.
        """
        if self.gradients:
            raise RuntimeError("state_dict() between accumulate() and step(): gradient sums are not saved")
        return {
            "name": self.config.name,
            "master_dtype": self.config.master_dtype,
            "parameter_names": list(self._parameters),
            "training_step": self.training_step,
            "generator": self._generator.get_state(),
            "inner": self._inner.state_dict(),
            "masters": {n: w.detach() for n, w in self._working.items()} if self._keep_masters else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`. If it has FP32 masters, set the parameters from them too. Learning rates come from
        this run's config. Raise UserError if optimizer, master_dtype or set of parameters differ from the saved ones.
        """
        for key, ours in (
            ("name", self.config.name),
            ("master_dtype", self.config.master_dtype),
            ("parameter_names", list(self._parameters)),
        ):
            if state[key] != ours:
                raise UserError(
                    f"the checkpoint's optimizer state was saved with a different {key}",
                    where=f"optimizer state, {key}",
                    why=f"it has {_abridged(state[key], ours)}, but this run has {_abridged(ours, state[key])}",
                    fix="resume with the model and the optim section of the run that wrote the checkpoint",
                )
        self.zero_grad()
        self._inner.load_state_dict(state["inner"])
        self._generator.set_state(state["generator"].cpu())
        self.training_step = state["training_step"]
        self._apply_schedule()
        for name, master in state["masters"].items():
            self._working[name].copy_(master)
            self._write_back(name)


def _abridged(value: str | list[str], other: str | list[str]) -> str:
    """Return `value` for an error. A list is shortened to its length and up to three names that `other` lacks."""
    if isinstance(value, str):
        return value
    only_here = [name for name in value if name not in set(other)]
    return f"{len(value)} parameters" + (f", only here {', '.join(only_here[:3])}" if only_here else "")
