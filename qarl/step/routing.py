"""Replay the routing of a rollout in one forward at a time, and find the tokens that would have gone elsewhere.

A replay stays active until the next forward begins or `stop`, because gradient checkpointing computes the forward again
in the backward. What the model's own routers choose is recorded only without gradients, where log-probs are computed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl.align.router import (
    RecordedRouting,
    differing_tokens,
    known_routing,
    recorded_routing,
    replayed_routing,
)


@dataclass(frozen=True)
class RoutingComparison:
    """The routing of one forward. `known`: bool [T], the tokens whose experts the rollout has told. `other`: bool [T],
    those of them whose own routers chose other experts, in at least one layer."""

    known: Tensor
    other: Tensor


class RoutingReplay:
    """The replay of one forward. Call `begin` before it and `end` after it, and `stop` to let the model's own routers
    choose again."""

    def __init__(self) -> None:
        self._hooks = ExitStack()
        self._record: RecordedRouting | None = None
        self._sampled: Tensor | None = None

    def begin(self, model: Any, sampled: Tensor, *, replay: bool = True) -> None:
        """Begin a forward of `model`. `sampled`: the rollout's experts, integers [T, layers, k], in the order of the
        forward's flattened rows, negative where they are unknown. `replay`: whether tokens go to these experts."""
        self.stop()
        if replay:
            self._hooks.enter_context(replayed_routing(model, sampled))
        if not torch.is_grad_enabled():
            self._sampled = sampled
            self._record = self._hooks.enter_context(recorded_routing(model))

    def end(self) -> RoutingComparison | None:
        """Compare the routing of the forward that has begun, once. None with gradients, and if none has begun."""
        if self._record is None or self._sampled is None:
            return None
        other = differing_tokens(self._record.experts(), self._sampled)
        self._record = None
        return RoutingComparison(known=known_routing(self._sampled).any(-1), other=other)

    def stop(self) -> None:
        """Let the model's own routers choose."""
        self._hooks.close()
        self._record = None
        self._sampled = None
