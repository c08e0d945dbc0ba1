"""The printed report of `qarl diagnose calibrate`, in Markdown: what `calibrate.json` says, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = (
    "| correction | keys | 95% interval | loses | on other prompts | at exact | the paper's loses |"
)
_BAND_HEAD = "| band | keys | 95% interval | outside | on other prompts | the configured one leaves outside |"


def as_text(report: Mapping[str, Any]) -> str:
    """Return the printed report, in Markdown."""
    lines = [
        f"\n{report['scheme']}, actor.loss={report['loss']}, {report['model']}: {report['batches']} batches, "
        f"{report['prompts']} prompts, {report['responses']} responses, {report['tokens']} tokens",
        f"thresholds that lose {report['share']:.1%}; what they cost is measured here, not whether training is better",
    ]
    for level, part in report["levels"].items():
        mismatch = part["mismatch"]
        lines.append(
            f"\nquant.align={level}: mean |δ| {mismatch['abs_mean']:.3g}, largest {mismatch['abs_max']:.3g}, "
            f"K1 {mismatch['k1']:.3g}, K3 {mismatch['k3']:.3g}"
        )
        if not mismatch["abs_max"]:
            lines.append("no mismatch: every ratio is 1, and nothing is to be corrected")
            continue
        lines += ["", *_table(_HEAD, part["thresholds"])]
    bands = report["bands"]
    lines.append("\nTBPO's bands, after the updates of a first step at exact:\n")
    lines += [bands] if isinstance(bands, str) else _table(_BAND_HEAD, bands)
    return "\n".join(lines)


def _table(head: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = head.count("|") - 1
    lines = [head, "|---" * columns + "|"]
    for row in rows:
        name = row["name"]
        if row.get("refused_with_this_loss"):
            name += " (not with this actor.loss)"
        cells = [name]
        if "none" in row:
            cells += [row["none"], "", "", ""]
        else:
            cells.append(" ".join(f"{key}={value}" for key, value in row["keys"].items()))
            # A ratio near 1 needs five digits.
            cells.append(f"{row['low']:.5g} to {row['high']:.5g}")
            cells.append(f"{row['loses']:.1%} of {row['of']}")
            cells.append(f"{row['on_other_prompts']:.1%}")
        if head == _HEAD:
            cells.append("" if "none" in row else f"{row['reference_loses']:.1%}")
        cells.append(_other(row.get("paper") or row.get("configured")))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _other(known: Mapping[str, float] | None) -> str:
    """Return what another threshold loses, with its interval."""
    if known is None:
        return ""
    interval = f"{known['low']:.1%} to {known['high']:.1%}"
    return f"{known['value']:g}: {known['loses']:.1%} ({interval})"
