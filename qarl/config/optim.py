"""The section `optim`: the optimizer and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qarl.config.optimizers import optimizer_names
from qarl.config.types import Fraction, OneOf, Sane, Section, Unit


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Annotated[str, OneOf(optimizer_names)] = "adamw"
    """`muon`: Muon for the matrices inside the decoder blocks, AdamW for everything else. The paper uses Muon."""

    lr: Annotated[float, Sane(1e-9, 1e-2)] = Field(default=1e-6, ge=0)
    """AdamW's peak learning rate. The default is the value that the paper gives for Muon (docs/do/paper_runs.md)."""

    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's decay rates of the first and second moment."""

    eps: Annotated[float, Sane(1e-20, 1e-2)] = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: Annotated[float, Sane(0.0, 10.0)] = Field(default=0.01, ge=0)
    """Decoupled weight decay. In each step it is multiplied by the learning rate. The default is the paper's."""

    lr_warmup_steps: Annotated[int, Unit("steps")] = Field(default=0, ge=0)
    """Number of training steps in which the learning rate rises linearly from 0 to its peak. Must be less than
    trainer.total_training_steps."""

    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `constant`, or `cosine` down to min_lr_ratio at the last training step."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the cosine schedule, as a fraction of the peak."""

    muon_lr: Annotated[float, Sane(1e-8, 1.0)] = Field(default=0.02, ge=0)
    """Muon's peak learning rate. One update changes an element of a matrix by about muon_lr / sqrt(input width). The
    default is that of the muon-optimizer package, for pre-training. Fine-tuning needs less."""

    muon_momentum: Annotated[Fraction, Sane(0.0, 0.999)] = 0.95
    """Muon's momentum."""

    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights that the optimizer updates. With bf16, updates are rounded stochastically, because rounding
    to nearest would lose updates of relative size 1e-6."""
