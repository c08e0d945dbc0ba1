"""The optimizers of `optim.name`: what the config, the memory plan and both backends ask of one.

An `Optimizer` names the function that builds it, which is imported when a run needs it. So this module, like the whole
config, needs no torch. A plugin adds its own with `register` (`qarl.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qarl.config.registry import Registry, imported

OTHER_STATE_BYTES = 8
"""Bytes of AdamW's two FP32 moments per weight, which every optimizer here uses outside of the decoder blocks."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as the rest of QaRL sees it.

    `factory` is "module:function". Called with (name, parameter) pairs and the keywords lr, betas, eps, weight_decay,
    seed and `keys`, it returns a `torch.optim.Optimizer`. Parameters are FP32, or BF16 with optim.master_dtype=bf16
    if `rounds_bf16`; under verl they are FSDP2's DTensors, of which an elementwise update needs to know nothing.
    """

    name: str
    factory: str
    matrix_state_bytes: int = 8
    """Bytes of FP32 state per weight of a matrix in the decoder blocks."""
    keys: tuple[str, ...] = ()
    """Keys of the section optim that this optimizer reads and others may not."""
    peak_rates: Mapping[str, str] = field(default_factory=dict)
    """Flag of a parameter group -> the key of its peak learning rate. Groups without such a flag have optim.lr."""
    rounds_bf16: bool = False
    """Whether it updates BF16 parameters, rounding stochastically (optim.master_dtype=bf16)."""
    verl_builds_fp32: bool = False
    """Whether verl's default optimizer is this one if parameters are FP32."""
    fused_fp32: bool = False
    """Whether an update of FP32 parameters on one device needs no temporary memory."""
    orthogonalizes: bool = False
    """Whether it orthogonalizes the update of each matrix in the decoder blocks by Newton-Schulz iterations, whose time
    `qarl bench plan` counts."""

    def load(self) -> Callable[..., Any]:
        """Import and return the factory."""
        loaded: Callable[..., Any] = imported(self.factory)
        return loaded

    def own_settings(self, section: Any) -> dict[str, Any]:
        """Return `keys` and their values in the section optim."""
        return {key: getattr(section, key) for key in self.keys}

    def peak_rate(self, section: Any, group: Mapping[str, Any]) -> float:
        """Return the peak learning rate of a parameter group."""
        key = next((key for flag, key in self.peak_rates.items() if group.get(flag)), "lr")
        rate: float = getattr(section, key)
        return rate


_OPTIMIZERS = Registry[Optimizer]("optimizer", "optim.name")
register = _OPTIMIZERS.register
unregister = _OPTIMIZERS.unregister
optimizer_names = _OPTIMIZERS.names
get_optimizer = _OPTIMIZERS.get
reading = _OPTIMIZERS.reading


def built_by(factory: str) -> Optimizer | None:
    """Return the optimizer that `factory` ("module:function") builds, or None."""
    for optimizer in _OPTIMIZERS.values():
        if optimizer.factory == factory:
            return optimizer
    return None


register(
    Optimizer(
        name="adamw",
        factory="qarl.optim.adamw:adamw",
        rounds_bf16=True,
        verl_builds_fp32=True,
        fused_fp32=True,
    )
)
register(
    Optimizer(
        name="muon",
        factory="qarl.optim.muon_adamw:MuonAdamW",
        matrix_state_bytes=4,
        keys=("muon_lr", "muon_momentum"),
        peak_rates={"use_muon": "muon_lr"},
        rounds_bf16=True,
        orthogonalizes=True,
    )
)
