"""8-bit weights with one scale per output channel, and 8-bit activations with one per token: w8a8 and fp8."""

from __future__ import annotations

from typing import ClassVar

from qarl.schemes.base import QuantArgs, Scheme, WireSpec
from qarl.schemes.plan_terms import BeyondProducts

BACKWARD = BeyondProducts(
    dense_input=6,
    dense_weight=4,
    expert_token=3,
    expert_inner=10,
    expert_weight=6,
)
"""What the trainer's backward moves beside its products: it multiplies weights that were dequantized to BF16."""


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
