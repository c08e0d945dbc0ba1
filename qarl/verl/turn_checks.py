"""Checks of agent loops before a verl run starts: which loops the run has, and which keys they read.

verl builds agent loops in Ray's workers, one for each response. A loop that it does not know, a file of tools that does
not load, or a tool parser that it lacks fails there, for each response. A key that the chosen loop does not read has no
effect, which nobody says. So a run with QaRL's loss or quantized actor is checked here.

A loop is chosen by `rollout.agent.default_agent_loop`, or for a row by the data's column `agent_name`. A loop of the
user's may read any key, so with one nothing is said to have no effect.
Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qarl.checks.exactness import exact_prompt, later_turns_differ
from qarl.checks.model_folder import hf_config_or_carried
from qarl.config.level import Level
from qarl.errors import UserError, in_one_line
from qarl.verl.keys import AGENT, LOOP, MULTI_TURN, QUANT
from qarl.verl.refusals import Conflict, attempt

_TOOLS = ("function_tool_path", "tool_config_path")
_OF_TOOLS = (*_TOOLS, "max_user_turns", "max_parallel_calls", "format")
_OF_TURNS = ("max_assistant_turns", "max_tool_response_length", "tool_response_truncate_side")
_OF_ENVIRONMENTS = ("environment", "max_turn_length", "timeout_s", "workers", "folder")
_OF_NOBODY = (
    "use_inference_chat_template",
    "tokenization_sanity_check_mode",
    "num_repeat_rollouts",
)
_PACKAGES = ("verl.", "qarl.")
_CONFIG = f"{AGENT}.agent_loop_config_path"


@dataclass(frozen=True)
class Loops:
    """The agent loops of a run.

    used     name -> class of those that it may use. The class is None if it cannot be imported
    columns  whether the data choose loops by the column `agent_name`
    """

    used: Mapping[str, type | None]
    columns: bool

    def kinds(self, kind: type) -> list[str]:
        """Return the names of the loops that are of a class."""
        return [name for name, own in self.used.items() if own and issubclass(own, kind)]


def turn_errors(composed: Any) -> list[UserError]:
    """Return an error for each setting of agent loops in verl's config `composed` that is wrong or has no effect."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.utils.config import omega_conf_to_dataclass

    from qarl.verl.environment_loop import EnvironmentAgentLoop

    turns = composed.actor_rollout_ref.rollout.multi_turn
    errors = list(_config_errors(composed.actor_rollout_ref.rollout.agent))
    attempt(lambda: omega_conf_to_dataclass(turns), errors)
    if errors:
        return errors
    used, unknown = _loops(composed)
    conflicts = [*unknown]
    if not unknown:
        conflicts += _unread(turns, used)
    if used.kinds(ToolAgentLoop):
        errors += _tool_errors(turns, used)
    if used.kinds(EnvironmentAgentLoop):
        errors += _environment_errors(turns)
    conflicts += _tokenizer_conflicts(composed.actor_rollout_ref.model, used)
    return [*errors, *(conflict.error() for conflict in conflicts)]


def turn_notes(composed: Any) -> Iterator[str]:
    """Yield a text if δ is not 0 in later turns of a run on a CPU, at a level that is exact otherwise."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    from qarl.verl.config_classes import QuantSettings, as_dict

    actor = composed.actor_rollout_ref.actor
    align = as_dict(actor.fsdp_config.get("quant")).get("align")
    level = QuantSettings.model_fields["align"].default if align is None else Level(align)
    used, _ = _loops(composed)
    if composed.trainer.device != "cpu" or not level.follows_engine:
        return
    if len(used.kinds(SingleTurnAgentLoop)) == len(used.used):
        return
    model = composed.actor_rollout_ref.model
    try:
        hf_config, _ = hf_config_or_carried(model.path, bool(model.get("trust_remote_code", False)))
    except UserError:  # the checks of the model say so
        return
    longest = composed.data.max_prompt_length + composed.data.max_response_length - 1
    if longest > exact_prompt(hf_config):
        yield later_turns_differ(f"{QUANT}.align={level}", longest, exact_prompt(hf_config))


def _registry() -> Mapping[str, Any]:
    """Return verl's agent loops by name, each as Hydra instantiates it. No public name has them."""
    from verl.experimental.agent_loop import agent_loop

    return agent_loop._agent_loop_registry


def _config_errors(agent: Any) -> Iterator[UserError]:
    """Yield what is wrong with the file of the user's loops."""
    path = agent.get("agent_loop_config_path")
    if not path:
        return
    try:
        own = _own_loops(agent)
    except Exception as error:  # of the file system, of YAML, of missing keys
        yield UserError(
            f"{_CONFIG}={path} cannot be read as a list of agent loops",
            where=_CONFIG,
            why=in_one_line(error),
            fix="write a YAML list of entries with name and _target_, and give its absolute path",
        )
        return
    for name, target in own.items():
        if _class_of(target) is None:
            yield UserError(
                f"the agent loop {name} cannot be imported",
                where=f"{path}: _target_: {target}",
                why="no such module or class, or an error while it is imported",
                fix="correct its _target_, or put its folder on PYTHONPATH",
            )


def _own_loops(agent: Any) -> dict[str, str]:
    """Return name and class of the loops in the user's file, if there is one."""
    from omegaconf import OmegaConf
    from verl.utils.import_utils import resolve_config_path

    path = agent.get("agent_loop_config_path")
    if not path:
        return {}
    entries: Any = OmegaConf.load(resolve_config_path(path))
    return {str(entry["name"]): str(entry["_target_"]) for entry in entries}


def _class_of(target: str) -> type | None:
    from hydra.utils import get_class

    try:
        return get_class(target)
    except Exception:  # whatever the user's module raises; the caller says so
        return None


def _loops(composed: Any) -> tuple[Loops, list[Conflict]]:
    """Return the loops of the run, and the conflicts of those that nobody has registered."""
    agent = composed.actor_rollout_ref.rollout.agent
    own = _own_loops(agent)
    targets = {name: str(entry["_target_"]) for name, entry in _registry().items()} | own
    in_data = _agent_names(composed.data)
    named = in_data or {str(agent.default_agent_loop)}
    known = ", ".join(sorted(targets))
    key = "the column agent_name" if in_data else LOOP
    unknown = [
        Conflict(key, name, f"one of {known}", "verl knows no agent loop of that name")
        for name in sorted(named - targets.keys())
    ]
    used = {name: _class_of(targets[name]) for name in sorted(named & targets.keys())}
    if idle := sorted(own.keys() - named):
        why = f"no row of the data is for {', '.join(idle)}, so the file has no effect"
        good = f"null, or set {LOOP}={idle[0]}, or name it in the column agent_name"
        unknown.append(Conflict(_CONFIG, agent.agent_loop_config_path, good, why))
    return Loops(used, bool(in_data)), unknown


def _agent_names(data: Any) -> set[str]:
    """Return the loops that the column `agent_name` of the training data names, if the files can be read here."""
    from qarl.data.rows import read_rows

    listed = data.train_files
    files = [listed] if isinstance(listed, str) else list(listed or ())
    names: set[Any] = set()
    for file in files:
        try:
            rows = read_rows(str(file))
            if "agent_name" in rows[0]:
                names.update(row.get("agent_name") for row in rows)
        except UserError:  # the checks of files say so
            continue
    return {str(name) for name in names if name is not None}


def _unread(turns: Any, loops: Loops) -> Iterator[Conflict]:
    """Yield the keys of several turns that differ from their defaults and that none of the run's loops reads."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    from qarl.verl.config_classes import QaRLMultiTurnConfig
    from qarl.verl.environment_loop import EnvironmentAgentLoop

    if not all(kind and kind.__module__.startswith(_PACKAGES) for kind in loops.used.values()):
        return
    tools = bool(loops.kinds(ToolAgentLoop))
    environments = bool(loops.kinds(EnvironmentAgentLoop))
    with_tools = f"set {LOOP}=qarl_tool_agent"
    with_environment = f"set {LOOP}=qarl_environment"
    either = f"{with_tools} or =qarl_environment"
    readers = [
        (tools, _OF_TOOLS, with_tools),
        (environments, _OF_ENVIRONMENTS, with_environment),
        (tools or environments, (*_OF_TURNS, "enable"), either),
        (False, _OF_NOBODY, None),
    ]
    defaults = {field.name: field.default for field in fields(QaRLMultiTurnConfig)}
    names = ", ".join(loops.used)
    for is_read, keys, advice in readers:
        for name in keys:
            value = turns.get(name, defaults[name])
            if is_read or value == defaults[name]:
                continue
            default = "null" if defaults[name] is None else defaults[name]
            yield Conflict(
                key=f"{MULTI_TURN}.{name}",
                value=value,
                good=f"{default}; or {advice}" if advice else default,
                why=f"it has no effect: the agent loop of this run ({names}) does not read it"
                if advice
                else "it has no effect: verl's agent loops do not read it",
            )


def _tool_errors(turns: Any, loops: Loops) -> Iterator[UserError]:
    """Yield what is wrong with the tools of a loop that calls tools."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.import_utils import resolve_config_path

    given = {name: turns.get(name) for name in _TOOLS if turns.get(name)}
    where = ", ".join(f"{MULTI_TURN}.{name}" for name in given or _TOOLS)
    try:
        paths = {name: resolve_config_path(path) for name, path in given.items()}
        tools = load_all_tools(**{name: paths.get(name) for name in _TOOLS})
    except Exception as error:  # whatever the user's file raises when it is executed
        yield UserError(
            f"the tools cannot be loaded ({', '.join(map(str, given.values()))})",
            where=where,
            why=in_one_line(error),
            fix="correct the file, and give its absolute path",
        )
        return
    if not tools:
        names = ", ".join(loops.kinds(ToolAgentLoop))
        has_none = (
            "the file has no function with @function_tool, or was imported before verl executes it"
            if given
            else "neither is set"
        )
        yield UserError(
            f"the agent loop {names} has no tools",
            where=where,
            why=f"{has_none}, so every call would be answered with an error",
            fix=f"set {MULTI_TURN}.function_tool_path to a file with functions decorated with @function_tool, "
            f"and a loop of your own into another file, or {LOOP}=qarl_single_turn",
        )
    try:
        ToolParser.get_tool_parser(turns.format, None)
    except ValueError as error:
        yield UserError(
            f"{MULTI_TURN}.format={turns.format} names no tool parser",
            where=f"{MULTI_TURN}.format",
            why=str(error),
            fix="name one of verl's (hermes, ...), or register your own in the file of tools (ToolParser.register)",
        )
    except Exception:  # it exists, and needs a tokenizer
        return


def _environment_errors(turns: Any) -> Iterator[UserError]:
    """Yield what is wrong with the environment of a loop that holds conversations with one."""
    from qarl.data.environments import Environment

    key = f"{MULTI_TURN}.environment"
    spec = turns.get("environment")
    if not spec:
        yield UserError(
            f"the agent loop qarl_environment needs {key}",
            where=key,
            why="it holds conversations with this function",
            fix=f"set it to module:function or an absolute FILE.py:function, or {LOOP}=qarl_single_turn",
        )
        return
    source = str(spec).rpartition(":")[0]
    if source.endswith(".py") and not os.path.isabs(source):
        yield UserError(
            f"{key}={spec} is a relative path",
            where=key,
            why="Ray's workers start in other folders",
            fix=f"write {os.path.abspath(source)}:{str(spec).rpartition(':')[2]}",
        )
        return
    environment = Environment(spec, workers=1, timeout_s=None, folder=turns.get("folder"))
    try:
        environment.load()
    except UserError as error:
        yield error
    finally:
        environment.stop()


def _tokenizer_conflicts(model: Any, loops: Loops) -> Iterator[Conflict]:
    """Yield verl's own loops whose builder refuses the model's tokenizer."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

    ours = {SingleTurnAgentLoop: "qarl_single_turn", ToolAgentLoop: "qarl_tool_agent"}
    instead = {name: ours[kind] for name, kind in loops.used.items() if kind in ours}
    if not instead or not (Path(str(model.path)) / "config.json").is_file():
        return
    if why := _builder_refuses(str(model.path), bool(model.get("trust_remote_code", False))):
        for name, other in instead.items():
            yield Conflict(LOOP, name, other, why)


def _builder_refuses(path: str, trust_remote_code: bool) -> str | None:
    """Return why verl's builder of conversations refuses the tokenizer in a folder, or None."""
    from transformers import AutoConfig, AutoTokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    try:
        kind = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).model_type
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception:  # the checks of the model say so
        return None
    try:
        create_continuous_token_builder(tokenizer, hf_model_type=kind)
    except ValueError as error:
        return f"verl's agent loop refuses the model's tokenizer: {in_one_line(error)}"
    return None
