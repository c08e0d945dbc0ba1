"""Format results of `qarl.bench kernels` as lines of text, and its JSON as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qarl.bench import report

Entry = Mapping[str, Any]


def line(place: str, entry: Entry) -> str:
    """Return one result as a line of text: median (minimum-maximum), and the shares of this machine's peak rates."""
    seconds = entry["seconds"]
    speed = ""
    if entry["tflop_per_s"]:
        speed = f"{entry['tflop_per_s']:8.2f} TFLOP/s ({entry['share_of_bf16_product']:.0%})"
    ratio = f"{entry['speedup']:6.2f}x" if entry["speedup"] else ""
    times = f"{seconds['median'] * 1e6:.1f} ({seconds['minimum'] * 1e6:.1f}-{seconds['maximum'] * 1e6:.1f}) us"
    return (
        f"{place:52} {entry['scheme'] + ' ' + entry['kernel']:34} {times:>32} {speed:22} "
        f"{entry['gb_per_s']:8.1f} GB/s ({entry['share_of_copy']:.0%}) {ratio}"
    )


def markdown(document: Mapping[str, Any]) -> str:
    """Return a Markdown table of relative times per operation and layer: a line per kernel, a column per m."""
    tops = document["ceilings"]
    parts = [
        f"{report.head(document)} Ceilings: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, BF16 product "
        f"{tops['bf16_flop_per_s'] / 1e12:.2f} TFLOP/s. Median times divided by the baseline's (BF16, for quantizers "
        "eager PyTorch); in brackets, the same ratio of the fastest calls."
    ]
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in document["results"]:
        key = (entry["operation"], entry["model"], entry["layer"], entry["n"], entry["k"])
        groups.setdefault(key, []).append(entry)
    for (operation, model, layer, n, k), entries in groups.items():
        parts += [f"**{operation}, {model} {layer} [{n}, {k}]**", _table(entries)]
    parts += [f"Not measured: {name}: {why}" for name, why in document["not_measured"].items()]
    return "\n\n".join(parts) + "\n"


def _table(entries: Sequence[Entry]) -> str:
    columns = sorted({entry["m"] for entry in entries})
    rows = [f"| kernel | {' | '.join(f'M={m}' if m else 'time' for m in columns)} |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for scheme, kernel in dict.fromkeys((entry["scheme"], entry["kernel"]) for entry in entries):
        cells = [_cell(entries, scheme, kernel, m) for m in columns]
        rows.append(f"| {kernel if scheme == 'bf16' else f'{scheme} {kernel}'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(entries: Sequence[Entry], scheme: str, kernel: str, m: int) -> str:
    at = [entry for entry in entries if entry["m"] == m]
    mine = next((entry for entry in at if (entry["scheme"], entry["kernel"]) == (scheme, kernel)), None)
    if mine is None:
        return ""
    base = next((entry for entry in at if f"{entry['scheme']} {entry['kernel']}" == mine["baseline"]), None)
    if base is None or base is mine:
        seconds = mine["seconds"]["median"]
        return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
    median, fastest = (mine["seconds"][key] / base["seconds"][key] for key in ("median", "minimum"))
    return f"{median:.2f} ({fastest:.2f})"
