"""Quantization. The same low-bit tensors serve the forward, the wire to the engine and checkpoints.

from qarl.quant import get_scheme, quantize, quantize_model, packed_state_dict
"""

from qarl.quant.convert import QuantReport, invalidate_quantized, quantize_model
from qarl.quant.experts import QuantExperts
from qarl.quant.linear import QuantLinear
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.state_dict import packed_state_dict
from qarl.schemes import Scheme, get_scheme

__all__ = [
    "QuantExperts",
    "QuantLinear",
    "QuantReport",
    "QuantizedTensor",
    "Scheme",
    "get_scheme",
    "invalidate_quantized",
    "packed_state_dict",
    "quantize",
    "quantize_model",
]
