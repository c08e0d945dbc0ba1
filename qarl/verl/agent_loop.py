"""QaRL's single-turn agent loop for verl.

It is for models whose tokenizer does not come from their model family. verl joins the turns of a conversation
with a builder, which it chooses by model type. The builder for Qwen refuses a tokenizer without `<|im_end|>`
(verl/utils/tokenizer/continuous_token_wiring.py), but a small model of Qwen's architecture may lack that token. In that
case this loop uses verl's builder for unknown models. The result is the same, because a single turn needs no joining.

The loop also checks that the tokens that it returns for training are those that the engine sampled.

The key `actor_rollout_ref.rollout.agent.default_agent_loop=qarl_single_turn` chooses this loop. `entry_point.py`
registers it as soon as verl has imported its own loops.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from qarl.verl.sampled_text import refuse_other_tokens

TURN_END = "<|im_end|>"


@register("qarl_single_turn")
class PlainSingleTurnAgentLoop(SingleTurnAgentLoop):
    """verl's `single_turn_agent`, but it uses the builder for unknown models if the tokenizer lacks `TURN_END`."""

    def __init__(
        self, *args: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        if TURN_END not in tokenizer.get_vocab():
            hf_model_type = None
        super().__init__(*args, tokenizer=tokenizer, hf_model_type=hf_model_type, **kwargs)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Run verl's loop. Raise UserError if the tokens to train on are not those that the engine sampled."""
        client = self.server_manager
        recorder: Any = Recorder(client)
        self.server_manager = recorder
        try:
            output = await super().run(sampling_params, priority, **kwargs)
        finally:
            self.server_manager = client
        marked = zip(output.response_ids, output.response_mask, strict=True)
        refuse_other_tokens(
            [token for token, mask in marked if mask], recorder.tokens, "an agent loop's response"
        )
        return output


class Recorder:
    """A client of the rollout servers that keeps the tokens they sample. Everything else is the client's."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        response = await self._client.generate(*args, **kwargs)
        self.tokens += list(response.token_ids)
        return response
