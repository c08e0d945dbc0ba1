"""Load the weights of a run's model: a BF16 or FP16 model by transformers, a quantized one as the base of adapters.

transformers loads a compressed-tensors checkpoint into modules of its own, which decompress it in the first forward.
Here the codes never leave their format: the model is built without weights, the unquantized tensors are put into it,
and the codes go to the low-bit layers (`qarl.quant.published`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from qarl.checks.model_folder import cannot_load, lacks_tensors, loading_options
from qarl.checks.published_base import base_of, is_quantized
from qarl.config import Config
from qarl.errors import UserError
from qarl.quant.meta_model import TORCH_DTYPES, default_dtype_kept, unquantized_config
from qarl.quant.published import split_wire
from qarl.quant.quantize import QuantizedTensor

Codes = dict[str, QuantizedTensor]
DROPOUTS = frozenset({"attention_dropout", "hidden_dropout", "residual_dropout"})
"""Config keys of dropout in the families that are trained. The engine has none, so neither has the trainer."""


def check_finite(model: nn.Module, dtype: str) -> None:
    """Raise UserError if a parameter of a model loaded in FP16 is NaN or Inf. FP16's largest number is 65504."""
    if dtype != "fp16":
        return
    bad = [
        name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())
    ]
    if bad:
        raise UserError(
            f"{len(bad)} weights are NaN or Inf in FP16",
            where=f"model.dtype=fp16: {', '.join(bad[:4])}",
            why="FP16's largest number is 65504, BF16's is 3e38",
            fix="set model.dtype=bf16",
        )


def load_weights(config: Config, hf_config: Any) -> tuple[Any, Codes | None]:
    """Return the model of `config` on the CPU, and the weights of its quantized linears if the checkpoint has them.

    `hf_config`: transformers' config of the model, in which dropout is switched off.

    Raise UserError if it cannot be loaded, or if a weight does not fit into `model.dtype`."""
    # As an argument of from_pretrained, a key would reach models that do not have it.
    for key in DROPOUTS & set(vars(hf_config)):
        setattr(hf_config, key, 0.0)
    if is_quantized(hf_config):
        return _quantized(config, hf_config)
    from transformers import AutoModelForCausalLM

    try:
        with default_dtype_kept():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                config.model.path,
                dtype=TORCH_DTYPES[config.model.dtype],
                attn_implementation="sdpa",
                config=hf_config,
                output_loading_info=True,
                trust_remote_code=config.model.trust_remote_code,
                **loading_options(config.model.path),
            )
    except (
        RuntimeError
    ):  # raised by torch; `prepare_run` reports that config and weights do not fit
        raise
    except Exception as error:  # transformers raises different types for different bad keys
        why = (str(error).splitlines() or [""])[0]
        raise cannot_load(config.model.path, why or type(error).__name__) from error
    model, loading = loaded
    if loading["missing_keys"]:
        raise lacks_tensors(config.model.path, loading["missing_keys"])
    check_finite(model, config.model.dtype)
    return model, None


def _quantized(config: Config, hf_config: Any) -> tuple[Any, Codes]:
    """Return the model of a quantized checkpoint, whose quantized weights are on the meta device, and their codes."""
    model = _empty_model(unquantized_config(hf_config), config.model.trust_remote_code)
    base = base_of(config, hf_config, model)
    plain, wire = split_wire(base.tensors(), base.linears)
    tables = dict(model.named_modules())
    for name, tensor in plain.items():
        owner, _, leaf = name.rpartition(".")
        module: nn.Module = tables[owner]
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor)
        else:
            module._buffers[leaf] = tensor
    model.tie_weights()
    if empty := [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name.rpartition(".")[0] not in base.linears
    ]:
        raise lacks_tensors(config.model.path, empty)
    codes = {
        name: QuantizedTensor.of(base.scheme, base.shape(name), tensors)
        for name, tensors in wire.items()
    }
    if (base.folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(base.folder)
    return model, codes


def _empty_model(hf_config: Any, trust_remote_code: bool) -> Any:
    """Return the BF16 model of `hf_config` with its buffers, and parameters on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with default_dtype_kept(), init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()  # each module has got a parameter of its own
    return model
