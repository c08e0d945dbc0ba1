"""The report of `qarl.diagnose.calibrate` as text: two Markdown tables and a sentence for each kind of correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = (
    "| tried | cosine | relative error | error of the mean | closer in | responses without gradient | clipped weights |"
)


def as_text(report: Mapping[str, Any]) -> str:
    """Return the printed report."""
    lines = [
        f"\n{report['scheme']}, actor.loss={report['loss']}, {report['model']}: {report['batches']} batches, "
        f"{report['responses']} responses, {report['tokens']} tokens",
        f"mean |δ| at off {report['mismatch_abs_mean_at_off']:.3g}; max |δ| at exact "
        f"{report['mismatch_abs_max_at_exact']:.3g}",
        f"cosine between the exact gradients of two batches: {_spread(report['between_batches'])}",
        *(["the KL term of actor.use_kl_loss is left out"] if report["kl_term_left_out"] else []),
        "\nCorrections of quant.align=off, and alignment instead of a correction, against the gradient of exact:\n",
        *_table(report["corrections"]),
    ]
    if report["bands"]:
        lines += ["\nBands at off, after one update, against exact with the configured bands:\n"]
        lines += _table(report["bands"])
    else:
        lines += ["\nNo bands: the objective has none, or every step has one update."]
    lines += ["", *(_sentence(kind, row) for kind, row in report["best"].items())]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [_HEAD, "|---" * _HEAD.count(" |") + "|"]
    for row in rows:
        cells = [
            row["name"],
            _spread(row["cosine"]),
            _spread(row["relative_error"]),
            f"{row['relative_error_of_the_mean_gradient']:.3f}",
            "" if row["kind"] == "base" else f"{row['closer_in_batches']} of {row['batches']}",
            f"{row['responses_without_gradient']:.1%}",
            f"{row['tokens_with_clipped_weight']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _sentence(kind: str, row: Mapping[str, Any]) -> str:
    gain = row["cosine_gain"]
    verdict = "closer to exact than none" if row["beyond_noise"] else "not closer to exact than none, beyond the noise"
    if kind == "band":
        verdict = verdict.replace("none", "the configured one")
    return (
        f"best {kind}: {row['keys']} ({verdict}: cosine {gain['mean']:+.5f} ± {gain['std']:.5f}; "
        f"{row['responses_without_gradient']:.1%} of the responses have no gradient, "
        f"{row['tokens_with_clipped_weight']:.1%} of the weights are clipped)"
    )


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.4f} ± {value['std']:.4f}"
