"""Conversations with `rollout.environment` in verl: an agent loop that holds them as the local backend does.

The key `actor_rollout_ref.rollout.agent.default_agent_loop=qarl_environment` chooses it, and the section
`actor_rollout_ref.rollout.multi_turn` has its settings (`qarl.verl.config_classes.QaRLMultiTurnConfig`). Turns, frames,
limits and replies are those of `qarl.turns`. One loop holds one conversation, and verl runs many at once, so this is
`qarl.turns.loop.hold` for a single one, awaited.

verl's server says only that a turn is complete. A turn that has the limit's tokens and ends with no stop token was cut.
Requests have no seeds, as all of verl's.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

from qarl.data.environments import Environment
from qarl.data.prompts import Prompt
from qarl.data.response_text import response_texts
from qarl.data.rewards import TURN_SCORES, reads_turn_scores
from qarl.errors import UserError
from qarl.rollout.turns import limits_of, unread_rewards
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.loop import Request, request, take
from qarl.verl import first_error
from qarl.verl.agent_loop import AnyTokenizer
from qarl.verl.config_classes import multi_turn_settings
from qarl.verl.response_ends import end_tokens
from qarl.verl.reward import reward_names
from qarl.verl.reward_manager import keeps_special_tokens
from qarl.verl.stops import Stops


@cache
def environment_of(
    spec: str, workers: int, timeout_s: float | None, folder: str | None
) -> Environment:
    """Return one environment for each of its settings, so that its processes are reused."""
    return Environment(spec, workers=workers, timeout_s=timeout_s, folder=folder)


@cache
def stops_of(path: str, tokenizer: Any, trust_remote_code: bool) -> frozenset[int]:
    """Return the tokens at which vLLM ends a turn. The model's files are read once."""
    return frozenset(end_tokens(path, tokenizer, trust_remote_code=trust_remote_code))


@register("qarl_environment")
class EnvironmentAgentLoop(AnyTokenizer):
    """Holds a conversation with the environment. Its output's `extra_fields` have what rewards and metrics read:

    messages       the whole conversation
    turn_scores    the rewards that the environment gave
    finish_reason  why it ended (`qarl.turns.conversation.Conversation`)
    failures       calls of the environment that failed
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        turns = self.rollout_config.multi_turn
        settings = multi_turn_settings(turns)
        model = self.config.actor_rollout_ref.model
        self._environment = environment_of(
            turns.environment, settings.workers, settings.timeout_s, turns.folder
        )
        self._stops = stops_of(
            model.path, self.tokenizer, bool(model.get("trust_remote_code", False))
        )
        variables: Any = OmegaConf.to_container(OmegaConf.create(self.apply_chat_template_kwargs))
        self._added = Stops.of(self.rollout_config)
        self._frame = ChatFrame(self.tokenizer, self._stops, variables, self._added.token_ids)
        self._limits = limits_of(settings, self.rollout_config.response_length)
        self._keeps = keeps_special_tokens(self.config)
        self._rewards = reward_names(self.config)

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **row: Any
    ) -> AgentLoopOutput:
        """Hold a conversation from the prompt of `row`. Raise UserError if the environment returns what is no reply."""
        try:
            return await self._hold(sampling_params, priority, row)
        except UserError as error:
            first_error.keep(error)
            raise

    async def _hold(
        self, sampling_params: dict[str, Any], priority: int, row: dict[str, Any]
    ) -> AgentLoopOutput:
        messages = [dict(message) for message in row["raw_prompt"]]
        prompt = _prompt(row, messages, await self.ct_build_initial_tokens(messages))
        conversation = Conversation(prompt.prompt_token_ids, [*messages])
        ends = self._stops.union(self._added.token_ids)
        sampling_params = self._added.added_to(sampling_params)
        engine = _Turns(self.server_manager, sampling_params, priority, ends)
        metrics: dict[str, Any] = {}
        while conversation.finish_reason is None:
            with simple_timer("generate_sequences", metrics):
                turn = await engine.sample(request(0, conversation, self._limits))
            if turn.finish_reason == "length" and self._added.in_text(
                turn.token_ids, self.tokenizer
            ):
                turn = turn._replace(finish_reason="stop")
            (text,) = response_texts(
                self.tokenizer, [turn.token_ids], keep_special_tokens=self._keeps
            )
            conversation.add_turn(turn, text)
            with simple_timer("tool_calls", metrics):
                reply = await self._environment.answer(prompt, conversation)
            take(conversation, turn, reply, self._frame, self._limits)
        if conversation.rewards and not any(map(reads_turn_scores, self._rewards)):
            raise unread_rewards(", ".join(self._rewards))
        metrics["num_preempted"] = engine.preempted
        told = {
            **engine.extra_fields,
            "messages": conversation.messages,
            TURN_SCORES: conversation.rewards,
            "tool_rewards": [],
            "finish_reason": conversation.finish_reason,
            "failures": conversation.failures,
        }
        return AgentLoopOutput(
            prompt_ids=conversation.prompt_token_ids,
            response_ids=conversation.response_token_ids,
            response_mask=[int(sampled) for sampled in conversation.mask],
            response_logprobs=conversation.log_probs if engine.has_log_probs else None,
            routed_experts=engine.routed_experts,
            num_turns=2 * len(conversation.turns),
            metrics=AgentLoopMetrics(**metrics),
            extra_fields=told,
        )


class _Turns:
    """The requests of a conversation's turns, and what the server returned beside tokens and log-probs.

    routed_experts  of the row's tokens up to, not including, its last: each token's are those of the request that
                    computed it first. None if the server returns none
    extra_fields    the server's, of the first turn, with the last `max_global_steps`
    preempted       number of preemptions, or -1 if the server does not count them
    """

    def __init__(
        self, client: Any, sampling_params: dict[str, Any], priority: int, stops: frozenset[int]
    ) -> None:
        self._client = client
        self._sampling = sampling_params
        self._priority = priority
        self._stops = stops
        self._name = (
            uuid4().hex
        )  # the same for all turns, so that the same server has the prefix in its cache
        self.has_log_probs = bool(sampling_params.get("logprobs"))
        self.routed_experts: Any = None
        self.extra_fields: dict[str, Any] = {}
        self.preempted = -1

    async def sample(self, asked: Request) -> Sampled:
        """Sample a turn. Raise RuntimeError if the server aborted it."""
        output = await self._client.generate(
            request_id=self._name,
            prompt_ids=asked.token_ids,
            sampling_params={**self._sampling, "max_tokens": asked.max_tokens},
            priority=self._priority,
        )
        tokens = list(output.token_ids)
        if not tokens or output.stop_reason == "aborted":
            raise RuntimeError(f"the server ended turn {asked.turn + 1} with {output.stop_reason}")
        self._note(output)
        cut = len(tokens) >= asked.max_tokens and tokens[-1] not in self._stops
        log_probs = list(output.log_probs) if output.log_probs else [0.0] * len(tokens)
        return Sampled(tokens, log_probs, "length" if cut else "stop")

    def _note(self, output: Any) -> None:
        fields = {**output.extra_fields}
        newest = fields.get("max_global_steps")
        self.extra_fields = {**fields, **self.extra_fields}
        if newest is not None:
            self.extra_fields["max_global_steps"] = newest
        if output.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + output.num_preempted
        if output.routed_experts is not None:
            known = [] if self.routed_experts is None else [self.routed_experts]
            new = np.asarray(output.routed_experts)[sum(map(len, known)) :]
            self.routed_experts = np.concatenate([*known, new])


def _prompt(row: dict[str, Any], messages: list[Any], token_ids: list[int]) -> Prompt:
    """Return the prompt of a row of verl's dataset."""
    return Prompt(
        index=row.get("index", 0),
        data_source=str(row["data_source"]),  # verl hands over NumPy's kind of text
        messages=messages,
        prompt_token_ids=list(token_ids),
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=dict(row.get("extra_info") or {}),
    )
