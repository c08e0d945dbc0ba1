"""The conversations of a rollout: the engine samples a turn of each, and an environment answers (`qarl.turns`).

Each turn is a request of its own, whose prompt is the exact ids so far. So the engine prefills what it decoded in the
turn before, but for what its prefix cache has. Where such a prefill has other bits than decoding, conversations are
held in sessions instead (`qarl.rollout.sessions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from qarl.config import Config
from qarl.config.multi_turn import MultiTurnConfig
from qarl.console import say
from qarl.data.environments import Environment
from qarl.data.prompts import Prompt
from qarl.data.response_text import response_texts
from qarl.data.rewards import TURN_SCORES, reads_turn_scores
from qarl.errors import UserError
from qarl.progress import live
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.rollout.sessions import Sessions
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.loop import Failure, Limits, Request, hold, turn_seed
from qarl.turns.reply import Reply

WARNINGS = 5
"""Rollouts of a run whose failed calls are shown."""


class Answers(Protocol):
    """What answers turns: an `Environment`, or what another framework's user gives."""

    def respond(self, held: Sequence[tuple[Prompt, Conversation]]) -> list[Reply | Failure]: ...

    def stop(self) -> None: ...


class Engine(Protocol):
    """What conversations need of a `RolloutEngine`."""

    llm: Any

    def generate(self, *arguments: Any, **more: Any) -> RolloutBatch: ...


def limits_of(turns: MultiTurnConfig, response: int) -> Limits:
    """Return the limits of a run's conversations. `response`: `data.max_response_length`."""
    return Limits(
        turns=turns.max_assistant_turns,
        response=response,
        turn=turns.max_turn_length,
        characters=turns.max_tool_response_length,
        side=turns.tool_response_truncate_side,
    )


def conversations_of(
    config: Config, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Conversations | None:
    """Return what holds the conversations of a run, or None if it has no environment, which is loaded.

    Raise UserError if that fails."""
    if config.rollout.environment is None:
        return None
    turns = config.multi_turn
    environment = Environment(
        config.rollout.environment, workers=turns.workers, timeout_s=turns.timeout_s
    )
    environment.load()
    return Conversations(
        environment,
        tokenizer,
        stop_token_ids,
        limits_of(turns, config.data.max_response_length),
        keep_special_tokens=config.reward.keep_special_tokens,
        variables=config.data.apply_chat_template_kwargs,
        also=config.rollout.stop_token_ids,
    )


@dataclass
class Conversations:
    """Holds conversations with an `environment`. `stop_token_ids`: those with which the model ends a turn. `also`:
    `rollout.stop_token_ids`.

    `keep_special_tokens`: as `reward.keep_special_tokens`, for the text of a turn that the environment reads.
    `variables`: of the chat template, by name.
    `sessions`: number of conversations that are held in sessions at a time; None: each turn is a request of its own."""

    environment: Answers
    tokenizer: Any
    stop_token_ids: Sequence[int]
    limits: Limits
    keep_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    also: Sequence[int] = ()
    sessions: int | None = None
    frame: ChatFrame = field(init=False)
    _warnings: int = 0

    def __post_init__(self) -> None:
        self.frame = ChatFrame(self.tokenizer, self.stop_token_ids, self.variables, self.also)

    def hold(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        seeds: Sequence[int] | None = None,
        *,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> RolloutBatch:
        """Hold a conversation from each prompt. Return it as a response, with the tokens of the environment.

        `seeds`: of the first turns, as of `RolloutEngine.generate`. `timed`: measures the time of the environment.

        Raises:
            UserError: the environment cannot be loaded or returns what is no reply, or the chat template refuses it.
            Whatever `RolloutEngine.generate` raises.
        """
        conversations = [
            Conversation(
                prompt.prompt_token_ids, [*prompt.messages], in_session=self.sessions is not None
            )
            for prompt in prompts
        ]
        rollout = _Rollout(engine, sampling, seeds, len(prompts))

        def respond(held: Sequence[tuple[int, Conversation]]) -> list[Reply | Failure]:
            with timed(), live.phase("environment"):
                pairs = [(prompts[row], conversation) for row, conversation in held]
                replies = self.environment.respond(pairs)
            rollout.failures += [reply for reply in replies if isinstance(reply, Failure)]
            return replies

        def decode(turns: Sequence[Sequence[int]]) -> list[str]:
            return response_texts(
                self.tokenizer, turns, keep_special_tokens=self.keep_special_tokens
            )

        rows = list(enumerate(conversations))
        size = self.sessions or len(rows)
        for start in range(0, len(rows), size):
            with rollout.in_sessions() if self.sessions else nullcontext():
                hold(
                    rows[start : start + size],
                    generate=rollout.sample,
                    respond=respond,
                    decode=decode,
                    frame=self.frame,
                    limits=self.limits,
                )
        self._warn(rollout.failures, sum(len(conversation.turns) for conversation in conversations))
        return rollout.batch(conversations)

    def _warn(self, failures: Sequence[Failure], calls: int) -> None:
        """Say which calls of the environment failed, a few times in a run. `calls`: number of all."""
        if not failures or self._warnings == WARNINGS:
            return
        self._warnings += 1
        last = "; no more of this is shown, look at turns/failures" * (self._warnings == WARNINGS)
        say(
            f"warning: {len(failures)} of {calls} calls of the environment failed, and the model was told so; the "
            f"first {failures[0].why}{last}"
        )


class _Rollout:
    """The requests of the conversations' turns, and what the engine returned beside tokens and log-probs.

    failures       of calls of the environment
    top_token_ids  of each conversation, the likeliest token at each position of its turns
    routed         of each conversation, the experts of its tokens up to, not including, its last
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingConfig,
        seeds: Sequence[int] | None,
        count: int,
    ) -> None:
        self._engine = engine
        self._sessions: Sessions | None = None
        self._sampling = sampling
        self._seeds = seeds
        self._versions: list[int] = []
        self._preemptions = 0
        self.failures: list[Failure] = []
        self.top_token_ids: list[list[list[int]]] = [[] for _ in range(count)]
        self.routed: list[list[torch.Tensor]] = [[] for _ in range(count)]

    @contextmanager
    def in_sessions(self) -> Iterator[None]:
        """Sample turns in sessions, which this closes at its end."""
        self._sessions = Sessions()
        try:
            yield
        except BaseException:
            # An engine that is lost refuses this, too. Its first error says why.
            with suppress(Exception):
                self._sessions.close(self._engine.llm)
            raise
        else:
            self._sessions.close(self._engine.llm)
        finally:
            self._sessions = None

    def sample(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample the turns that are asked for."""
        seeds = None
        if self._seeds is not None:
            seeds = [turn_seed(self._seeds[request.row], request.turn) for request in requests]
        more = {}
        if self._sessions is not None:
            more["run"] = self._sessions.turn_of([request.row for request in requests])
        answer = self._engine.generate(
            [request.token_ids for request in requests],
            self._sampling,
            seeds,
            max_tokens=[request.max_tokens for request in requests],
            **more,
        )
        self._versions.append(answer.weight_version)
        self._preemptions += answer.preemptions
        for place, request in enumerate(requests):
            if answer.top_token_ids is not None:
                self.top_token_ids[request.row].append(answer.top_token_ids[place])
            if answer.routed_experts is not None:
                known = sum(map(len, self.routed[request.row]))
                # Each token's experts are those of the request that computed it first.
                self.routed[request.row].append(answer.routed_experts[place][known:])
        return [
            Sampled(tokens, log_probs, reason)
            for tokens, log_probs, reason in zip(
                answer.response_token_ids,
                answer.rollout_log_probs,
                answer.finish_reasons,
                strict=True,
            )
        ]

    def batch(self, conversations: Sequence[Conversation]) -> RolloutBatch:
        """Return the conversations as responses. Raise RuntimeError if the weights changed between two turns."""
        if len(set(self._versions)) > 1:
            raise RuntimeError(f"turns were sampled from weights of versions {self._versions}")
        top = None
        if self._sampling.top_tokens:
            top = [
                _at_turns(conversation, tokens)
                for conversation, tokens in zip(conversations, self.top_token_ids, strict=True)
            ]
        return RolloutBatch(
            prompt_token_ids=[conversation.prompt_token_ids for conversation in conversations],
            response_token_ids=[conversation.response_token_ids for conversation in conversations],
            rollout_log_probs=[conversation.log_probs for conversation in conversations],
            finish_reasons=[str(conversation.finish_reason) for conversation in conversations],
            weight_version=self._versions[0],
            top_token_ids=top,
            preemptions=self._preemptions,
            routed_experts=[torch.cat(parts) for parts in self.routed] if self.routed[0] else None,
            conversations=list(conversations),
        )


def _at_turns(conversation: Conversation, tokens: Sequence[Sequence[int]]) -> list[int]:
    """Return the `tokens` of each turn at its place in the response. At contexts there are the response's own."""
    row = list(conversation.response_token_ids)
    for (start, end), values in zip(conversation.turns, tokens, strict=True):
        row[start:end] = values
    return row


def scored_prompts(
    prompts: Sequence[Prompt], rollout: RolloutBatch, rewards: Sequence[str]
) -> Sequence[Prompt]:
    """Return the prompts as the reward function gets them: after conversations, with these in `extra_info`.

    num_turns    messages of user and model, as verl counts them
    messages     the whole conversation
    turn_scores  the rewards that the environment gave

    Raise UserError if the environment gave rewards that none of the functions `rewards` reads.
    """
    conversations = rollout.conversations
    if conversations is None:
        return prompts
    unread = not any(map(reads_turn_scores, rewards))
    if unread and any(each.rewards for each in conversations):
        raise unread_rewards(", ".join(rewards))
    return [
        replace(
            prompt,
            extra_info={
                **prompt.extra_info,
                "num_turns": 2 * len(conversation.turns),
                "messages": conversation.messages,
                TURN_SCORES: conversation.rewards,
            },
        )
        for prompt, conversation in zip(prompts, conversations, strict=True)
    ]


def unread_rewards(reward: str) -> UserError:
    """Return the error about rewards of an environment that the built-in functions `reward` do not read."""
    return UserError(
        f"the environment gives rewards, and {reward} does not read them",
        where="rollout.environment",
        why="they would have no effect",
        fix="set reward.function=environment, which is their sum (or add it to reward.functions), or let it give none",
    )
