"""What a quantization scheme is: the number formats of its operands, and its tensors on the wire and on disk.

`Scheme` is the base of all schemes. As it stands, it quantizes nothing. A subclass overrides what differs. Nobody
outside this package asks which scheme it has: a scheme answers the question itself.

Nothing here imports torch, so that reading a config stays cheap. Dtypes have the names that torch gives them, and
`qarl.quant.wire_specs` converts them. compressed-tensors is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from qarl.schemes.plan_terms import PlanTerms

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

QUANT_METHOD = "compressed-tensors"
TARGETS = ("Linear",)
LAST = 100
"""The `order` of a scheme that does not set one."""
BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}
"""Bytes of one element, by torch's name of the dtype."""


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
            value = getattr(args, field)
            if value is not None:
                raise ValueError(f"{field}={value} is not supported")
        values = args.model_dump(mode="json")
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class WireSpec(NamedTuple):
    """One tensor on the wire: torch's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class Scheme:
    """The number formats of the weights and the activations of every quantized Linear.

    `qarl.schemes.get_scheme` makes an instance. `group_size`: the number of elements along K that share a scale, or
    None if the scheme has no groups.
    """

    group_size: int | None = None

    name: ClassVar[str]
    """The value of quant.scheme."""
    order: ClassVar[int] = LAST
    """The scheme's rank in lists of schemes, as in help and errors."""
    format: ClassVar[str | None] = None
    """compressed-tensors' name for the layout on disk and on the wire."""
    plan: ClassVar[PlanTerms] = PlanTerms()
    """What `qarl bench plan` needs to know."""
    engine_computes: ClassVar[str | None] = None
    """What vLLM's own kernels compute from such a checkpoint instead of this scheme. None: they compute the scheme."""

    @classmethod
    def of(cls, group_size: int) -> Scheme:
        """Return the scheme with groups of `group_size`, which is ignored by a scheme without groups."""
        return cls()

    @property
    def weights(self) -> QuantArgs | None:
        """The format of the weights. None: nothing is quantized."""
        return None

    @property
    def input_activations(self) -> QuantArgs | None:
        """The format of the activations. None: they stay BF16."""
        return None

    @property
    def quantized(self) -> bool:
        return self.weights is not None

    def check_shape(self, name: str, out_features: int, in_features: int) -> str | None:
        """Return why this scheme cannot quantize the weight `name` [out_features, in_features], or None if it can."""
        group = self.group_size
        if not group or in_features % group == 0:
            return None
        shape = f"{name} has shape [{out_features}, {in_features}]"
        return f"{shape}: {in_features} input features are not a multiple of group_size {group}"

    def wire_specs(self, out_features: int, in_features: int) -> dict[str, WireSpec]:
        """Return each wire tensor that represents a BF16 [out_features, in_features] weight."""
        return {"weight": WireSpec("bfloat16", (out_features, in_features))}

    def wire_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the wire tensors of an [out_features, in_features] weight."""
        return sum(spec.nbytes for spec in self.wire_specs(out_features, in_features).values())

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


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if value is not None
    }
