"""The paper's claim in one table: how far trainer and rollout engine drift apart, with and without alignment.

    python scripts/compare_alignment.py        three runs of the quickstart, a table, a plot
    python scripts/compare_alignment.py --variants bf16-off w4a16-off w4a16-model --set trainer.total_training_steps=50
    python scripts/compare_alignment.py --config quickstart_moe.yaml --variants w4a16-off w4a16-off-own w4a16-model
    python scripts/compare_alignment.py --seeds 0 1 2 --variants w4a16-linears w4a16-linears-paper-bands

Each run is `python -m qarl.train config=quickstart.yaml` in a separate process. The runs differ in the named keys
alone. For a mixture of experts `off` and `linears` replay the rollout's routing, and with `-own` they do not. The
endings `-qarl` and `-dequantized` are values of quant.kernels. Figures are means over all steps of a run, then over
seeds. The runs, `table.md`, `results.json` and plots are written to `--output`. The exit code is 1 if alignment misses
its limits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checkpoint.json_file import write_json
from qarl.config.quant import ROLLOUT_SCHEMES as SCHEMES
from qarl.metrics.plots import plot_compare

LEVELS = ("off", "linears", "model", "exact")
PAPER_BANDS = [
    "actor.seq_clip_ratio_high=4e-4",
    "actor.seq_clip_ratio_low=3e-4",
    "actor.neg_seq_clip_ratio_low=3e-4",
    "actor.neg_seq_clip_ratio_high=7e-4",
]
# Without quantization there are no linears to align: bf16-off is the plain BF16 run.
VARIANTS: dict[str, list[str]] = {
    f"{scheme}-{level}": [f"quant.scheme={scheme}", f"quant.align={level}"] for scheme in SCHEMES for level in LEVELS
}
VARIANTS |= {
    f"{scheme}-{level}-own": [*VARIANTS[f"{scheme}-{level}"], "rollout.router_replay=off"]
    for scheme in SCHEMES
    for level in ("off", "linears")
}
VARIANTS |= {
    f"{scheme}-{level}-{kernels}": [f"quant.scheme={scheme}", f"quant.align={level}", f"quant.kernels={kernels}"]
    for scheme, kernels in (("w4a8", "qarl"), ("w4a16", "dequantized"))
    for level in LEVELS
} | {"w4a16-linears-paper-bands": ["quant.align=linears", *PAPER_BANDS]}
COLUMNS = {
    "k3 KL": ("mismatch_k3_mean", "{:.2e}"),
    "mean \\|δ\\|": ("mismatch_abs_mean", "{:.2e}"),
    "max \\|δ\\|": ("mismatch_abs_max", "{:.2g}"),
    "other experts": ("other_experts_frac_mean", "{:.2%}"),
    "accuracy before": ("accuracy_before", "{:.1%}"),
    "after": ("accuracy_after", "{:.1%}"),
    "inside band": ("inside_band_frac_after_first_mean", "{:.0%}"),
    "s/step": ("seconds_per_step", "{:.2f}"),
    "publish s": ("publish_seconds_per_step", "{:.3f}"),
}


def run(config: str, variant: str, seed: int, overrides: Sequence[str], output: Path) -> dict[str, Any]:
    """One training run; its summary."""
    name = f"{variant}-seed{seed}"
    command = [sys.executable, "-m", "qarl.train", f"config={config}", f"name={name}", f"seed={seed}"]
    command += [f"output_dir={output}", *VARIANTS[variant], *overrides]
    print(f"--- {name}: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((output / name / "summary.json").read_text())
    if summary["quant_align"] != (level := variant.split("-")[1]):
        raise SystemExit(f"{name} ran at level {summary['quant_align']}, not {level}: see what it printed at its start")
    return summary


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a variant, means over its seeds, and each k3 KL as a multiple of bf16's."""
    rows = ["| run | seeds | " + " | ".join(COLUMNS) + " | k3 to bf16's |", "|---" * (len(COLUMNS) + 3) + "|"]
    reference = mean(results["bf16-off"], "mismatch_k3_mean") if "bf16-off" in results else None
    for variant, summaries in results.items():
        cells = [variant, str(len(summaries))]
        for key, form in COLUMNS.values():
            value = mean(summaries, key)
            cells.append("" if value is None else form.format(value) + spread(summaries, key, form))
        k3 = mean(summaries, "mismatch_k3_mean")
        cells.append(f"{k3 / reference:.2f}" if k3 is not None and reference else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def verdict(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The limits that each level has to keep, each with what was measured; a line starts with PASS or FAIL."""
    limits = [
        ("w4a16-linears", "mismatch_k3_mean", "bf16-off", 1.5),
        ("w4a16-linears", "mismatch_k3_mean", "w4a16-off", 0.1),
        *((f"{scheme}-model", "mismatch_abs_mean", "bf16-off", 1 / 20) for scheme in SCHEMES if scheme != "bf16"),
    ]
    lines = []
    for variant, key, other, limit in limits:
        if variant in results and not (reference := mean(results.get(other, []), key)):
            lines.append(f"not judged: {variant} against {other}, which did not run")
        elif variant in results and reference:
            share = (mean(results[variant], key) or 0.0) / reference
            outcome = "PASS" if share <= limit else "FAIL"
            lines.append(f"{outcome}: {variant}: {key} is {share:.3g} of {other}'s, at most {limit:.3g} is wanted")
    for scheme in SCHEMES:
        if scheme != "bf16" and (variant := f"{scheme}-exact") in results:
            largest = max(summary["mismatch_abs_max"] for summary in results[variant])
            lines.append(f"{'FAIL' if largest else 'PASS'}: {variant}: max |δ| is {largest:.3g}, 0 is wanted")
    return lines


def spread(summaries: Sequence[dict[str, Any]], key: str, form: str) -> str:
    """Lowest and highest over the seeds, if there are several."""
    values = [summary[key] for summary in summaries if summary.get(key) is not None]
    return f" ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else ""


def mean(summaries: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [summary[key] for summary in summaries if summary.get(key) is not None]
    return statistics.fmean(values) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16-off", "w4a16-off", "w4a16-linears"])
    parser.add_argument("--config", default="quickstart.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/compare_alignment"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for every run")
    args = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {}
    for variant in args.variants:
        for seed in args.seeds:
            results.setdefault(variant, []).append(run(args.config, variant, seed, args.set, args.output))
            text = "\n".join([table(results), "", *verdict(results)])
            (args.output / "table.md").write_text(text + "\n")
            versions = json.loads((args.output / f"{variant}-seed{seed}" / "versions.json").read_text())
            write_json(
                args.output / "results.json",
                {"config": args.config, "set": args.set, "versions": versions, "runs": results},
            )
    plot_compare([args.output / f"{v}-seed{args.seeds[0]}" for v in args.variants], args.output / "plots")
    print(text)
    return 1 if "FAIL" in text else 0


if __name__ == "__main__":
    sys.exit(main())
