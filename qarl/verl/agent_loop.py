"""verl's agent loops, for tokenizers that do not come from their model family, and with a check of what they return.

verl joins the turns of a conversation with a builder, which it chooses by model type. The builder for Qwen refuses a
tokenizer without `<|im_end|>` (verl/utils/tokenizer/continuous_token_wiring.py), but a small model of Qwen's
architecture may lack that token. In that case these loops use verl's builder for unknown models. For a single turn the
result is the same, because it needs no joining; between turns that builder adds no newline.

They also check that the tokens that they return for training are those that the engine sampled, in every turn.

    qarl_single_turn   verl's `single_turn_agent`
    qarl_tool_agent    verl's `tool_agent`

`actor_rollout_ref.rollout.agent.default_agent_loop`, or the column `agent_name` of the data, chooses a loop by name.
`entry_point.py` registers these as soon as verl has imported its own.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from qarl.errors import UserError
from qarl.verl import first_error
from qarl.verl.sampled_text import refuse_other_tokens
from qarl.verl.stops import Stops
from qarl.verl.versions import VERSIONS, expanded, placed

TURN_END = "<|im_end|>"


class AnyTokenizer(AgentLoopBase):
    """Chooses verl's builder for unknown models, if the tokenizer lacks `TURN_END`. It stands before verl's class among
    the bases, as the next."""

    def __init__(self, *, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
        if TURN_END not in tokenizer.get_vocab():
            hf_model_type = None
        super().__init__(tokenizer=tokenizer, hf_model_type=hf_model_type, **kwargs)


class SampledTokens(AnyTokenizer):
    """Checks the tokens of verl's loop."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Run verl's loop. Raise UserError if the tokens to train on are not those that the engine sampled."""
        client = self.server_manager
        recorder: Any = Recorder(client)
        verls: Any = super()
        self.server_manager = recorder
        try:
            sampling_params = Stops.of(self.rollout_config).added_to(sampling_params)
            output = await verls.run(sampling_params, priority, **kwargs)
        finally:
            self.server_manager = client
        marked = zip(output.response_ids, output.response_mask, strict=True)
        trained = [token for token, mask in marked if mask]
        try:
            refuse_other_tokens(trained, recorder.tokens, "an agent loop's response")
        except UserError as error:
            first_error.keep(error)
            raise
        if recorder.versions:
            output.extra_fields[VERSIONS] = placed(recorder.versions, output.response_mask)
        return output


@register("qarl_single_turn")
class PlainSingleTurnAgentLoop(SampledTokens, SingleTurnAgentLoop):
    """verl's `single_turn_agent`."""


@register("qarl_tool_agent")
class PlainToolAgentLoop(SampledTokens, ToolAgentLoop):
    """verl's `tool_agent`."""


class Recorder:
    """A client of the rollout servers that keeps the tokens they sample, and their versions if the servers say them.
    Everything else is the client's."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.tokens: list[int] = []
        self.versions: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        response = await self._client.generate(*args, **kwargs)
        self.tokens += list(response.token_ids)
        self.versions += expanded(response.extra_fields.get(VERSIONS, []))
        return response
