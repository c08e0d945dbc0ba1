"""verl's single-turn loop for models whose tokenizer does not come from their model family.

verl joins the turns of a conversation with a builder, which it chooses by model type. The builder for Qwen refuses a
tokenizer without `<|im_end|>` (verl/utils/tokenizer/continuous_token_wiring.py), but a small model of Qwen's
architecture may lack that token. In that case this loop uses verl's builder for unknown models. The result is the same,
because a single turn needs no joining.

The key `actor_rollout_ref.rollout.agent.default_agent_loop=qarl_single_turn` chooses this loop. `qarl.verl.plugin.cpu`
registers it.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TURN_END = "<|im_end|>"


@register("qarl_single_turn")
class PlainSingleTurnAgentLoop(SingleTurnAgentLoop):
    """verl's `single_turn_agent`, but it uses the builder for unknown models if the tokenizer lacks `TURN_END`."""

    def __init__(self, *args: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
        if TURN_END not in tokenizer.get_vocab():
            hf_model_type = None
        super().__init__(*args, tokenizer=tokenizer, hf_model_type=hf_model_type, **kwargs)
