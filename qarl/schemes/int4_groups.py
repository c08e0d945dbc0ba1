"""int4 weights in groups along K, eight codes in an int32: what w4a16 and w4a8 share."""

from __future__ import annotations

from qarl.errors import UserError
from qarl.schemes.base import Grid, QuantArgs, Scheme, WireSpec

PACK_FACTOR = 8
"""Codes in an int32."""


class Int4Groups(Scheme):
    """Symmetric int4 weights, one BF16 scale a group of `group_size` elements along K."""

    format = "pack-quantized"
    grid = Grid(half_range=7.5, lowest=-8, highest=7)
    """Half of the 15 steps from -8 to 7: -absmax gets the code -8, and +absmax is clamped to 7."""
    codes = "int32"
    packs_codes = True

    @classmethod
    def of(cls, group_size: int) -> Scheme:
        """Raise UserError if `group_size` is not a positive multiple of 8."""
        if group_size < PACK_FACTOR or group_size % PACK_FACTOR:
            raise UserError(
                f"group_size {group_size} is not a positive multiple of {PACK_FACTOR}",
                where="quant.group_size",
                why=f"{PACK_FACTOR} four-bit values share an int32, and a group must not begin inside an int32",
                fix="use 128, or 32 for small models",
            )
        return cls(group_size)

    @property
    def weights(self) -> QuantArgs:
        return QuantArgs(num_bits=4, type="int", strategy="group", group_size=self.group_size)

    def wire_specs(self, out_features: int, in_features: int) -> dict[str, WireSpec]:
        words = in_features // PACK_FACTOR
        groups = in_features // (self.group_size or in_features)
        return {
            "weight_packed": WireSpec(self.codes, (out_features, words)),
            "weight_scale": WireSpec("bfloat16", (out_features, groups)),
            "weight_shape": WireSpec("int64", (2,)),
        }
