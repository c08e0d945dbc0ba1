"""Refuses tools, environments and prompts of several turns that could not be served, before any work is done.

TRL finds some of these in its own constructor, in words about its internals, and others in the first batch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers.utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from qarl.config.types import TURN_REWARDS
from qarl.errors import UserError, shortened
from qarl.trl.arguments import check_rewards
from qarl.trl.config import QaRLConfig
from qarl.trl.environment import name_of
from qarl.trl.rewards import TURN_COLUMNS, check_ground_truths, is_name
from qarl.trl.turns import Given, Turns, methods_of, prompts_of
from qarl.turns.conversation import Conversation, Message, Sampled
from qarl.turns.loop import Failure

_WAYS = "tools, environment_factory or environment"
_PROBE = "answer7f3a"
"""The answer of a tool in a rendering. It is one word, which no template changes."""
_ANY: Message = {"role": "user", "content": "?"}


def check_given(given: Given, args: QaRLConfig, train_dataset: Any) -> None:
    """Raise UserError for the first of tools, environments and their settings that cannot be served."""
    if given.environment is not None and given.calls_tools:
        both = "tools" if given.tools else "environment_factory"
        raise UserError(
            f"{both} and environment were given, and each would answer the model's turns",
            where=f"{both}, environment",
            fix=f"leave one out: {both} answers the calls that TRL's parser finds, environment answers every turn",
        )
    _check_settings(given, args)
    if given.spec is None:
        return
    _check_tools(given.tools)
    if given.factory is not None:
        _check_factories(given.factory, args, train_dataset)
    if given.environment is not None:
        _check_environment(given.environment)
    _check_prompts(train_dataset)


def _check_settings(given: Given, args: QaRLConfig) -> None:
    """Raise UserError for a setting of turns that has no effect."""
    fields = type(args).__dataclass_fields__
    by_name = isinstance(given.environment, str)
    for name, is_read, needs in (
        ("max_tool_calling_iterations", given.spec is not None, _WAYS),
        (
            "environment_workers",
            by_name,
            "an environment by name; others run in the trainer's process",
        ),
        *(
            (name, given.environment is not None, "environment; the answers of tools are not cut")
            for name in ("max_tool_response_length", "tool_response_truncate_side")
        ),
    ):
        if getattr(args, name) != fields[name].default and not is_read:
            raise UserError(
                f"{name}={getattr(args, name)} has no effect",
                where=name,
                why=f"it belongs to {needs}",
                fix=f"leave {name} out",
            )
    most = args.max_tool_calling_iterations
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise UserError(
            f"max_tool_calling_iterations={most!r} is no number of answers",
            where="max_tool_calling_iterations",
            fix="set it to 0 or more, or leave it out",
        )


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise UserError(
            f"tools is {shortened(tools)}",
            where="tools",
            fix="give a list of functions: tools=[f, g]",
        )
    for tool in tools:
        if not callable(tool) or inspect.isclass(tool):
            raise UserError(
                f"a tool is {shortened(tool)}, which is no function",
                where="tools",
                fix="give functions with type hints and a docstring; a class is an environment_factory",
            )
    check_schemas(tools)


def check_schemas(tools: Sequence[Callable[..., Any]]) -> None:
    """Raise UserError for the first of `tools` that a prompt cannot tell of, or whose name another has too."""
    names = Counter(name_of(tool) for tool in tools)
    for name, count in names.items():
        if count > 1:
            raise UserError(
                f"{count} tools have the name {name!r}",
                where="tools",
                why="a call names its tool, and TRL would call the last of them",
                fix="rename all but one",
            )
    for tool in tools:
        try:
            get_json_schema(tool)
        except Exception as error:  # of several kinds, for docstrings and type hints
            raise UserError(
                f"the tool {name_of(tool)!r} cannot be described to the model",
                where="tools",
                why=" ".join(str(error).split())[:300],
                fix="give each argument a type hint, and a docstring that says what it does, with a section Args: "
                "that has a line `name: meaning` for each argument",
            ) from None


def _check_factories(factory: Any, args: QaRLConfig, train_dataset: Any) -> None:
    where = "environment_factory"
    factories = factory if isinstance(factory, dict) else {None: factory}
    for name, each in factories.items():
        if not callable(each):
            raise UserError(
                f"an environment is {shortened(each)}, which cannot be called",
                where=where if name is None else f"{where}[{name!r}]",
                fix="give a class, or a function that returns a new environment",
            )
        if inspect.isclass(each):
            if not callable(getattr(each, "reset", None)):
                raise UserError(
                    f"the environment {each.__name__} has no method reset",
                    where=where,
                    why="TRL calls it before each conversation",
                    fix="define reset(self, **kwargs), which returns None or text for the end of the prompt",
                )
            check_schemas(methods_of(each))
    if args.vllm_max_model_length is None:
        raise UserError(
            "the prompts of an environment_factory have unknown lengths",
            where="vllm_max_model_length",
            why="reset may append to them, and the engine needs a limit",
            fix="set vllm_max_model_length to the tokens of the longest prompt, with what reset appends, plus "
            "max_completion_length",
        )
    if isinstance(factory, dict):
        _check_routes(factory, train_dataset)


def _check_routes(factory: dict[Any, Any], data: Any) -> None:
    """Raise UserError if a row of the dataset names no environment of `factory`."""
    columns = getattr(data, "column_names", None) or []
    if not hasattr(data, "__len__"):
        return
    named = set(data["environment"]) if "environment" in columns else {None}
    unknown = sorted(map(repr, named - set(factory)))
    if unknown:
        raise UserError(
            f"rows of the dataset name the environment {', '.join(unknown)}",
            where="train_dataset: column environment",
            why=f"environment_factory has {', '.join(map(repr, factory))}",
            fix="give each row the name of its environment",
        )


def _check_environment(environment: Any) -> None:
    where = "environment"
    if isinstance(environment, str):
        return  # its name is checked with the config
    if not callable(environment) or inspect.isclass(environment):
        raise UserError(
            f"environment is {shortened(environment)}, which is no function",
            where=where,
            fix="give a function, an object with a method __call__, or a name such as file.py:function; a class with "
            "tools is an environment_factory",
        )
    passed = ("messages", "data_source", "ground_truth", "extra_info")
    try:
        inspect.signature(environment).bind(**dict.fromkeys(passed))
    except TypeError as error:
        raise UserError(
            f"the environment cannot be called: {error}",
            where=f"{where}: {name_of(environment)}{inspect.signature(environment)}",
            why=f"it gets {', '.join(passed)}, each by name",
            fix="name the arguments that you need, and add **kwargs for the others",
        ) from None


def _check_prompts(data: Any) -> None:
    """Raise UserError if a prompt is text: it has no chat template, which an answer needs."""
    if not hasattr(data, "__len__") or "prompt" not in getattr(data, "column_names", ()):
        return
    for row, prompt in enumerate(data["prompt"]):
        if isinstance(prompt, str):
            raise UserError(
                f"the prompt of row {row} is text, {shortened(prompt)}",
                where="train_dataset: column prompt",
                why=f"{_WAYS} answer messages of a chat, in the frame of its template",
                fix='write [{"role": "user", "content": "..."}]',
            )


def check_reward_source(reward_funcs: Any, given: Given, columns: Collection[str]) -> None:
    """Raise UserError if the responses have no reward, or a reward function cannot be called as TRL calls it."""
    if given.factory is not None and (reward_funcs is None or reward_funcs == []):
        return  # TRL takes the environment's get_reward, and refuses an environment without it
    listed = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for function in listed:
        if isinstance(function, str) and function in TURN_REWARDS and given.environment is None:
            raise UserError(
                f"reward_funcs={function} is the sum of the rewards of environment, which was not given",
                where="reward_funcs",
                fix="give environment=..., or another reward function",
            )
    more = TURN_COLUMNS if given.environment is not None else ()
    more = (*more, "environments") if given.factory is not None else more
    check_rewards(reward_funcs, [*columns, *more])
    if any(is_name(function) and function not in TURN_REWARDS for function in listed):
        check_ground_truths(columns)


def prompt_template(given: Given, tokenizer: Any) -> dict[str, Any]:
    """Return the further arguments by which TRL renders prompts with tools. Give `tokenizer` TRL's parser of calls.

    Raise UserError if the chat template has no tools, or TRL cannot read its calls."""
    if not given.calls_tools:
        return {}
    own = "put a chat template with tools into the model's folder"
    where = "the tokenizer's chat template"
    instead = "or use environment=..., a function that reads the text of a turn itself"
    if not supports_tool_calling(tokenizer):
        raise UserError(
            "the chat template has no tools",
            where=where,
            why="it leaves out the calls of an assistant's message, or the answers of the role tool",
            fix=f"{own}, {instead}",
        )
    if all(
        getattr(tokenizer, name, None) is None for name in ("response_template", "response_schema")
    ):
        try:
            add_response_schema(tokenizer)
        except ValueError:
            raise UserError(
                "TRL cannot read the calls of this chat template",
                where=where,
                why="it knows the parsers of some families, and this template is none of theirs",
                fix=f"set response_schema of the tokenizer, {instead}",
            ) from None
    template = None
    if not is_chat_template_prefix_preserving(tokenizer):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError as error:
            raise UserError(
                "the chat template renders earlier turns otherwise once a conversation goes on",
                where=where,
                why=" ".join(str(error).split())[:300],
                fix=f"put one that keeps them into the model's folder, {instead}",
            ) from None
    return {"tools": given.probe_tools or None, "chat_template": template}


def try_turns(turns: Turns | None, trainer: Any) -> None:
    """Answer an empty turn with an environment, or render the answer of a tool. Raise UserError if that fails, so that
    no engine is started for it."""
    if turns is None:
        return
    frame = turns.conversations.frame
    if turns.tools is not None:
        check_schemas(trainer.tools)
        answer = {"role": "tool", "name": "tool", "content": _PROBE}
        ids = frame.token_ids([answer], after=None)
        if _PROBE not in trainer.processing_class.decode(ids).replace(" ", ""):
            raise UserError(
                "the chat template leaves out the answer of a tool",
                where="the tokenizer's chat template",
                why="it renders an answer only inside of the message with the call",
                fix="use environment=..., a function that reads a turn and answers as the role user",
            )
        return
    data = trainer.train_dataset
    if not hasattr(data, "__len__"):
        return
    row = data[0]
    (prompt,) = prompts_of([row["prompt"]], [[0]], [row])
    conversation = Conversation(prompt.prompt_token_ids, [*prompt.messages])
    conversation.add_turn(Sampled([], [], "stop"), "")
    (reply,) = turns.conversations.environment.respond([(prompt, conversation)])
    if isinstance(reply, Failure):
        raise UserError(
            "the environment fails on an empty turn",
            where="environment",
            why=reply.why,
            fix="let it answer any text of the model, also an empty or garbled one",
        )
    frame.token_ids(reply.messages or [_ANY], after=None)
