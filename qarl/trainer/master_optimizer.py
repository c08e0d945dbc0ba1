"""The optimizer step for low-precision parameters, with FP32 arithmetic, FP32 gradient sums and defined rounding.

A BF16 number has 8 significant bits. So an update below 1/512 of a weight is lost if it is added in BF16 and rounded to
nearest. At learning rates near 1e-6 nearly every update is lost. `optim.master_dtype` chooses one of two solutions:

- `fp32`: the optimizer owns an FP32 copy of each parameter. After a step the parameter is that copy rounded to nearest.
- `bf16`: no copy is kept. The update is computed in FP32, one parameter at a time, and rounded back stochastically, so
  that it is right on average (`qarl.optim.rounding`). This saves 4 bytes per parameter.

In both cases the gradients of all micro-batches are summed in FP32, because a sum in BF16 would lose small gradients.

`qarl.config.optimizers` says what builds the optimizer of `optim.name`. AdamW with FP32 masters is PyTorch's fused
`torch.optim.AdamW`. Muon and BF16 masters use `qarl.optim.muon_adamw`, as in the verl backend.

As in verl, weight decay applies to every parameter, including norms and biases. Also as in verl, the schedule counts
training steps from 0, so with a warmup the first step has learning rate 0. Unlike in verl, the cosine schedule stays at
its minimum after `total_training_steps`. verl's rises again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from qarl.config.optimizers import get_optimizer
from qarl.quant.quantize import holds_zero
from qarl.step.updates import is_skipped

if TYPE_CHECKING:
    from qarl.config import OptimConfig


FIRST = 2.0**16
"""The first scale, as in torch.amp.GradScaler."""
INTERVAL = 100
"""Number of updates without an overflow after which the scale is doubled. torch uses 2000, more than most runs have."""
LARGEST = 2.0**24
SMALLEST = 1.0


class LossScale:
    """Dynamic loss scaling for gradients in FP16.

    FP16's smallest positive number is 6e-8, and gradients of a mean over many tokens are often smaller. So the loss is
    multiplied by a scale before its backward, and the FP32 sums of the gradients are divided by this scale. If a
    gradient overflows, the update is skipped and the scale is halved. After `INTERVAL` updates without an overflow the
    scale is doubled. Scales are powers of two, so scaling causes no rounding errors unless a number overflows or
    becomes subnormal.

    `torch.amp.GradScaler` has the same rule. QaRL does not use it, because it divides each parameter's `.grad` in FP16,
    while QaRL sums the gradients of micro-batches in FP32.

    `scale`: the factor of the loss. `good`: number of updates without an overflow since the scale last changed.
    `overflows`: number of all skipped updates. If `active` is false, the scale stays 1."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.scale = FIRST if active else 1.0
        self.good = self.overflows = 0

    def updated(self, *, overflow: bool) -> None:
        """Adapt the scale. `overflow`: true if the update was skipped because of an overflow, false after an update."""
        if not self.active:
            return
        if overflow:
            self.overflows = self.overflows + 1
            self.good = 0
            self.scale = max(self.scale / 2, SMALLEST)
            return
        self.good += 1
        if self.good == INTERVAL:
            self.scale = min(self.scale * 2, LARGEST)
            self.good = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.good = int(state["good"])
        self.overflows = int(state["overflows"])


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


_AT_ONCE = 2**18
"""Elements that `write_back` reads again while they are in a core's cache."""


def write_back(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Round `master` to nearest into `parameter`, but leave elements alone whose value does not change.

    Otherwise a zero update would turn -0.0 into +0.0, and change a digest. All other numbers that are equal have the
    same bits. So on a CPU, where comparing BF16 numbers takes four times as long as rounding them, a part of a weight
    is compared only if it holds a zero.
    """
    if parameter.device.type != "cpu" or not parameter.is_contiguous():
        _keep_equal(parameter, master)
        return
    parts = (tensor.reshape(-1).split(_AT_ONCE) for tensor in (parameter, master))
    for part, rounded in zip(*parts, strict=True):
        if holds_zero(part):
            _keep_equal(part, rounded)
        else:
            part.copy_(rounded)


def _keep_equal(parameter: torch.Tensor, master: torch.Tensor) -> None:
    rounded = master.to(parameter.dtype)
    parameter.copy_(torch.where(rounded == parameter, parameter, rounded))


class MasterOptimizer:
    """AdamW or Muon in FP32 for parameters of lower precision, with FP32 gradient sums and a learning-rate schedule.

    Multiply the loss of each micro-batch by `loss_scale.scale`, and call `accumulate()` after its `backward()`. After
    the last one of a mini-batch, call `clip_and_step()`. Call `scheduler_step()` once per training step.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        optim_config: OptimConfig,
        *,
        seed: int,
        total_training_steps: int,
        scale_loss: bool = False,
    ) -> None:
        """Store the trainable parameters. They must be on one device. With `master_dtype=bf16` they must be BF16.

        `seed`: for stochastic rounding. `total_training_steps`: length of the cosine schedule. `scale_loss`: whether
        the losses need a factor, as in FP16 (`LossScale`).
        """
        self.config = optim_config
        self.optimizer = get_optimizer(optim_config.name)
        self.total_training_steps = total_training_steps
        self.training_step = 0
        self.loss_scale = LossScale(active=scale_loss)
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._keep_masters = optim_config.master_dtype == "fp32"
        self.gradients: dict[str, torch.Tensor] = {}
        self._updated = self._parameters
        if self._keep_masters:
            self._updated = {
                name: torch.nn.Parameter(p.detach().to(torch.float32, copy=True))
                for name, p in self._updated.items()
            }
        self._inner = self._build_inner(seed)
        self._apply_schedule()

    def _build_inner(self, seed: int) -> torch.optim.Optimizer:
        config = self.config
        build = self.optimizer.load()
        inner: torch.optim.Optimizer = build(
            self._updated.items(),
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            seed=seed,
            **self.optimizer.own_settings(config),
        )
        return inner

    @property
    def lr(self) -> float:
        """The current learning rate of AdamW. With `optim.name=muon` only some parameters use it (`use_muon`)."""
        return self.config.lr * self._scale

    @property
    def other_rates(self) -> dict[str, float]:
        """The current learning rates of other groups of parameters, by key, such as Muon's `muon_lr`."""
        keys = self.optimizer.peak_rates.values()
        return {key: getattr(self.config, key) * self._scale for key in keys}

    @property
    def _scale(self) -> float:
        return lr_scale(self.training_step, self.config, self.total_training_steps)

    def scheduler_step(self) -> None:
        """Move the learning rate to the next training step."""
        self.training_step += 1
        self._apply_schedule()

    def _apply_schedule(self) -> None:
        for group in self._inner.param_groups:
            group["lr"] = self.optimizer.peak_rate(self.config, group) * self._scale

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
        """Divide the gradient sums by the factor of the loss, and scale them to a global L2 norm of at most `max_norm`.
        Return the norm before that scaling.

        If the norm is not finite, nothing is scaled, and the caller should call `zero_grad()` instead of `step()`.
        """
        gradients = list(self.gradients.values())
        if self.loss_scale.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.scale)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm) and norm > max_norm:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        return norm

    def clip_and_step(self, max_norm: float) -> float:
        """Call `clip_grad_norm()`, then `step()`, or only drop the gradients if their norm is not finite. Return it."""
        norm = self.clip_grad_norm(max_norm)
        skipped = is_skipped(norm)
        self.loss_scale.updated(overflow=skipped)
        if not skipped:
            self.step()
        self.zero_grad()
        return norm

    def metrics(self, norms: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an update. `norms`: the norms that `clip_and_step` returned."""
        finite = [norm for norm in norms if not is_skipped(norm)]
        metrics = {"actor/lr": self.lr, "actor/skipped_steps": len(norms) - len(finite)}
        # An overflow in FP16 is expected and says nothing about the gradient. In BF16 the metric shows the fault.
        shown = finite if self.loss_scale.active else norms
        if shown:
            metrics["actor/grad_norm"] = sum(shown) / len(shown)
        if self.loss_scale.active:
            metrics |= {
                "actor/loss_scale": self.loss_scale.scale,
                "actor/overflows": self.loss_scale.overflows,
            }
        return metrics | {f"actor/{key}": rate for key, rate in self.other_rates.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters with the accumulated gradients, then drop the gradients.

        AdamW skips a parameter without a gradient. Muon treats a missing gradient as zero, so weight decay still acts.
        """
        for name, parameter in self._updated.items():
            parameter.grad_dtype = None  # so that a BF16 parameter accepts its FP32 sum
            parameter.grad = self.gradients.get(name)
        self._inner.step()
        if self._keep_masters:
            for name, master in self._updated.items():
                write_back(self._parameters[name], master)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients: the FP32 sums and every `.grad`."""
        self.gradients.clear()
        for parameter in (*self._parameters.values(), *self._updated.values()):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return all state that a bitwise resume needs, except the parameters. The tensors are not copied.

        `torch.load(weights_only=True)` can read it.
        """
        return {
            "training_step": self.training_step,
            "inner": self._inner.state_dict(),
            "masters": {n: master.detach() for n, master in self._updated.items()}
            if self._keep_masters
            else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()` of a run with the same model and the same section optim. If it has FP32 masters, the
        parameters are set from them, too. Learning rates come from this run's config."""
        self.zero_grad()
        self._inner.load_state_dict(state["inner"])
        self.training_step = state["training_step"]
        self._apply_schedule()
        for name, master in state["masters"].items():
            self._updated[name].copy_(master)
            write_back(self._parameters[name], self._updated[name])
