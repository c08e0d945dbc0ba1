"""8-bit weights with one scale per output channel, and 8-bit activations with one per token: w8a8 and fp8."""

from __future__ import annotations

from typing import ClassVar

from qarl.schemes.base import QuantArgs, Scheme, WireSpec


def per_token(type: str) -> QuantArgs:
    """Return the format of 8-bit activations, whose scales are computed in the forward."""
    return QuantArgs(num_bits=8, type=type, strategy="token", dynamic=True)


class EightBits(Scheme):
    """Weights and activations of 8 bits. Scales of weights are FP32, because vLLM stores them in FP32."""

    type: ClassVar[str]
    """"int" or "float"."""

    @property
    def weights(self) -> QuantArgs:
        return QuantArgs(num_bits=8, type=self.type, strategy="channel")

    @property
    def input_activations(self) -> QuantArgs:
        return per_token(self.type)

    def wire_specs(self, out_features: int, in_features: int) -> dict[str, WireSpec]:
        return {
            "weight": WireSpec(self.codes, (out_features, in_features)),
            "weight_scale": WireSpec("float32", (out_features, 1)),
        }
