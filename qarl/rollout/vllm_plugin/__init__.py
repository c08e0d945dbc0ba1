"""QaRL's plugin for vLLM, which serves mixtures of experts on CPUs; vLLM loads it in each of its processes through the
entry point `vllm.general_plugins`.

vLLM 0.29 on a CPU serves BF16 experts only, gets those wrong after any reload of weights, and does not return which
experts a token was sent to. With the plugin it serves W4A16, W8A8 and FP8 experts in the format of compressed-tensors,
by the function that the trainer calls (`qarl.kernels.cpu.experts`), takes new weights exactly, and returns the routing.
On other devices the plugin does nothing: vLLM's own backends serve there.

`internals.py` is the one file that imports vLLM's internals. `experts.py` has the classes that are registered. Nothing
is patched: each class takes its place through a registry that vLLM has for it.
"""

from __future__ import annotations

import os
from typing import Any

from qarl.errors import UserError

ENTRY_POINT = "qarl"
"""The plugin's name in `vllm.general_plugins`, and so in the environment variable VLLM_PLUGINS."""
_CALLED = "vLLM has not called it"
_why_not: str | None = _CALLED
"""Why this process has no plugin; None where it is registered, or where vLLM needs none."""


def register() -> None:
    """Called by vLLM in each of its processes, in some more than once. Raises nothing: a vLLM that has changed still
    serves models without experts."""
    global _why_not
    if _why_not is None:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        _why_not = None
        return
    try:
        from qarl.rollout.vllm_plugin import experts

        _why_not = experts.register()
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        _why_not = f"this vLLM is another than the one it was written for: {type(error).__name__}: {error}"


def check_loaded(hf_config: Any) -> None:
    """UserError where `hf_config` is of a mixture of experts, and vLLM in this process does without the plugin."""
    if not experts_of(hf_config):
        return
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if _why_not is not None:
        raise not_loaded()


def not_loaded() -> UserError:
    """The error of an engine that serves experts without the plugin."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if _why_not is not _CALLED:
        why, fix = _why_not, "install the vLLM that requirements/ locks"
    elif allowed is not None and ENTRY_POINT not in allowed.split(","):
        why, fix = f"VLLM_PLUGINS={allowed} leaves it out", f"add {ENTRY_POINT} to VLLM_PLUGINS, or unset it"
    else:
        why, fix = "this installation of qarl has no entry point in vllm.general_plugins", "install qarl again with pip"
    return UserError(
        "vLLM runs without QaRL's plugin, and the model is a mixture of experts",
        where=f"entry point {ENTRY_POINT} of vllm.general_plugins",
        why=f"{why}; on a CPU vLLM alone serves no low-bit experts, and gets BF16 ones wrong after a publish",
        fix=fix,
    )


def experts_of(hf_config: Any) -> int:
    """How many experts a layer of the model has; 0 where it is dense. The names are those that vLLM reads."""
    text = getattr(hf_config, "text_config", None) or hf_config
    for name in ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"):
        count = getattr(text, name, None)
        if isinstance(count, int) and count:
            return count
    return 0
