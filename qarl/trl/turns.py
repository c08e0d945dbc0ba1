"""Several turns under TRL: who answers the model's turns, and what TRL gets of a conversation.

A TRL user gives `tools`, an `environment_factory`, or QaRL's `environment`. QaRL's engine samples all turns
(`qarl.rollout.turns`), because TRL's own loop samples later turns without it. TRL gets the whole conversation as one
completion, with the mask of the tokens that the model sampled: as `env_mask` of `rollout_func`, or, with tools, as
what its loop of tool calls would have returned.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object

from qarl.checks.generation import stop_token_ids
from qarl.config import Config
from qarl.data.environments import Environment
from qarl.data.prompts import Prompt
from qarl.data.rewards import TURN_SCORES, reads_turn_scores
from qarl.errors import UserError
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.rollout.turns import Answers, Conversations
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import sessions_at_once
from qarl.trl.config import in_trls_words
from qarl.trl.environment import InProcess
from qarl.trl.tools import Tools
from qarl.turns.conversation import Conversation, Message
from qarl.turns.loop import Limits
from qarl.turns.metrics import turn_metrics

CHARACTERS_PER_TOKEN = 1000
"""More than a token of any tokenizer has. A tool's answer is cut only where it would not fit anyway."""
IN_PROCESS = "qarl.trl:turns"
"""`rollout.environment` of a run whose turns are answered in the trainer's process."""


@dataclass(frozen=True)
class Given:
    """What the user gives to answer turns: at most one kind."""

    environment: str | Callable[..., Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()
    factory: Any = None

    @classmethod
    def of(cls, environment: Any, arguments: Mapping[str, Any]) -> Given:
        """`arguments`: those of `GRPOTrainer`."""
        tools = arguments.get("tools") or ()
        return cls(environment, tools, arguments.get("environment_factory"))

    @property
    def calls_tools(self) -> bool:
        """Whether the turns are answered by tools, of which the prompts tell."""
        return bool(self.tools) or self.factory is not None

    @property
    def spec(self) -> str | None:
        """The key `rollout.environment` of the run."""
        if isinstance(self.environment, str):
            return self.environment
        return IN_PROCESS if self.calls_tools or self.environment is not None else None

    def answers(self, run: Config) -> Environment | InProcess | None:
        """Return what answers turns if no tools do. Raise UserError if the function cannot be loaded."""
        timeout_s = run.multi_turn.timeout_s
        if isinstance(self.environment, str):
            workers = run.multi_turn.workers
            loaded = Environment(self.environment, workers=workers, timeout_s=timeout_s)
            in_trls_words(loaded.load)
            return loaded
        return self.environment and InProcess(self.environment, timeout_s=timeout_s)

    @property
    def _factories(self) -> list[Any]:
        return list(self.factory.values()) if isinstance(self.factory, dict) else [self.factory]

    @property
    def sources(self) -> list[Any]:
        """The functions and classes whose source decides what a turn is answered."""
        return [
            each for each in (*self.tools, *self._factories, self.environment) if callable(each)
        ]

    @property
    def probe_tools(self) -> list[Callable[..., Any]]:
        """The tools that prompts tell of, as far as they are known before an environment is made."""
        classes = [each for each in self._factories if inspect.isclass(each)]
        return [*self.tools, *(method for each in classes for method in methods_of(each))]


def methods_of(environment: type) -> list[Callable[..., Any]]:
    """Return the methods of a class of environments that TRL takes for tools."""
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    others = ("reset", "get_reward")
    return [method for name, method in members if name not in others and not name.startswith("_")]


class Turns:
    """Holds the conversations of a trainer's rollouts, and keeps those of the last one: `held`."""

    def __init__(
        self,
        conversations: Conversations,
        tools: Tools | None,
        rewards: Sequence[Any],
        *,
        longest_prompt: int,
    ) -> None:
        """`rewards`: the user's reward functions, or their names. `longest_prompt`: in tokens."""
        self.conversations = conversations
        self.tools = tools
        self.held: list[Conversation] = []
        self._starts: list[int] = []
        self._unread = unread_by(rewards)
        self._longest_prompt = longest_prompt

    @classmethod
    def of(
        cls,
        given: Given,
        answers: Environment | InProcess | None,
        trainer: Any,
        run: Config,
        policy: Policy,
        rewards: Any,
    ) -> Turns | None:
        """Return what holds the conversations of `trainer`, a `GRPOTrainer`, or None without several turns.

        `answers`: those of `given`. `rewards`: the user's reward functions."""
        if given.spec is None or (given.calls_tools and not trainer.tools):
            return None  # an environment of TRL's may have no tools
        limits = limits_of(given, trainer.args.max_tool_calling_iterations, run)
        tools = None
        answering: Answers | None = answers
        if answering is None:
            timeout_s = run.multi_turn.timeout_s
            answering = tools = Tools(trainer, timeout_s=timeout_s, turns=limits.turns)
        tokenizer = trainer.processing_class
        template = {"chat_template": trainer.chat_template} if trainer.chat_template else {}
        conversations = Conversations(
            answering,
            tokenizer,
            stop_token_ids(run.model.path, tokenizer, policy.model.config),
            limits,
            variables={**template, **trainer.chat_template_kwargs},
            sessions=sessions_at_once(run, policy),
        )
        listed = rewards if isinstance(rewards, list) else [rewards]
        return cls(conversations, tools, listed, longest_prompt=run.data.max_prompt_length)

    def hold(
        self,
        trainer: Any,
        engine: RolloutEngine,
        prompts: Sequence[list[Message]],
        token_ids: Sequence[list[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int],
    ) -> tuple[RolloutBatch, dict[str, list[Any]]]:
        """Hold a conversation from each prompt. Return it as a response, and the further fields of `rollout_func`."""
        if self.tools is not None:
            self.tools.start()
        self._check_lengths(token_ids)
        rows = prompts_of(prompts, token_ids, trainer.rows)
        batch = self.conversations.hold(engine, rows, sampling, seeds)
        assert batch.conversations is not None
        self.held = batch.conversations
        self._starts = [len(prompt) for prompt in prompts]
        self._measure(trainer)
        if self.tools is not None:
            return batch, {}
        self._check_rewards()
        return batch, {"env_mask": self.masks, **columns_of(self.held)}

    @property
    def masks(self) -> list[list[int]]:
        """1 at the tokens of each completion that the model sampled, else 0."""
        return [[int(sampled) for sampled in conversation.mask] for conversation in self.held]

    @property
    def completions(self) -> list[list[Message]]:
        """The messages behind each prompt."""
        return [
            conversation.messages[start:]
            for start, conversation in zip(self._starts, self.held, strict=True)
        ]

    def _measure(self, trainer: Any) -> None:
        """Add `turns/*` of all processes to TRL's metrics."""
        everyone = gather_object([turn_metrics(self.held)])
        metrics = trainer._metrics["train" if trainer.training else "eval"]
        for name in everyone[0]:
            values = [own[name] for own in everyone]
            largest = name.endswith("/max")
            metrics[name].append(max(values) if largest else sum(values) / len(values))

    def _check_lengths(self, token_ids: Sequence[list[int]]) -> None:
        longest = max(map(len, token_ids))
        if longest > self._longest_prompt:
            raise UserError(
                f"a prompt has {longest} tokens, and vllm_max_model_length leaves {self._longest_prompt}",
                where="environment_factory: reset",
                why="what reset returns is appended to the prompt",
                fix="raise vllm_max_model_length, or let reset return less",
            )

    def _check_rewards(self) -> None:
        if not self._unread or not any(conversation.rewards for conversation in self.held):
            return
        raise UserError(
            f"the environment gives rewards, and {self._unread} does not read them",
            where="reward_funcs",
            why="they would have no effect",
            fix='add "environment" to reward_funcs, which is their sum, or let the environment return no reward',
        )


def unread_by(rewards: Sequence[Any]) -> str:
    """Return the names of the reward functions if none of them reads what an environment gives, or an empty text."""
    if all(isinstance(reward, str) and not reads_turn_scores(reward) for reward in rewards):
        return ", ".join(rewards)
    return ""


def limits_of(given: Given, iterations: int | None, run: Config) -> Limits:
    """Return the limits of conversations. `iterations`: TRL's `max_tool_calling_iterations`, answers that are read."""
    turns = run.multi_turn
    response = run.data.max_response_length
    if given.calls_tools:
        most = sys.maxsize if iterations is None else iterations + 1
        characters = CHARACTERS_PER_TOKEN * response
        return Limits(most, response, turns.max_turn_length, characters)
    return Limits(
        turns.max_assistant_turns if iterations is None else iterations + 1,
        response,
        turns.max_turn_length,
        turns.max_tool_response_length,
        turns.tool_response_truncate_side,
    )


def prompts_of(
    prompts: Sequence[list[Message]],
    token_ids: Sequence[list[int]],
    rows: Sequence[Mapping[str, Any]],
) -> list[Prompt]:
    """Return TRL's prompts with what an environment gets of their rows of the dataset."""
    return [
        Prompt(
            index,
            row.get("data_source") or "",
            messages,
            list(ids),
            row.get("ground_truth", (row.get("reward_model") or {}).get("ground_truth")),
            row.get("extra_info") or {},
        )
        for index, (messages, ids, row) in enumerate(zip(prompts, token_ids, rows, strict=True))
    ]


def columns_of(held: Sequence[Conversation]) -> dict[str, list[Any]]:
    """Return the `TURN_COLUMNS` of conversations."""
    return {
        "num_turns": [2 * len(conversation.turns) for conversation in held],
        "messages": [conversation.messages for conversation in held],
        TURN_SCORES: [conversation.rewards for conversation in held],
    }
