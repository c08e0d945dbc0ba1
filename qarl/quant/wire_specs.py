"""The tensors of a quantized weight on the wire, with torch's dtypes. `qarl.schemes` names the dtypes without torch."""

from __future__ import annotations

import torch

from qarl.schemes import Scheme


def wire_specs(
    scheme: Scheme, out_features: int, in_features: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each wire tensor that represents a BF16 [out_features, in_features] weight."""
    specs = scheme.wire_specs(out_features, in_features)
    return {name: (getattr(torch, spec.dtype), spec.shape) for name, spec in specs.items()}
