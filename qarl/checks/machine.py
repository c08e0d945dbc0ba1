"""Checks whether vLLM is installed and has a device, whether this CPU can run the config, and reads the free memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch

from qarl.config import Config
from qarl.errors import UserError
from qarl.process import runs_on_cpu, vllm_missing, vllm_without_device

W4A16_CPU_FLAGS = ("avx512f", "avx512_vnni")
CPU_FLAGS = {
    "w4a16": (W4A16_CPU_FLAGS, "vLLM's W4A16 kernel for CPUs needs AVX512 with VNNI"),
    "w4a8": (("avx512_vnni",), "without VNNI the int8 products of PyTorch are not exact"),
    "w8a8": (("avx512_vnni",), "without VNNI the int8 products of vLLM and PyTorch are not exact and not equal"),
}
"""Schemes that only some CPUs can run: name -> (the instruction sets that it needs, the reason)."""


def check_engine_installed() -> None:
    if vllm_missing():
        raise UserError(
            "vLLM, which makes the rollouts, is not installed",
            where=f"the Python environment {sys.prefix}",
            fix="run `make setup` (requirements/cpu.lock), or `make setup STACK=gpu` for GPUs",
        )


def check_engine_device(config: Config) -> None:
    """Raise UserError if the rollouts of this run would be on a CPU, and the installed vLLM has no CPU backend."""
    if runs_on_cpu(config.backend) and (why := vllm_without_device()):
        raise UserError(
            "the installed vLLM finds no device to run on",
            where=f"the Python environment {sys.prefix}",
            why=why,
            fix="run on a machine whose GPU torch sees (torch.cuda.is_available()), or install the CPU stack in "
            "another environment: make setup STACK=cpu VENV=.venv-cpu; if Ray's GPUs are on other machines "
            "(backend=verl), set VERL_PLATFORM=nvidia",
        )


def cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU, as Linux names them. The set is empty on ARM and without Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def check_cpu(config: Config) -> None:
    """Raise UserError if the rollouts of this run would be on a CPU that cannot make them with `quant.scheme`."""
    scheme, kernels = config.quant.scheme, config.quant.kernels
    if not runs_on_cpu(config.backend):
        return
    if scheme == "w4a8" and kernels == "engine":
        raise UserError(
            "vLLM does not run w4a8 on a CPU",
            where="quant.scheme",
            why="vLLM would load the weights, but run its W4A16 kernel with BF16 activations, without a warning",
            fix="set quant.kernels=qarl (dense models, backend=local), or quant.scheme=w4a16 or quant.scheme=w8a8",
        )
    if kernels == "dequantized":  # a BF16 product, which every CPU has
        return
    if scheme == "w4a16" and torch.cpu._is_amx_tile_supported() and os.environ.get("VLLM_CPU_INT4_W4A8", "0") != "0":
        raise UserError(
            "VLLM_CPU_INT4_W4A8 is set, and this CPU has AMX",
            where="quant.scheme=w4a16",
            why="vLLM would round the activations to int8 and multiply integers, but the trainer would not",
            fix="unset VLLM_CPU_INT4_W4A8, so that QaRL sets it to 0",
        )
    needed, why = CPU_FLAGS.get(scheme, ((), ""))
    if missing := [flag for flag in needed if flag not in (flags := cpu_flags())]:
        raise UserError(
            f"this CPU cannot run quant.scheme={scheme}: it lacks {' and '.join(missing)}",
            where="quant.scheme",
            why=why + ("" if flags else "; /proc/cpuinfo lists no flags here, perhaps because the CPU is not x86"),
            fix="set quant.scheme=bf16, or use a GPU or a newer CPU (Intel since Ice Lake, AMD since Zen 4)",
        )


def available_memory() -> int:
    """Return the free bytes of this machine, or those of this process's container if they are fewer."""
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # without a limit the file holds the word max
        return free
    return min(free, limit - used)
