"""The memory that `qarl diagnose calibrate` needs, and a check of it before anything is loaded.

It needs much more than a run, because it keeps whole gradients in FP32. With P weights, n batches, and the number of
candidates of a kind (corrections, bands), the most that it holds at once is

    a run's update   as in the memory plan, without the engine, which is closed by then
    another policy   the `exact` one stays while that of `off`, `linears` or `model` computes
    truths           for each batch P * 4 bytes at the weights that sampled, and P * 4 and the weights, P * 2, after
                     one update; and the weights that sampled
    candidates       P * 4 for the sum over the batches of each. While a batch is computed, P * 4 for the gradient of
                     each of one kind and P * 4 for its part from one micro-batch, and P * 4 while one is joined

Candidates with the same gradient share the part of a micro-batch, so real use is often lower.
"""

from __future__ import annotations

import torch

from qarl.checks import memory_terms as terms
from qarl.checks.memory import available_memory, estimate, readable
from qarl.checks.model_folder import load_hf_config
from qarl.checks.model_size import ModelSize
from qarl.config import Config
from qarl.diagnose.candidates import bands, corrections
from qarl.errors import UserError

LEVELS = ("linears", "model")
"""Alignment levels that are compared too, without a correction."""


def check_memory(config: Config, batches: int) -> None:
    """Raise UserError if the comparison may need more memory than is free. `config`: that of its `exact` trainer."""
    size = ModelSize.from_config(load_hf_config(config.model.path, config.model.trust_remote_code))
    parts = needed_memory(size, config, batches)
    needed, free = sum(parts.values()), available_memory()
    if needed <= free:
        return
    raise UserError(
        f"comparing {batches} batches may need {readable(needed)} of memory, but only {readable(free)} are free",
        where="qarl diagnose calibrate: host memory",
        why=f"whole gradients in FP32 are kept; {', '.join(f'{name}: {readable(one)}' for name, one in parts.items())}",
        fix="choose a smaller model or a machine with more memory, or lower batches: at least four are needed, and "
        f"each takes {readable(10 * size.parameters)}",
    )


def needed_memory(size: ModelSize, config: Config, batches: int) -> dict[str, int]:
    """Return the largest number of bytes of each part. The module's docstring has the arithmetic."""
    plan = estimate(size, config, device="cpu", align="exact")
    engine = [*terms.engine(size, config, "cpu", 0)[0], *terms.kept(size, config, "cpu")]
    update = plan.total("update") - sum(part.bytes for part in engine)
    policy = 2 * size.parameters + sum(part.bytes for part in terms.low_bit(size, config, "exact", {}))
    tried, widths = len(corrections(config, [_spread()])), len(bands(config))
    gradient, weights = 4 * size.parameters, 2 * size.parameters
    return {
        "a run's update": update,
        "another policy": policy,
        "truths": batches * (2 * gradient + weights) + weights,
        "candidates": (tried + widths + len(LEVELS) + 2 * max(tried, widths) + 1) * gradient,
    }


def _spread() -> tuple[torch.Tensor, torch.Tensor]:
    """Return log ratios that give the largest number of candidates: none of their thresholds are equal."""
    log_ratios = torch.linspace(-3, 3, 601)[:, None]
    return log_ratios, torch.ones_like(log_ratios, dtype=torch.bool)
