"""QaRL's plugin for vLLM. vLLM loads it in each of its processes through the entry point `vllm.general_plugins`.

On a CPU, the plugin adds four things that vLLM lacks:

- W4A16, W8A8 and FP8 experts, in the format of compressed-tensors. They are multiplied by the same function as in the
  trainer (`qarl.kernels.cpu.vllm_experts`).
- Correct BF16 experts after a reload of weights. vLLM alone returns wrong outputs.
- The routing: the experts that each token was sent to.
- With AMX, BF16 linears whose rows do not depend on the rows beside them (`cpu_bf16_linears.py`).

On a GPU, it adds what an engine uses only if the trainer follows its operators (`quant.align=model`): QaRL's own norms,
vLLM's attention with one order over the keys (`cuda_operators.py`), vLLM's FP8 linears with a least number of rows
(`cuda_linears.py`), a router whose logits do not depend on the other tokens, and FP8 experts with a least number of
pairs of token and expert (`cuda_experts.py`). vLLM's own backends serve experts there, or QaRL's kernel if
`quant.kernels` asks for it.

On every device, the plugin also registers two things:

- QaRL's own linear kernels, which an engine uses only if `quant.kernels` asks for them (`own_linears.py`).
- The transfer engine `qarl`, which receives publishes from another process or host
  (`qarl.rollout.remote.vllm_transfer`).

These modules have the classes that are registered. Nothing is patched, because vLLM has a registry for each class.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from contextlib import suppress
from typing import Any

from qarl.errors import UserError
from qarl.plugins import load_plugins_of_parent
from qarl.schemes.kernel_choice import KernelChoice
from qarl.vllm_versions import transfer_factories

ENTRY_POINT = "qarl"
"""The plugin's name in `vllm.general_plugins`. The environment variable VLLM_PLUGINS uses the same name."""
_TRANSFER_MODULE = "qarl.rollout.remote.vllm_transfer"
_TRANSFER_CLASSES = ("QaRLTransferEngine", "QaRLTrainerTransfer")
_CALLED = "vLLM has not called it"
_why_not: dict[str, str | None] = {
    "own_linears": _CALLED,
    "cuda_linears": _CALLED,
    "cuda_operators": _CALLED,
    "cuda_experts": _CALLED,
    "cpu_experts": _CALLED,
    "cpu_bf16_linears": _CALLED,
}
"""Module of the plugin -> why its classes are not registered in this process, or None if they are or are not needed."""


def register() -> None:
    """Register the plugin's classes. vLLM calls this in each of its processes, in some of them more than once. This
    never raises, because an unsupported version of vLLM can still serve dense models."""
    from vllm.platforms import current_platform

    with suppress(UserError):  # the process of the trainer has raised it already
        load_plugins_of_parent()
    for factory, name in zip(transfer_factories(), _TRANSFER_CLASSES, strict=False):
        with suppress(ValueError):  # registered already
            factory.register_engine(ENTRY_POINT, _TRANSFER_MODULE, name)
    for module, why_not in _why_not.items():
        if why_not is None:
            continue
        try:
            if _serves(module, current_platform):
                importlib.import_module(f"{__name__}.{module}").register()
            _why_not[module] = None
        except (ImportError, AttributeError, TypeError, AssertionError) as error:
            _why_not[module] = (
                f"the plugin does not support this version of vLLM: {type(error).__name__}: {error}"
            )


def _serves(module: str, platform: Any) -> bool:
    """Return whether a module of the plugin is for vLLM's platform here."""
    device = module.partition("_")[0]
    return {"cpu": platform.is_cpu(), "cuda": platform.is_cuda()}.get(device, True)


def check_linears_loaded(kernels: KernelChoice) -> None:
    """Raise UserError if `quant.kernels` asks for QaRL's own kernels and they are not registered in this process."""
    if not kernels.by_engine and _loaded("own_linears") is not None:
        raise _error(
            "own_linears", "vLLM runs without QaRL's linear kernels", f"quant.kernels={kernels}, "
        )


def check_operators_loaded() -> None:
    """Raise UserError if the operators that the trainer follows at level `model` on a GPU are not registered."""
    for module in ("cuda_operators", "cuda_linears"):
        if _loaded(module) is not None:
            what = "vLLM runs without QaRL's operators for GPUs"
            raise _error(module, what, "quant.align=model on a GPU, ")


def check_loaded(hf_config: Any, *, own_experts: bool = False) -> None:
    """Raise UserError if an engine here needs a part of the plugin that is not registered in this process.

    `own_experts`: whether it is asked for QaRL's kernels, or the trainer follows its arithmetic."""
    for module in _needed(hf_config, own_experts=own_experts):
        if _loaded(module) is not None:
            raise not_loaded(module)


def _needed(hf_config: Any, *, own_experts: bool = False) -> list[str]:
    """Return the modules of the plugin that an engine for `hf_config` needs here, if they are for its device."""
    import torch

    experts = ["cpu_experts"] if experts_of(hf_config) else []
    if experts and own_experts:
        experts.append("cuda_experts")
    amx = torch.cpu._is_amx_tile_supported() and not torch.cuda.is_available()
    return experts + (["cpu_bf16_linears"] if amx else [])


def _loaded(module: str) -> str | None:
    """Let vLLM load its plugins into this process. Return why `module` is not registered, or None if it is."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return _why_not[module]


def check_installed(hf_config: Any) -> None:
    """Raise UserError if the model needs the plugin and vLLM would not find it. Call this only for runs on a CPU. It
    does not import vLLM."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    needed = _needed(hf_config)
    if needed and (_left_out() or not any(point.value.startswith(__name__) for point in points)):
        raise not_loaded(needed[0])


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


def not_loaded(module: str = "cpu_experts") -> UserError:
    """Return the error for an engine on a CPU that would start without a module of the plugin that it needs."""
    reason = {
        "cpu_experts": "the model is a mixture of experts",
        "cuda_experts": "the trainer multiplies and routes as QaRL's experts in vLLM do",
        "cpu_bf16_linears": "this CPU has AMX, on which vLLM's log-probs depend on the number of responses that run",
    }
    return _error(module, f"{reason[module]}, but vLLM runs without QaRL's plugin")


def _error(module: str, what: str, where: str = "") -> UserError:
    why = _why_not[module] or _CALLED
    fix = "install the vLLM that requirements/ locks"
    if why == _CALLED and _left_out():
        why = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves it out"
        fix = f"add {ENTRY_POINT} to VLLM_PLUGINS, or unset it"
    elif why == _CALLED:
        why = "this installation of qarl has no entry point in vllm.general_plugins"
        fix = "install qarl again with pip"
    return UserError(
        what, where=f"{where}entry point {ENTRY_POINT} of vllm.general_plugins", why=why, fix=fix
    )


def experts_of(hf_config: Any) -> int:
    """Return the number of experts per layer, or 0 for a dense model. vLLM reads the same config keys."""
    text = getattr(hf_config, "text_config", None) or hf_config
    names = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
    return next(
        (count for name in names if isinstance(count := getattr(text, name, None), int) and count),
        0,
    )
