"""QaRL's plugin for vLLM. vLLM loads it in each of its processes through the entry point `vllm.general_plugins`.

On a CPU, the plugin adds three things that vLLM 0.29 lacks:

- W4A16, W8A8 and FP8 experts, in the format of compressed-tensors. They are multiplied by the same function as in the
  trainer (`qarl.kernels.experts.cpu`).
- Correct BF16 experts after a reload of weights. vLLM alone returns wrong outputs.
- The routing: the experts that each token was sent to.

On other devices, vLLM's own backends serve experts.

On every device, the plugin also registers two things:

- QaRL's own linear kernels, which an engine uses only if `quant.kernels` asks for them (`linears.py`).
- The transfer engine `qarl`, which receives publishes from another process or host (`transfer.py`).

`cpu_experts.py`, `linears.py` and `transfer.py` have the classes that are registered. Nothing is patched, because vLLM
has a registry for each class.
"""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from typing import Any

from qarl.errors import UserError
from qarl.vllm_versions.differences import transfer_factories

ENTRY_POINT = "qarl"
"""The plugin's name in `vllm.general_plugins`. The environment variable VLLM_PLUGINS uses the same name."""
_CALLED = "vLLM has not called it"
_why_not: str | None = _CALLED
"""The reason why the plugin is not registered in this process, or None if it is registered or not needed."""
_no_linears: str | None = _CALLED
"""The reason why the plugin's linear kernels are not registered in this process, or None if they are."""


def register() -> None:
    """Register the plugin's classes. vLLM calls this in each of its processes, in some of them more than once. This
    never raises, because an unsupported version of vLLM can still serve dense models."""
    global _why_not
    _register_transfer()
    _register_linears()
    if _why_not is None:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        _why_not = None
        return
    try:
        from qarl.rollout.vllm_plugin import cpu_experts

        _why_not = cpu_experts.register()
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        _why_not = f"the plugin does not support this version of vLLM: {type(error).__name__}: {error}"


def _register_transfer() -> None:
    """Register the transfer engine `qarl` (`transfer.py`), unless it is registered or this vLLM cannot use it."""
    factories = transfer_factories()
    if factories is None:
        return
    of_engines, of_trainers = factories
    module = f"{__name__}.transfer"
    with suppress(ValueError):  # registered already
        of_engines.register_engine(ENTRY_POINT, module, "QaRLTransferEngine")
        of_trainers.register_engine(ENTRY_POINT, module, "QaRLTrainerTransfer")


def _register_linears() -> None:
    """Register QaRL's linear kernels, once per process."""
    global _no_linears
    if _no_linears is None:
        return
    try:
        from qarl.rollout.vllm_plugin import linears

        linears.register()
        _no_linears = None
    except (ImportError, AttributeError, TypeError) as error:
        _no_linears = f"the plugin does not support this version of vLLM: {type(error).__name__}: {error}"


def check_linears_loaded(kernels: str) -> None:
    """Raise UserError if `quant.kernels` asks for QaRL's own kernels and they are not registered in this process."""
    if kernels == "engine":
        return
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if _no_linears is not None:
        why, fix = _reason(_no_linears)
        raise UserError(
            "vLLM runs without QaRL's linear kernels",
            where=f"quant.kernels={kernels}, entry point {ENTRY_POINT} of vllm.general_plugins",
            why=why,
            fix=fix,
        )


def check_loaded(hf_config: Any) -> None:
    """Raise UserError if `hf_config` is a mixture of experts and the plugin is not registered in this process."""
    if not experts_of(hf_config):
        return
    if why_not_registered() is not None:
        raise not_loaded()


def why_not_registered() -> str | None:
    """Let vLLM load its plugins into this process. Return why QaRL's is not registered for experts, or None if it is or
    is not needed here."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return _why_not


def check_installed(hf_config: Any) -> None:
    """Raise UserError if `hf_config` is a mixture of experts and vLLM would not find the plugin. Call this only for
    runs on a CPU. It does not import vLLM."""
    if not experts_of(hf_config):
        return
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if _left_out() or not any(point.value.startswith(__name__) for point in points):
        raise not_loaded()


def check_eager(hf_config: Any, enforce_eager: bool) -> None:
    """Raise UserError if vLLM would compile a mixture of experts on a CPU."""
    if enforce_eager or not experts_of(hf_config):
        return
    raise UserError(
        "vLLM cannot compile a mixture of experts on a CPU",
        where="rollout.enforce_eager=false",
        why="the number of tokens per expert depends on the data, so torch.compile fails and vLLM does not start",
        fix="set rollout.enforce_eager=true",
    )


def _left_out() -> bool:
    """Return whether the environment variable VLLM_PLUGINS excludes the plugin."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and ENTRY_POINT not in allowed.split(",")


def _reason(why_not: str) -> tuple[str, str]:
    """Return why the plugin, or a part of it, is not registered (`why_not`) in plain words, and what to do."""
    if why_not is not _CALLED:
        return why_not, "install the vLLM that requirements/ locks"
    if _left_out():
        allowed = os.environ["VLLM_PLUGINS"]
        return f"VLLM_PLUGINS={allowed} leaves it out", f"add {ENTRY_POINT} to VLLM_PLUGINS, or unset it"
    return "this installation of qarl has no entry point in vllm.general_plugins", "install qarl again with pip"


def not_loaded() -> UserError:
    """Return the error for an engine that would serve experts without the plugin."""
    why, fix = _reason(_why_not or _CALLED)
    return UserError(
        "the model is a mixture of experts, but vLLM runs without QaRL's plugin",
        where=f"entry point {ENTRY_POINT} of vllm.general_plugins",
        why=f"{why}; on a CPU vLLM alone cannot serve low-bit experts, and its BF16 experts are wrong after a publish",
        fix=fix,
    )


def experts_of(hf_config: Any) -> int:
    """Return the number of experts per layer, or 0 for a dense model. vLLM reads the same config keys."""
    text = getattr(hf_config, "text_config", None) or hf_config
    for name in ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"):
        count = getattr(text, name, None)
        if isinstance(count, int) and count:
            return count
    return 0
