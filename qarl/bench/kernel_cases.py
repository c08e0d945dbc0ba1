"""What `qarl bench kernels` times: competing implementations of one operation, and their correct results.

    linear          y = x W^T of a quantized linear, including the quantization of activations
    input_gradient  dX = dY W, from the low-bit weight
    quantize        master weight to the wire tensors, once per optimizer step
    experts         a layer of experts, as in vLLM's fused kernels: routing, both products, SiLU, the sum

The baseline of products is `torch.nn.functional.linear` in BF16, that of quantizers eager PyTorch
(`qarl.bench.linear_cases`; for experts see `qarl.bench.expert_cases`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from qarl.bench.competitors import Group
from qarl.bench.expert_cases import ROUTINGS, ExpertLayer, experts
from qarl.bench.kernel_arguments import Arguments
from qarl.bench.linear_cases import BUILDERS, Layer
from qarl.kernels.base import ExpertsShape


def groups(arguments: Arguments, device: torch.device) -> Iterator[Group]:
    """Yield the groups of dense weights and of layers of experts, whose `n` and `k` are the hidden size."""
    operations = [operation for operation in arguments.operation if operation in BUILDERS]
    for model, name, (n, k) in arguments.layers() if operations else ():
        layer = Layer((torch.randn(n, k, device=device) / k**0.5).bfloat16(), arguments)
        for operation in operations:
            for rows in (0,) if operation == "quantize" else arguments.m:
                keys = {
                    "operation": operation,
                    "model": model,
                    "layer": name,
                    "n": n,
                    "k": k,
                    "m": rows,
                }
                yield Group(keys, BUILDERS[operation](layer, rows))
    for model, numbers in arguments.expert_layers():
        of_experts = ExpertLayer(ExpertsShape(*numbers), arguments, device)
        hidden = of_experts.shape.hidden
        for tokens, routing in product(arguments.m, ROUTINGS):
            keys = {"operation": "experts", "model": model, "layer": f"experts_layer, {routing}"}
            yield Group(
                keys | {"n": hidden, "k": hidden, "m": tokens}, experts(of_experts, tokens, routing)
            )
