"""Run a script or a module with the kernels of a CPU without AMX, on a CPU that has it.

    python scripts/without_amx.py scripts/old_log_probs_cost.py --schemes w8a8
    python scripts/without_amx.py -m qarl.train config=quickstart.yaml

vLLM asks `torch.cpu._is_amx_tile_supported` which kernels to choose; neither has a setting for it, so its answer is
replaced in this process. oneDNN reads `ONEDNN_MAX_CPU_ISA`. Processes that the script starts keep AMX in vLLM.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # oneDNN reads it once, so it comes before the import

import torch


def main() -> None:
    if len(sys.argv) < 2 or (sys.argv[1] == "-m" and len(sys.argv) < 3):
        sys.exit(f"usage: {sys.argv[0]} [-m] SCRIPT_OR_MODULE [ARGUMENT ...]")
    torch.cpu._is_amx_tile_supported = lambda: False
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
