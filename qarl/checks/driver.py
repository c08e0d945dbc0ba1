"""Checks the machine beside a GPU: the NVIDIA driver, and what Triton needs to compile.

The driver must run the CUDA release that PyTorch is built with.

With a driver that is too old, `torch.cuda.is_available()` is false, and PyTorch only warns. The run would then start
on the CPU, where vLLM's GPU build cannot run. With NVIDIA's package cuda-compat, an old driver can run a newer CUDA on
data-center GPUs. PyTorch then sees the GPU, and nothing is refused here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from qarl.errors import UserError

VERSION_FILE = Path("/proc/driver/nvidia/version")
"""NVIDIA's kernel module writes its version here. Windows and WSL do not have the file."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""CUDA's major release -> the oldest branch of NVIDIA's Linux driver that runs it (CUDA's release notes, table "CUDA
Toolkit and minimum required driver versions")."""


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, for example 580.65.06, or None if there is none."""
    try:
        text = VERSION_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\b(\d{3,}(?:\.\d+)+)", text, re.MULTILINE)
    return found[1] if found else None


def check_driver() -> None:
    """Raise UserError if PyTorch sees no GPU because the NVIDIA driver of this machine is too old for it."""
    driver, cuda = driver_version(), torch.version.cuda
    if driver is None or cuda is None or torch.cuda.is_available():
        return
    needed = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) >= needed:
        return
    raise UserError(
        f"the NVIDIA driver {driver} is too old for PyTorch, which is built with CUDA {cuda}",
        where=str(VERSION_FILE),
        why=f"CUDA {cuda} needs driver {needed} (R{needed}) or newer; with this driver PyTorch sees no GPU",
        fix=f"install NVIDIA driver R{needed} or newer, or NVIDIA's cuda-compat package on a data-center GPU",
    )


def check_compiler() -> None:
    """Raise UserError if Triton cannot compile its launcher on this GPU machine.

    Triton builds a small C module for each kernel (triton/runtime/build.py). It needs a C compiler and Python's
    headers, which many images of CUDA lack."""
    if not torch.cuda.is_available():
        return
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, for packages; its Python has the headers where Triton looks
        scheme = "posix_prefix"
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    lacking = [] if header.is_file() else [f"Python's headers ({header})"]
    lacking += [] if compiler else ["a C compiler (gcc or clang)"]
    if lacking:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise UserError(
            f"Triton lacks {' and '.join(lacking)}",
            where="this machine",
            why="vLLM and QaRL run Triton kernels on GPUs, and Triton compiles a C module for each of them",
            fix=f"install the packages {python}-dev and gcc (Debian, Ubuntu) or {python}-devel and gcc (Fedora), or "
            "use a Python that has its headers",
        )
