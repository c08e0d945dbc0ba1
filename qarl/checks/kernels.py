"""Checks whether the kernels that `quant.kernels` asks for can multiply the run's layers on this machine."""

from __future__ import annotations

import os
from typing import Any

import torch

from qarl.config import Config
from qarl.errors import UserError
from qarl.kernels.registry import kernels_of
from qarl.quant.convert import no_own_experts
from qarl.rollout.engine_config import W4A8_ON_GPUS, check_served
from qarl.rollout.vllm_plugin import experts_of

_LAYER = (64, 64)
"""A shape [N, K] that every kernel supports."""


def check_scheme(config: Config, device: str, capability: int | None) -> None:
    """Raise UserError if the engine would not multiply by `quant.scheme` on such a machine. `capability`: of a GPU."""
    check_served(config.quant.scheme, config.quant.kernels)
    if device == "cuda" and capability is not None:
        check_capability(config.quant.scheme, config.quant.kernels, capability)


def check_kernels(config: Config, device: str, *, here: bool) -> None:
    """Raise UserError if `quant.kernels` asks for kernels that do not run on `device`. `here`: whether that is this
    machine; what other GPUs lack is not known."""
    scheme, kernels = config.quant.scheme, config.quant.kernels
    if device == "cuda" and kernels == "qarl" and scheme == "w4a8":
        raise _no_kernel(config, "GPUs", f"QaRL's kernel for int8 activations runs only on a CPU; {W4A8_ON_GPUS}")
    if device == "cuda" and kernels == "dequantized":
        raise _no_kernel(config, "GPUs", "these kernels run only on a CPU")
    if kernels == "engine" or not here:
        return
    kind = torch.device(device)
    why_not = {kernel.name: kernel.unavailable(scheme, kind, _LAYER) for kernel in kernels_of(kernels, scheme)}
    if None not in why_not.values():
        reasons = [f"{name} {why}" for name, why in why_not.items()]
        if device == "cpu" and scheme != "w4a8":
            reasons.append("on a CPU, vLLM's own kernels already give the same bits for any number of rows")
        raise _no_kernel(config, "this machine", "; ".join(reasons) or "there is no such kernel")


def _no_kernel(config: Config, place: str, why: str) -> UserError:
    scheme = config.quant.scheme
    return UserError(
        f"quant.kernels={config.quant.kernels} does not support quant.scheme={scheme} on {place}",
        where="quant.kernels",
        why=why,
        fix="set quant.scheme=w4a16, w8a8 or fp8" if scheme == "w4a8" else "set quant.kernels=engine",
    )


def check_this_gpu(scheme: str, kernels: str) -> None:
    """Raise UserError if the GPU of this process is too old or too new for `scheme` (`check_capability`). Do nothing
    without a GPU."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    check_capability(scheme, kernels, 10 * major + minor)


def check_capability(scheme: str, kernels: str, capability: int) -> None:
    """Raise UserError if vLLM would compute another scheme on this GPU, or choose a kernel that the GPU does not run.
    `capability`: times ten.

    For W8A8 vLLM chooses CUTLASS on any GPU from 8.0 on, but its int8 products end with 9.0 (vLLM 0.24.0,
    csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c3x_sm100.cu and _sm120.cu)."""
    if scheme == "fp8" and capability < 89:
        raise UserError(
            f"compute capability {capability / 10} is too low for quant.scheme=fp8",
            where="quant.scheme=fp8",
            why="8.9 is needed for FP8 products; on older GPUs vLLM leaves the activations in BF16 without a warning",
            fix="set quant.scheme=w4a16, or use a newer GPU",
        )
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")  # then vLLM chooses another kernel
    cutlass = kernels == "engine" and "CutlassInt8ScaledMMLinearKernel" not in disabled
    if scheme == "w8a8" and cutlass and capability >= 100:
        raise UserError(
            f"vLLM has no int8 products for compute capability {capability / 10}",
            where="quant.scheme=w8a8",
            why="vLLM's CUTLASS kernels support int8 only up to capability 9.0, and fail at start",
            fix="set quant.scheme=fp8, or with backend=local and a dense model set quant.kernels=qarl",
        )


def check_int8_experts(config: Config, hf_config: Any) -> None:
    """Raise UserError for a mixture of experts in W8A8 on GPUs. vLLM 0.24, which requirements/gpu.lock has, chooses
    `TritonExperts`, whose `apply` refuses the int8 rows that it is given. (vLLM 0.29 takes them.)"""
    if config.quant.scheme == "w8a8" and experts_of(hf_config):
        raise UserError(
            "vLLM has no int8 products for experts on GPUs",
            where=f"quant.scheme=w8a8 with {config.model.path}",
            why="vLLM 0.24 runs them with TritonExperts, which refuses int8 activations as the engine starts",
            fix="set quant.scheme=fp8 or quant.scheme=w4a16",
        )


def check_dense(config: Config, hf_config: Any) -> None:
    """Raise UserError for a mixture of experts with QaRL's own kernels."""
    if config.quant.kernels != "engine" and experts_of(hf_config):
        raise no_own_experts(config.quant.kernels, f"quant.kernels with {config.model.path}")
