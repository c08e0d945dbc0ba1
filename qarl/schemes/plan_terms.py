"""What `qarl bench plan` needs to know of a scheme: how fast its products are, and what its layers move beside them.

Bytes were counted for micro-batches of 4096 tokens and 512 rows an expert or more
(`benchmarks/proofs/layer_costs.py`); efficiencies are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BeyondProducts:
    """Bytes that linears and experts move beyond those of their products, in a forward or a backward.

    dense_input     for each token and input of a dense linear
    dense_weight    for each weight of the dense linears
    expert_token    for each token and hidden element, if the layer has experts
    expert_hidden   for each row of an expert and hidden element
    expert_inner    for each row of an expert and inner element
    expert_weight   for each weight of the experts
    """

    dense_input: float = 0.0
    dense_weight: float = 0.0
    expert_token: float = 0.0
    expert_hidden: float = 0.0
    expert_inner: float = 0.0
    expert_weight: float = 0.0


@dataclass(frozen=True)
class PlanTerms:
    """A scheme in the plan of a step.

    efficiency   share of the data sheet's rate that a large product reaches where no kernel of the scheme says how fast
                 it is (assumed)
    rate         the rate of the data sheet that it has a share of: bf16, int8 or fp8
    forward, backward   what its trainer's layers move beside their products (counted)
    """

    efficiency: float = 0.5
    rate: str = "bf16"
    forward: BeyondProducts = field(default_factory=BeyondProducts)
    backward: BeyondProducts = field(default_factory=BeyondProducts)
