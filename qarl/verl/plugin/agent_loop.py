"""verl's single-turn loop for models whose tokenizer is not their family's.

verl joins turns with a builder chosen by the model's type, and that of Qwen refuses a tokenizer without `<|im_end|>`
(verl/utils/tokenizer/continuous_token_wiring.py), which a small model of Qwen's architecture need not have. If that
token is missing, this loop takes verl's builder for unknown models. In a single turn nothing is joined.

Chosen by `actor_rollout_ref.rollout.agent.default_agent_loop=qarl_single_turn`; registered by `qarl.verl.plugin.cpu`.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

TURN_END = "<|im_end|>"


@register("qarl_single_turn")
class PlainSingleTurnAgentLoop(SingleTurnAgentLoop):
    """verl's `single_turn_agent`, with the default builder for a tokenizer without `TURN_END`."""

    def __init__(self, *args: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
        if TURN_END not in tokenizer.get_vocab():
            hf_model_type = None
        super().__init__(*args, tokenizer=tokenizer, hf_model_type=hf_model_type, **kwargs)
