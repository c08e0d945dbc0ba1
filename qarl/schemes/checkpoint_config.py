"""Which scheme a checkpoint has: its `quantization_config`, read with compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qarl.errors import UserError
from qarl.schemes.base import QUANT_METHOD, TARGETS, QuantArgs, Scheme
from qarl.schemes.registry import get_scheme, scheme_names

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

WHERE = "quantization_config"


def from_quantization_config(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a checkpoint's `quantization_config`. Raise UserError if no scheme writes such a config.

    Of schemes with equal number formats and layouts it is the first in the order of `scheme_names`: a config does not
    say how the codes were rounded.
    """
    from compressed_tensors.quantization import QuantizationConfig

    if config.get("quant_method") != QUANT_METHOD:
        raise UserError(
            f"quant_method is {config.get('quant_method')!r}, not {QUANT_METHOD!r}",
            where=WHERE,
            fix="start from an unquantized checkpoint, or from one that QaRL or llm-compressor wrote",
        )
    try:
        parsed = QuantizationConfig.model_validate(dict(config))
        return _from_parsed(parsed)
    except ValueError as error:  # pydantic's ValidationError is a ValueError
        raise UserError(
            "the checkpoint's quantization is not one of QaRL's schemes",
            where=WHERE,
            why=str(error),
            fix=f"use one of {', '.join(scheme_names())}",
        ) from error


def _from_parsed(config: QuantizationConfig) -> Scheme:
    """Return the scheme that `config` describes. If there is none, raise ValueError with the reason."""
    if len(config.config_groups) != 1:
        raise ValueError(f"it has {len(config.config_groups)} config groups, but must have one")
    if config.kv_cache_scheme is not None:
        raise ValueError("it quantizes the KV cache")
    (group,) = config.config_groups.values()
    if list(group.targets) != list(TARGETS):
        raise ValueError(f"it targets {group.targets}, not {list(TARGETS)}")
    if group.weights is None or group.output_activations is not None:
        raise ValueError("it must quantize weights and must not quantize outputs")
    weights = QuantArgs.from_compressed_tensors(group.weights)
    activations = None
    if group.input_activations:
        activations = QuantArgs.from_compressed_tensors(group.input_activations)
    for name in scheme_names():
        scheme = get_scheme(name, group_size=weights.group_size or 128)
        formats = (scheme.weights, scheme.input_activations, scheme.format)
        if formats == (weights, activations, config.format):
            return scheme
    raise ValueError(f"weights {weights}, activations {activations}, format {config.format!r}")
