"""The caps, weights, rejections and bands that `python -m qarl.diagnose calibrate` compares.

A candidate is a set of config keys on top of the base: the config's objective without any correction. Thresholds are
the default or the paper's, and those that 20%, 5% and 1% of the sampled responses (tokens, for a weight per token)
exceed. So the table covers the useful range of every model without being told it.

`check_memory` compares the memory of `calibrate` with what is free before anything is loaded.
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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.checks import memory_terms as terms
from qarl.checks.memory import available_memory, estimate, readable
from qarl.checks.model_folder import load_hf_config
from qarl.checks.model_size import ModelSize
from qarl.config import Config
from qarl.config.actor import Level, RolloutCorrectionConfig
from qarl.errors import UserError
from qarl.metrics.warning_log import bands_in_force
from qarl.objectives.loss import correction_weights
from qarl.objectives.settings import Settings, objective_settings

LEVELS = ("linears", "model")
"""Alignment levels that are compared too, without a correction."""
QUANTILES = (0.8, 0.95, 0.99)
BAND_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
MOST_CAPS, MOST_WEIGHTS = 18, 26
"""The largest numbers of corrections, of objectives that have a cap, and of the others."""
PAPER_REJECTION = 0.001
"""The threshold of a sum of K in arXiv 2605.14220, appendix A.4."""
_NO_BOUND = 1e6
_LOWEST = 0.99
"""The widest lower band: at 1 its edge would be a ratio of 0."""
_IS = "rollout_correction.rollout_is"
_RS = "rollout_correction.rollout_rs"


@dataclass(frozen=True)
class Candidate:
    """Config keys to try. `kind`: "base", "as configured", "cap", "weight", "rejection" or "band". `label`: its name in
    the table; empty if the keys are short enough."""

    kind: str
    keys: Mapping[str, Any]
    settings: Settings
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.command

    @property
    def command(self) -> str:
        """The keys as they stand on a command line."""
        return " ".join(f"{key}={value}".replace("'", "") for key, value in self.keys.items())


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return `config` with other values of `keys` (SECTION.KEY). The values are not checked."""
    for key, value in keys.items():
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def base_config(config: Config) -> Config:
    """Return `config` without correction: no weight, no rejection, no bypass.

    TBPO has its weight always. A cap of 1 makes the weight 1. mis_gspo without its weight is gspo."""
    keys: dict[str, Any] = {}
    if config.actor.loss == "tbpo":
        keys = {"actor.seq_tis_imp_ratio_cap": 1.0, "actor.mismatch_outside_cap": "truncate"}
    elif config.actor.loss == "mis_gspo":
        keys = {"actor.loss": "gspo"}
    return with_keys(config.model_copy(update={"rollout_correction": RolloutCorrectionConfig()}), keys)


def corrections(config: Config, log_ratios: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Candidate]:
    """Return the base, the config's own correction and the candidates for it.

    `log_ratios`: for each batch log r_corr at quant.align=off, and the mask of its tokens, both [B, R]."""
    base, tried = base_config(config), list(_corrections(config, log_ratios))
    candidates = [Candidate("base", {}, objective_settings(base), "no correction")]
    own = objective_settings(config)
    if own != candidates[0].settings:
        candidates.append(Candidate("as configured", {}, own, "as configured"))
    return candidates + [Candidate(kind, keys, objective_settings(with_keys(base, keys))) for kind, keys in tried]


def bands(config: Config) -> list[Candidate]:
    """Return the base with its bands multiplied by `BAND_FACTORS`, or [] if the objective has no band.

    The candidate with factor 1 is of kind "base"."""
    base = base_config(config)
    actor, settings = base.actor, objective_settings(base)
    if actor.loss in ("sapo", "reinforce"):
        return []
    if actor.loss == "tbpo":
        widths = {f"actor.{name}": width for name, width in bands_in_force(actor.model_dump()).items()}
    else:
        widths = {f"actor.{name}": getattr(settings, name) for name in ("clip_ratio_low", "clip_ratio_high")}
    candidates = []
    for factor in BAND_FACTORS:
        wanted = {key: width if factor == 1 else rounded(width * factor) for key, width in widths.items()}
        keys = {key: min(width, _LOWEST) if key.endswith("_low") else width for key, width in wanted.items()}
        kind, label = "base" if factor == 1 else "band", f"bands times {factor:g}"
        label += "" if keys == wanted else f", lower at most {_LOWEST:g}"
        candidates.append(Candidate(kind, keys, objective_settings(with_keys(base, keys)), label))
    return candidates


def _corrections(
    config: Config, log_ratios: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterable[tuple[str, dict[str, Any]]]:
    loss = config.actor.loss
    if loss == "tbpo":
        means = torch.cat([_responses(log_ratio, mask, "geometric") for log_ratio, mask in log_ratios])
        for cap in _above_one(means.abs().exp(), 2.0):
            for outside in ("truncate", "drop"):
                yield "cap", {"actor.seq_tis_imp_ratio_cap": cap, "actor.mismatch_outside_cap": outside}
    elif loss == "mis_gspo":
        products = torch.cat([_responses(log_ratio, mask, "sequence") for log_ratio, mask in log_ratios])
        for cap in _above_one(products.exp(), 2.0):
            yield "cap", {"actor.loss": "mis_gspo", "actor.mis_imp_ratio_cap": cap}
    else:
        yield from _weights(loss, log_ratios)
    for name, divergence in (("seq_sum_k1", lambda x: -x), ("seq_sum_k3", lambda x: x.exp() - 1 - x)):
        sums = torch.cat([_responses(divergence(ratio), mask, "sequence") for ratio, mask in log_ratios])
        for threshold in _distinct([*(rounded(x) for x in _quantiles(sums)), PAPER_REJECTION]):
            if threshold > 0:
                yield "rejection", {_RS: [name], f"{_RS}_threshold": [threshold]}


def _weights(
    loss: str, log_ratios: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterable[tuple[str, dict[str, Any]]]:
    tokens = torch.cat([log_ratio[mask] for log_ratio, mask in log_ratios])
    levels = {"token": tokens} | {
        level: torch.cat([_responses(log_ratio, mask, level) for log_ratio, mask in log_ratios])
        for level in ("sequence", "geometric")
    }
    for level, values in levels.items():
        for threshold in _above_one(values.clamp(-20, 20).exp(), 2.0):
            yield "weight", {_IS: level, f"{_IS}_threshold": threshold}
        yield "weight", {_IS: level, f"{_IS}_mode": "icepop", f"{_IS}_threshold": 2.0}
    if loss != "reinforce":
        yield "weight", {"rollout_correction.bypass_mode": True}
    paper = {_IS: "token", f"{_IS}_threshold": 2.0}
    yield "weight", {**paper, _RS: ["seq_sum_k3"], f"{_RS}_threshold": [PAPER_REJECTION]}


def clipped_share(settings: Settings, log_ratio: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the share of tokens whose weight is outside its bounds, so that it is clipped or becomes 0.

    `log_ratio`: log r_corr, [B, R]."""
    correction, lower = settings.correction, 0.0
    level: Level
    if settings.loss == "tbpo":
        level, upper = "geometric", settings.tbpo.seq_tis_imp_ratio_cap
        lower = 1 / upper
    elif settings.loss == "mis_gspo":
        level, upper = "sequence", settings.mis_imp_ratio_cap
    elif correction.rollout_is is None:
        return 0.0
    else:
        level, upper = correction.rollout_is, correction.rollout_is_threshold
        lower = correction.lower if correction.rollout_is_mode in ("clip", "icepop") else 0.0
    if settings.loss == "tbpo" and upper == 1:
        return 0.0  # there is no weight
    free = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=_NO_BOUND)
    raw = correction_weights(log_ratio, torch.zeros_like(log_ratio), mask, free)
    assert raw is not None
    return float(((raw > upper) | (raw < lower))[mask].double().mean())


def rounded(value: float) -> float:
    """Return `value` with two significant digits, as people write thresholds."""
    return float(f"{value:.2g}")


def _responses(values: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Return the sum (mean with `geometric`) over the tokens of each response that has tokens, FP64 [responses]."""
    filled = mask.any(1)
    sums = values.double().masked_fill(~mask, 0.0).sum(1)[filled]
    return sums / mask.sum(1)[filled] if level == "geometric" else sums


def _above_one(ratios: torch.Tensor, default: float) -> list[float]:
    """Return bounds above 1 for these ratios: `default` and quantiles."""
    return _distinct([*(1 + rounded(x - 1) for x in _quantiles(ratios) if x > 1.0001), default])


def _quantiles(values: torch.Tensor) -> list[float]:
    bounds: list[float] = values.double().quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return bounds


def _distinct(values: Iterable[float]) -> list[float]:
    return sorted({round(value, 10) for value in values})


def check_memory(config: Config, batches: int) -> None:
    """Raise UserError if the comparison may need more memory than is free. `config`: that of its `exact` trainer."""
    size = ModelSize.from_config(load_hf_config(config.model.path, config.model.trust_remote_code))
    needed, free = needed_memory(size, config, batches), available_memory()
    if needed > free:
        raise UserError(
            f"comparing {batches} batches may need {readable(needed)} of memory, but only {readable(free)} are free",
            where="qarl diagnose calibrate: host memory",
            why="whole gradients in FP32 are stored for every batch and every candidate",
            fix="choose a smaller model or a machine with more memory, or lower batches: at least four are needed, and "
            f"each takes {readable(10 * size.parameters)}",
        )


def needed_memory(size: ModelSize, config: Config, batches: int) -> int:
    """Return the largest number of bytes. The module's docstring has the arithmetic."""
    plan = estimate(size, config, device="cpu", align="exact")
    engine = [*terms.engine(size, config, "cpu", 0)[0], *terms.kept(size, config, "cpu")]
    other_policy = terms.low_bit(size, config, "exact", {})
    run = plan.total("update") - sum(part.bytes for part in engine) + sum(part.bytes for part in other_policy)
    tried = MOST_CAPS if config.actor.loss in ("tbpo", "mis_gspo") else MOST_WEIGHTS
    gradients = 3 * tried + len(BAND_FACTORS) + len(LEVELS) + 1
    return run + size.parameters * (2 + 4 * gradients + 10 * batches + 2)
