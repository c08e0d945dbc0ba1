"""Statistics of how far an update moves tokens, for each class of old probability and each sign of the advantage.

The QaRL paper (arXiv 2604.07853, section 3.2) finds that the error tokens of quantized rollouts are unlikely tokens of
negative samples (figure 4c), and that their ratios have the heaviest tail (figure 5b). These statistics show both in
every run, for the plots of `qarl.metrics.plots`. They are counts, sums and maxima, so they can be combined over
micro-batches and ranks.

Legend: B responses, T token positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qarl.tbpo.token_classes import BINS, CLASSES, SIGNS


def token_statistics(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantage: torch.Tensor, valid: torch.Tensor
) -> dict[str, float]:
    """Return counts, sums and maxima of |log_prob - old_log_prob| for each sign of advantage and class of old_log_prob.

    log_prob, old_log_prob: [B, T]. advantage: [B]; tokens with A = 0 are left out. valid: bool [B, T]."""
    edges = torch.tensor(BINS, dtype=torch.float64, device=valid.device).log()
    kind = torch.bucketize(old_log_prob.detach()[valid].double(), edges)
    moved = (log_prob.detach().double() - old_log_prob.detach().double()).abs()[valid]
    sign = advantage[:, None].expand(valid.shape)[valid]
    found = {}
    for name, chosen in (("pos", sign > 0), ("neg", sign < 0)):
        for index, label in enumerate(CLASSES):
            values = torch.where(chosen & (kind == index), moved, 0.0)
            found[f"sum/tokens/{name}_{label}"] = (chosen & (kind == index)).sum().double()
            found[f"sum/moved/{name}_{label}"] = values.sum()
            found[f"max/moved/{name}_{label}"] = values.max() if values.numel() else values.sum()
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def token_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return metrics from combined statistics of `token_statistics`. A sign without tokens is left out.

    SIGN is pos or neg. CLASS is one of `CLASSES`. A token counts only in the first class that contains it.
        tokens/SIGN_CLASS_frac: share of the tokens of that sign
        tokens/SIGN_CLASS_moved_mean, _moved_max: |log-ratio| of these tokens in nats; left out if there are none
    """
    metrics = {}
    for sign in SIGNS:
        counts = {label: total.get(f"sum/tokens/{sign}_{label}", 0.0) for label in CLASSES}
        everything = sum(counts.values())
        for label, count in counts.items():
            if everything:
                metrics[f"tokens/{sign}_{label}_frac"] = count / everything
            if count:
                metrics[f"tokens/{sign}_{label}_moved_mean"] = total[f"sum/moved/{sign}_{label}"] / count
                metrics[f"tokens/{sign}_{label}_moved_max"] = total[f"max/moved/{sign}_{label}"]
    return metrics
