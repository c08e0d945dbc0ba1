"""Route tokens to experts as the engine does, replay the routing of a rollout, and record the routing.

From the same logits, the engine and transformers choose the same experts (except for ties), but round differently:

    vLLM on CPU     takes the k largest BF16 logits, unsorted. The weights are their softmax in BF16, or without
                    norm_topk_prob exp(logit - logsumexp of all logits) in BF16 (`select_experts`,
                    vllm/model_executor/layers/fused_moe/experts/cpu_moe.py)
    transformers    takes a softmax over all logits in FP32 and then the k largest probabilities, sorted. It divides
                    them by their sum and rounds to BF16

The order matters because a token's experts are summed in this order. `qarl.align.cuda_router` has the router for GPUs.

A tiny difference in the hidden states can still send a token to different experts than in the rollout, which changes
all later tokens. Router replay (R3, arXiv 2510.11370) gives the trainer the rollout's experts. Their weights come from
the trainer's own logits, so the router still gets a gradient. Replay works at every level of alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qarl.config.level import Level
from qarl.kernels.cpu import bf16_linear

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [T, E], weights [T, k] and experts [T, k] int64."""


class AlignedRouter(nn.Module):
    """A router that orders the experts and rounds the weights as the engine does.

    The input is BF16 [..., H]. The outputs are logits BF16 [T, E], weights BF16 [T, k] and experts int64 [T, k].
    """

    weight: nn.Parameter
    hidden_dim: int
    top_k: int
    norm_topk_prob: bool

    def forward(self, hidden_states: Tensor) -> RouterOutput:
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        logits = bf16_linear.linear(tokens, self.weight)
        experts = torch.topk(logits, self.top_k, dim=-1, sorted=False).indices
        weights = engine_weights(logits, experts, renormalize=self.norm_topk_prob)
        return logits, weights, experts

    @staticmethod
    def weigh(logits: Tensor, experts: Tensor, *, renormalize: bool) -> Tensor:
        """Return the weights of other `experts` [T, k]."""
        return engine_weights(logits, experts, renormalize=renormalize)


def engine_weights(logits: Tensor, experts: Tensor, *, renormalize: bool) -> Tensor:
    """Return the weights [T, k] that vLLM gives to `experts` [T, k], differentiable, in the dtype of `logits`
    [T, E].
    """
    chosen = logits.gather(-1, experts)
    if renormalize:
        return torch.softmax(chosen, dim=-1)
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    return (chosen - normalizer).exp()


def transformers_weights(logits: Tensor, experts: Tensor, *, renormalize: bool) -> Tensor:
    """Return the weights [T, k] that transformers' routers give to `experts`. Arguments are as in `engine_weights`."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    chosen = probabilities.gather(-1, experts)
    if renormalize:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen.to(logits.dtype)


def replays(router_replay: str, level: Level) -> bool:
    """Return whether the trainer replays the rollout's experts at an alignment level.

    `router_replay`: the config's `rollout.router_replay`. `auto` replays only at `off` and `linears`, because the
    trainer's routers are not the engine's at these levels.
    """
    if router_replay == "auto":
        return not level.follows_engine
    return router_replay == "on"


def routers(model: Any) -> dict[int, Any]:
    """Return the routers of a transformers causal LM. The keys are the numbers of their decoder layers."""
    mlps = enumerate(layer.mlp for layer in model.model.layers)
    return {number: mlp.gate for number, mlp in mlps if hasattr(mlp, "experts")}


@contextmanager
def replayed_routing(model: Any, experts: Tensor) -> Iterator[None]:
    """Within this context, forwards of `model` send tokens to the given experts.

    With gradient checkpointing, run the backward in the context too, because it computes the forward again.

    Args:
        experts: integers [T, layers, k], for all decoder layers, even those without experts. The T tokens are in the
            order of the flattened rows of the forward. If a token's k numbers in a layer are not all different, or if
            one is negative, the model's router chooses instead.
    """

    by_number = routers(model)

    def replay(number: int) -> Any:
        device = by_number[number].weight.device
        replayed = experts[:, number].to(device=device, dtype=torch.int64)
        known = known_routing(replayed)[:, None]

        def hook(router: Any, inputs: Any, output: RouterOutput) -> RouterOutput:
            logits, _, routed = output
            chosen = torch.where(known, replayed, routed)
            weigh = getattr(router, "weigh", transformers_weights)
            weights = weigh(logits, chosen, renormalize=router.norm_topk_prob)
            return logits, weights, chosen

        return hook

    with ExitStack() as stack:
        for number, router in by_number.items():
            handle = router.register_forward_hook(replay(number))
            stack.callback(handle.remove)
        yield


def known_routing(experts: Tensor) -> Tensor:
    """Return bool [...]: whether the k numbers in `experts` [..., k] are all different and at least 0."""
    in_order = experts.sort(-1).values
    return (in_order[..., 0] >= 0) & (in_order.diff(dim=-1) > 0).all(-1)


class RecordedRouting:
    """The experts that the model's own routers chose in the latest forward, even if a replay replaced them."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._chosen: dict[int, Tensor] = {}

    def experts(self) -> Tensor:
        """Return the chosen experts of each token, int64 [T, layers, k]; -1 in layers that have no experts."""
        first = next(iter(self._chosen.values()))
        missing = torch.full_like(first, -1)
        by_layer = [self._chosen.get(number, missing) for number in range(self._layers)]
        return torch.stack(by_layer, dim=1)

    def _hook(self, number: int) -> Any:
        def record(router: Any, inputs: Any, output: RouterOutput) -> None:
            _, _, experts = output
            self._chosen[number] = experts.detach()

        return record


@contextmanager
def recorded_routing(model: Any) -> Iterator[RecordedRouting]:
    """Within this context, record what the model's own routers choose, even if a replay replaces it."""
    record = RecordedRouting(len(model.model.layers))
    with ExitStack() as stack:
        for number, router in routers(model).items():
            handle = router.register_forward_hook(record._hook(number), prepend=True)
            stack.callback(handle.remove)
        yield record


def differing_tokens(routed: Tensor, replayed: Tensor) -> Tensor:
    """Return bool [T]: whether the experts `routed` and `replayed`, both [T, layers, k], differ in at least one layer.

    The order of a token's experts does not matter. Layers in which one of the two is unknown (`known_routing`) are
    skipped.
    """
    replayed = replayed.to(device=routed.device, dtype=routed.dtype)
    known = known_routing(routed) & known_routing(replayed)
    differs = (routed.sort(-1).values != replayed.sort(-1).values).any(-1)
    return (differs & known).any(-1)
