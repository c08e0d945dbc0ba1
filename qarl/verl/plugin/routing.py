"""Router replay in verl's FSDP engine: the actor's routers use the experts that verl's batch names for each token.

The routing is unknown for the last sampled token, which vLLM never routes. For such tokens, verl's batch contains zeros
(verl/experimental/agent_loop/agent_loop.py). If all experts of a token are 0, the actor's own router chooses, as in
verl's VeOmni engine (verl/workers/engine/veomni/transformer_impl.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from qarl.align.router_replay import (
    RecordedRouting,
    differing_tokens,
    known_routing,
    recorded_routing,
    replayed_routing,
)


class RouterReplay:
    """Replays the routing of one forward at a time. A replay stays active until the next forward begins, because
    gradient checkpointing computes the forward again in the backward."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._record: RecordedRouting | None = None
        self._given: torch.Tensor | None = None
        self.other = self.known = 0
        """Numbers of tokens since the last `take`, in passes that compute old log-probs. `known`: tokens whose routing
        is in the batch. `other`: those of them that the actor's own routers would send to different experts."""

    def begin(self, module: Any, micro_batch: Any, input_ids: torch.Tensor) -> None:
        """Call before a forward of `input_ids`, [B, T] padded on the right or [1, tokens] packed."""
        self._held.close()
        self._given = self._record = None
        routed = micro_batch.get("routed_experts", None)
        if routed is None:
            return
        given = as_forward(routed, input_ids)
        self._held.enter_context(replayed_routing(module, given))
        if not torch.is_grad_enabled():
            self._given, self._record = given, self._held.enter_context(recorded_routing(module))

    def end(self) -> None:
        """Call after a forward. If it ran without gradients (to compute log-probs), update the counts for `take`."""
        if self._record is None or self._given is None:
            return
        self.other += int(differing_tokens(self._record.experts(), self._given).sum())
        self.known += int(known_routing(self._given).any(-1).sum())
        self._record = None

    def take(self) -> tuple[int, int]:
        """Return `other` and `known`, the token counts since the last call, and set both to 0."""
        found, self.other, self.known = (self.other, self.known), 0, 0
        return found


def as_forward(routed: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Flatten verl's nested routing [B, tokens, layers, k] to [positions, layers, k] of the same dtype. The positions
    are those of the flattened `input_ids`. Positions without a token get -1."""
    values, lengths = routed.values(), routed.offsets().diff()
    given = torch.full((*input_ids.shape, *values.shape[1:]), -1, dtype=values.dtype, device=values.device)
    if len(input_ids) != len(lengths):  # packed
        given[0, : len(values)] = values
    else:
        places = torch.arange(input_ids.shape[1], device=lengths.device)[None, :] < lengths[:, None]
        given[places.to(given.device)] = values
    return given.flatten(0, 1)
