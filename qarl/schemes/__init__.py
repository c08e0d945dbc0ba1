"""Quantization schemes: low-bit operands, number formats, compressed-tensors configs, and what each scheme asks for.

8-bit weights have one scale per output channel. 8-bit activations have one scale per token, computed in the forward.
All schemes are symmetric. Each has a file in this package, which is imported because it is there.
"""

from __future__ import annotations

import importlib
import pkgutil

from qarl.schemes.base import Cpu, Grid, QuantArgs, Scheme, WireSpec
from qarl.schemes.bf16 import UNQUANTIZED
from qarl.schemes.checkpoint_config import from_quantization_config
from qarl.schemes.published_config import published_scheme
from qarl.schemes.registry import (
    engine_scheme_names,
    get_scheme,
    register,
    scheme_help,
    scheme_names,
    unregister,
)
from qarl.schemes.w4a16 import W4A16

DEFAULT_SCHEME = W4A16.name

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "DEFAULT_SCHEME",
    "UNQUANTIZED",
    "Cpu",
    "Grid",
    "QuantArgs",
    "Scheme",
    "WireSpec",
    "engine_scheme_names",
    "from_quantization_config",
    "get_scheme",
    "published_scheme",
    "register",
    "scheme_help",
    "scheme_names",
    "unregister",
]
