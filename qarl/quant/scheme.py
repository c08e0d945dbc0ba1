"""Quantization schemes: the low-bit operands, their number formats, and their compressed-tensors configs.

    w4a16   int4 weights in groups along K                    pack-quantized
    w4a8    the same weights, and int8 activations            pack-quantized
    w8a8    int8 weights and activations                      int-quantized
    fp8     float8_e4m3fn weights and activations             float-quantized

8-bit weights have one scale per output channel. 8-bit activations have one scale per token, computed in the forward.
All schemes are symmetric. verl's `qat.mode: w4a16` is a different scheme: NVFP4 with groups of 16.

Except for the group size, the schemes equal compressed-tensors' presets W4A16, W4A8, W8A8 and FP8_DYNAMIC. For w4a8,
compressed-tensors would choose the format int-quantized, which needs one byte per int4 value instead of half a byte.

A `Scheme` is converted to and from compressed-tensors' `QuantizationConfig`, which validates the dictionary in
`config.json` and in vLLM's `hf_overrides`. compressed-tensors is imported only for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from qarl.config.quant import SCHEMES
from qarl.errors import UserError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

QUANT_METHOD = "compressed-tensors"
TARGETS = ("Linear",)
PACK_FACTOR = 8


@dataclass(frozen=True)
class QuantArgs:
    """The number format of one operand, with the field names of compressed-tensors' `QuantizationArgs`.

    `type` is "int" or "float". `strategy` says which elements share a scale: "group" (`group_size` elements along K),
    "channel" (an output row) or "token" (a row of the activations). `dynamic` is true if the scale is computed in the
    forward, as for tokens.
    """

    num_bits: int
    type: str
    strategy: str
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False

    def to_compressed_tensors(self) -> QuantizationArgs:
        from compressed_tensors.quantization import QuantizationArgs

        return QuantizationArgs(**asdict(self))

    @classmethod
    def from_compressed_tensors(cls, args: QuantizationArgs) -> QuantArgs:
        """Return `args` as a QuantArgs. Raise ValueError if they set act order, a block structure or a scale dtype."""
        for field in ("actorder", "block_structure", "scale_dtype"):
            if (value := getattr(args, field)) is not None:
                raise ValueError(f"{field}={value} is not supported")
        values = args.model_dump(mode="json")
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Scheme:
    """The number formats of the weights and the activations of every quantized Linear.

    If `weights` is None, nothing is quantized (`bf16`). If `input_activations` is None, activations stay BF16. `format`
    is compressed-tensors' name for the layout on disk and on the wire.
    """

    name: str
    weights: QuantArgs | None = None
    input_activations: QuantArgs | None = None
    format: str | None = None

    @property
    def quantized(self) -> bool:
        return self.weights is not None

    @property
    def group_size(self) -> int | None:
        return self.weights.group_size if self.weights else None

    def check_shape(self, name: str, out_features: int, in_features: int) -> str | None:
        """Return why this scheme cannot quantize the weight `name` [out_features, in_features], or None if it can."""
        group = self.group_size
        if not group or in_features % group == 0:
            return None
        shape = f"{name} has shape [{out_features}, {in_features}]"
        return f"{shape}: {in_features} input features are not a multiple of group_size {group}"

    def wire_specs(
        self, out_features: int, in_features: int
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each wire tensor that represents a BF16 [out_features, in_features] weight."""
        if self.weights is None:
            return {"weight": (torch.bfloat16, (out_features, in_features))}
        if self.format != "pack-quantized":
            codes = torch.int8 if self.weights.type == "int" else torch.float8_e4m3fn
            scales = (torch.float32, (out_features, 1))
            return {"weight": (codes, (out_features, in_features)), "weight_scale": scales}
        return {
            "weight_packed": (torch.int32, (out_features, in_features // PACK_FACTOR)),
            "weight_scale": (
                torch.bfloat16,
                (out_features, in_features // (self.group_size or in_features)),
            ),
            "weight_shape": (torch.int64, (2,)),
        }

    def quantization_config(self, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `quantization_config` for `config.json` and vLLM's `hf_overrides`, in plain JSON types.

        Fields without a value are omitted, not written as null, because older releases of compressed-tensors reject
        fields that they do not know.
        """
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
        )

        assert self.weights is not None
        activations = self.input_activations
        group = QuantizationScheme(
            targets=list(TARGETS),
            weights=self.weights.to_compressed_tensors(),
            input_activations=activations.to_compressed_tensors() if activations else None,
            format=self.format,
        )
        config = QuantizationConfig(
            config_groups={"group_0": group},
            quant_method=QUANT_METHOD,
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=list(ignore),
        )
        return _without_none(config.model_dump(mode="json"))  # exclude_none leaves zp_dtype

    @classmethod
    def from_quantization_config(cls, config: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a checkpoint's `quantization_config`. Raise UserError if it is not in `SCHEMES`."""
        from compressed_tensors.quantization import QuantizationConfig

        where = "quantization_config"
        if config.get("quant_method") != QUANT_METHOD:
            raise UserError(
                f"quant_method is {config.get('quant_method')!r}, not {QUANT_METHOD!r}",
                where=where,
                fix="start from an unquantized checkpoint, or from one that QaRL or llm-compressor wrote",
            )
        try:
            parsed = QuantizationConfig.model_validate(dict(config))
            return _from_parsed(parsed)
        except ValueError as error:  # pydantic's ValidationError is a ValueError
            raise UserError(
                "the checkpoint's quantization is not one of QaRL's schemes",
                where=where,
                why=str(error),
                fix=f"use one of {', '.join(SCHEMES)}",
            ) from error


def get_scheme(name: str, group_size: int = 128) -> Scheme:
    """Return the scheme called `name`. `group_size`: number of elements along K that share a scale, for w4a16 and w4a8.

    Raise UserError if there is no such scheme, or if `group_size` is used and is not a positive multiple of 8.
    """
    if name == "bf16":
        return Scheme(name)
    if name == "w4a16":
        return Scheme(name, _int4(group_size), format="pack-quantized")
    if name == "w4a8":
        return Scheme(name, _int4(group_size), _per_token("int"), format="pack-quantized")
    if name == "w8a8":
        return Scheme(name, _per_channel("int"), _per_token("int"), format="int-quantized")
    if name == "fp8":
        return Scheme(name, _per_channel("float"), _per_token("float"), format="float-quantized")
    raise UserError(
        f"there is no scheme {name!r}", where="quant.scheme", fix=f"use one of {', '.join(SCHEMES)}"
    )


def _int4(group_size: int) -> QuantArgs:
    if group_size < PACK_FACTOR or group_size % PACK_FACTOR:
        raise UserError(
            f"group_size {group_size} is not a positive multiple of {PACK_FACTOR}",
            where="quant.group_size",
            why=f"{PACK_FACTOR} four-bit values share an int32, and a group must not begin inside an int32",
            fix="use 128, or 32 for small models",
        )
    return QuantArgs(num_bits=4, type="int", strategy="group", group_size=group_size)


def _per_channel(type: str) -> QuantArgs:
    return QuantArgs(num_bits=8, type=type, strategy="channel")


def _per_token(type: str) -> QuantArgs:
    return QuantArgs(num_bits=8, type=type, strategy="token", dynamic=True)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if value is not None
    }


def _from_parsed(config: QuantizationConfig) -> Scheme:
    """Return the scheme in `SCHEMES` that `config` describes. If there is none, raise ValueError with the reason."""
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
    activations = (
        QuantArgs.from_compressed_tensors(group.input_activations)
        if group.input_activations
        else None
    )
    for name in SCHEMES:
        scheme = get_scheme(name, group_size=weights.group_size or 128)
        layout = (scheme.weights, scheme.input_activations, scheme.format)
        if scheme.quantized and layout == (weights, activations, config.format):
            return scheme
    raise ValueError(f"weights {weights}, activations {activations}, format {config.format!r}")
