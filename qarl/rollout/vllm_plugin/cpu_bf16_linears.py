"""BF16 linears of an engine on a CPU with AMX, by the trainer's function (`qarl.kernels.cpu.bf16_linear`).

vLLM's own choice depends on the size of the weight, and the bits of a row on the number of rows. Each class of vLLM's
linears and embeddings is registered again, as a subclass that differs only in how an unquantized weight is multiplied.
`PluggableLayer.register_oot` is vLLM's interface for this; its LoRA looks the classes up there too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import linear as linears
from vllm.model_executor.layers import vocab_parallel_embedding as embeddings

from qarl.kernels.cpu import bf16_linear


class _IndependentRows:
    """Multiplies by `bf16_linear.product_with` where that serves the weight, and otherwise as vLLM chooses.

    `empties`: whether the layer's own weight is emptied, as vLLM does where nothing else reads it."""

    empties: bool

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not bf16_linear.serves(layer.weight):
            super().process_weights_after_loading(layer)  # type: ignore[misc]  # the other base class has it
            return
        multiply = bf16_linear.product_with(layer.weight)
        layer.cpu_linear = lambda x, weight, bias: multiply(x, bias)
        if self.empties:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class IndependentLinear(_IndependentRows, linears.UnquantizedLinearMethod):
    empties = True


class IndependentHead(_IndependentRows, embeddings.UnquantizedEmbeddingMethod):
    empties = False


METHODS: dict[type, type] = {
    linears.UnquantizedLinearMethod: IndependentLinear,
    embeddings.UnquantizedEmbeddingMethod: IndependentHead,
}
LAYERS = (
    linears.ReplicatedLinear,
    linears.ColumnParallelLinear,
    linears.MergedColumnParallelLinear,
    linears.QKVParallelLinear,
    linears.RowParallelLinear,
    embeddings.VocabParallelEmbedding,
    embeddings.ParallelLMHead,
)


def register() -> None:
    """Put the subclasses into vLLM's registry, if this CPU has AMX."""
    if torch.cpu._is_amx_tile_supported():
        for layer in LAYERS:
            layer.register_oot(_with_independent_rows(layer), name=layer.__name__)


def _with_independent_rows(layer: Any) -> Any:
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        layer.__init__(self, *args, **options)
        if type(self.quant_method) in METHODS:
            self.quant_method = METHODS[type(self.quant_method)]()

    return type(layer.__name__, (layer,), {"__init__": __init__, "__module__": __name__})
