"""A model that is already quantized, as the frozen base of adapters: what the run's config must say about it.

`quant.scheme`, `quant.group_size` and `quant.ignore` are those of the checkpoint. They are compared and not taken over,
so that a run's config says what is trained. A difference is an error that gives the right keys.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qarl.checkpoint.export_folder import MARK
from qarl.checkpoint.read_weights import newest_checkpoint
from qarl.checks.layers import name_layers
from qarl.checks.model_folder import cannot_load, weight_files
from qarl.config import Config
from qarl.config.ignored_layers import is_ignored
from qarl.config.lora import FOLDER as ADAPTER
from qarl.errors import UserError
from qarl.quant.convert import linear_shapes
from qarl.quant.published import PublishedBase
from qarl.rollout.vllm_plugin import experts_of
from qarl.schemes import Scheme, get_scheme, published_scheme


def quantization_of(hf_config: Any) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a model's config as a mapping, or None if it has none."""
    quantization = getattr(hf_config, "quantization_config", None)
    if not quantization:
        return None
    if isinstance(quantization, Mapping):
        return quantization
    keys: Mapping[str, Any] = quantization.to_dict()
    return keys


def is_quantized(hf_config: Any) -> bool:
    return quantization_of(hf_config) is not None


def check_quantized(config: Config, hf_config: Any) -> None:
    """Raise UserError if the model is already quantized, and cannot be the frozen base of adapters."""
    keys = quantization_of(hf_config)
    if keys is None:
        return
    what = f"the model in {config.model.path!r} is already quantized ({keys.get('quant_method')})"
    where = "model.path: quantization_config in its config.json"
    if not config.lora.r:
        whole = _unquantized(Path(config.model.path))
        fix = f"{whole}; quant.scheme says how training quantizes it"
        if _takes_adapters(config, hf_config, keys):
            fix += ". Or train adapters on this one: lora.r=8"
        raise UserError(
            what,
            where=where,
            why="training updates BF16 master weights and quantizes them itself, and codes have none",
            fix=fix,
        )
    scheme = published_scheme(keys)
    if config.backend == "verl":
        raise UserError(
            what,
            where=where,
            why="verl loads it with transformers, which unpacks the codes",
            fix="set backend=local, or give the original BF16 checkpoint",
        )
    if experts_of(hf_config):
        raise UserError(
            what,
            where=where,
            why="published experts are stored one by one, and their codes are not read",
            fix="give the original BF16 checkpoint",
        )
    _check_scheme(config, scheme)


def _takes_adapters(config: Config, hf_config: Any, keys: Mapping[str, Any]) -> bool:
    """Return whether the quantized model with `keys` could be the base of adapters in this backend."""
    if config.backend == "verl" or experts_of(hf_config):
        return False
    try:
        published_scheme(keys)
    except UserError:
        return False
    return True


def _unquantized(folder: Path) -> str:
    """Return where the weights are from which one can train instead of those of the quantized model in `folder`."""
    run = folder.absolute().parent
    newest = newest_checkpoint(run) if (folder / MARK).is_file() else None
    if newest is None or (folder / ADAPTER).is_dir():
        return "give the original BF16 checkpoint"
    command = shlex.join(["qarl", "export", f"run={run}", f"step={newest[0]}", "format=bf16"])
    return (
        "it is the export of a run, whose BF16 weights the run's checkpoints have: "
        f"`{command} output=FOLDER` and model.path=FOLDER"
    )


def _check_scheme(config: Config, scheme: Scheme) -> None:
    asked = get_scheme(config.quant.scheme, group_size=config.quant.group_size)
    if asked == scheme:
        return
    keys = [f"quant.scheme={scheme.name}"]
    if scheme.group_size:
        keys.append(f"quant.group_size={scheme.group_size}")
    raise UserError(
        f"the model in {config.model.path!r} is already quantized to another scheme than the config says",
        where=f"quant.scheme={config.quant.scheme}, quant.group_size={config.quant.group_size}",
        why="its codes are the base of the adapters as they are, and are not quantized again",
        fix=f"set {' '.join(keys)}",
    )


def base_of(config: Config, hf_config: Any, model: nn.Module) -> PublishedBase:
    """Return the quantized checkpoint in `model.path`. `model`: the model of its config, on any device.

    Raise UserError if its files do not fit it, or if `quant.ignore` says other linears than are quantized."""
    keys = quantization_of(hf_config)
    assert keys is not None
    scheme = published_scheme(keys)
    _check_scheme(config, scheme)
    folder = _folder(config.model.path)
    base = PublishedBase(weight_files(str(folder)), model, scheme)
    names = linear_shapes(model)
    asked = {name for name in names if not is_ignored(name, config.quant.ignore)}
    if asked != base.linears:
        plain = [name for name in names if name not in base.linears]
        raise UserError(
            "quant.ignore and the quantized checkpoint leave different linears in BF16",
            where=f"quant.ignore={json.dumps(list(config.quant.ignore))}; in {config.model.path}: {name_layers(plain)}",
            why="its codes are the base of the adapters as they are, and are not quantized again",
            fix=f"set quant.ignore={json.dumps(_shortest(plain, names, keys))}",
        )
    return base


def _shortest(plain: list[str], names: Mapping[str, Any], keys: Mapping[str, Any]) -> list[str]:
    """Return an ignore list for the linears `plain`: the checkpoint's own if it says the same."""
    own = [str(entry) for entry in keys.get("ignore") or ()]
    try:
        same = [name for name in names if is_ignored(name, own)] == plain
    except ValueError:  # an expression that Python does not read
        same = False
    return own if same and len(own) <= len(plain) else plain


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the Hub's client raises different types
        raise cannot_load(path, " ".join(str(error).split())[:300]) from error
