"""The first part of scripts/gpu_check.py: what this machine is, and for Qwen3-8B's layers the kernel of every scheme.

    python scripts/gpu_facts.py [--cpu]

Fails if PyTorch sees no GPU. Also says how the GPUs are connected and
how much memory and disk the machine has: the 30B needs 8 GPUs of 80 GB, and 64 GB of disk for random weights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_parts import nvidia

from qarl.bench.model import find_model, linear_shapes
from qarl.bench.report import facts as known_facts
from qarl.errors import UserError
from qarl.kernels.registry import choose_linear_kernel
from qarl.schemes import get_scheme, scheme_names

GIB = 2**30


def main(*, cpu: bool) -> int:
    """Print and report everything. Return the exit code."""
    device = torch.device("cpu" if cpu else "cuda:0")
    if not cpu and not torch.cuda.is_available():
        print("PyTorch sees no GPU; --cpu tries the script without one")
        return 1
    report = known_facts(device)
    report["host_memory_gib"] = round(psutil.virtual_memory().total / GIB, 1)
    report["free_disk_gib"] = round(shutil.disk_usage(".").free / GIB, 1)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report["capability"] = f"{properties.major}.{properties.minor}"
        report["memory_gib"] = round(properties.total_memory / GIB, 1)
        report["multiprocessors"] = properties.multi_processor_count
        report["shared_memory_kib"] = (
            getattr(properties, "shared_memory_per_block_optin", 0) // 1024
        )
        report["driver"] = nvidia(
            "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"
        )
        report["topology"] = nvidia("topo", "-m").splitlines()
        report["attention"] = layer_facts()
    kernels: dict[str, list[str]] = {}
    schemes = [get_scheme(name, 128) for name in scheme_names()]
    for scheme in (scheme for scheme in schemes if scheme.quantized):
        for name, shape in linear_shapes(find_model("Qwen3-8B")).items():
            try:
                reason = choose_linear_kernel(scheme, device, shape).reason
            except UserError as error:
                reason = str(error)
            kernels.setdefault(f"{scheme.name}: {reason}", []).append(name)
    report["linear_kernels"] = kernels
    print(json.dumps(report, indent=1))
    Path(os.environ["QARL_GPU_CHECK_REPORT"]).write_text(json.dumps(report))
    return 0


def layer_facts() -> dict[str, Any]:
    """What level `model` needs: FlashAttention's version, and the reason if an operator cannot be called."""
    from qarl.kernels.cuda import layer_ops

    capability = torch.cuda.get_device_capability()
    facts = {
        "operators": layer_ops.unavailable(),
        "level": layer_ops.attention_unavailable(capability),
    }
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return facts | {"flash_attention": get_flash_attn_version()}
    except Exception as error:
        return facts | {"flash_attention": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main(cpu="--cpu" in sys.argv[1:]))
