"""What verl's workers of a rollout call: QaRL's single-turn agent loop, and the reward of a response.

The loop is for models whose tokenizer does not come from their model family. verl joins the turns of a conversation
with a builder, which it chooses by model type. The builder for Qwen refuses a tokenizer without `<|im_end|>`
(verl/utils/tokenizer/continuous_token_wiring.py), but a small model of Qwen's architecture may lack that token. In that
case this loop uses verl's builder for unknown models. The result is the same, because a single turn needs no joining.

The loop also checks that the tokens that it returns for training are those that the engine sampled.

The key `actor_rollout_ref.rollout.agent.default_agent_loop=qarl_single_turn` chooses this loop. `entry_point.py`
registers it as soon as verl has imported its own loops.

`score` is the custom reward of verl's config. verl calls a custom reward in a thread of a Ray worker, without a time
limit, and accepts any result. It trains on NaN, and `SystemExit` ends the worker. `score` makes the checks of the local
backend, with its time limit. `reward_kwargs` contain the name of the user's function and the limit. If `score` raises,
verl logs the error and counts the prompt as failed. Built-in rewards have no limit here, because they have their own.
`math_verify` uses a pool of processes, and a limit here would also count its time in the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from qarl.data.rewards import BUILTIN, call_reward, get_reward_fn, score_of
from qarl.rollout.response_fingerprint import refuse_other_tokens

TURN_END = "<|im_end|>"
_LOADING = threading.Lock()
_load = cache(get_reward_fn)


@register("qarl_single_turn")
class PlainSingleTurnAgentLoop(SingleTurnAgentLoop):
    """verl's `single_turn_agent`, but it uses the builder for unknown models if the tokenizer lacks `TURN_END`."""

    def __init__(self, *args: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
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
        refuse_other_tokens([token for token, mask in marked if mask], recorder.tokens, "an agent loop's response")
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


def score(*, function: str, timeout_s: float | None, **arguments: Any) -> float | dict[str, Any]:
    """Score one response with the reward function `function`. Return the score, or the function's dict with `score`.

    `arguments`: those that verl passes to a reward function, all by name. Raise the same UserErrors as
    `qarl.data.rewards.score_responses`.
    """
    with _LOADING:
        fn = _load(function)
    result = call_reward(fn, arguments, timeout_s=None if function in BUILTIN else timeout_s)
    number = score_of(fn, result, arguments)
    return {**result, "score": number} if isinstance(result, Mapping) else number
