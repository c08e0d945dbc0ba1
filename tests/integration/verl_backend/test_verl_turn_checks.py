"""Keys of agent loops on verl's command line: what is wrong or has no effect is refused before Ray starts, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import ROOT

pytest.importorskip("verl")

from hydra.utils import get_class
from verl_command_lines import ROLLOUT, keys_of, told

from qarl.errors import UserError
from qarl.verl.turn_checks import _registry

pytestmark = pytest.mark.usefixtures("own_environment")
LOOP = f"{ROLLOUT}.agent.default_agent_loop"
OWN = f"{ROLLOUT}.agent.agent_loop_config_path"
TURNS = f"{ROLLOUT}.multi_turn"
SUPPORT = ROOT / "tests" / "support"
TOOLS = f"{TURNS}.function_tool_path={SUPPORT}/verl_tools.py"
ENVIRONMENT = f"{TURNS}.environment={SUPPORT}/turn_environments.py:three_sums"


def test_verls_registry_has_the_loops_and_their_classes() -> None:
    loops = {name: get_class(entry["_target_"]) for name, entry in _registry().items()}
    assert {"single_turn_agent", "tool_agent"} <= loops.keys()
    for name in ("qarl_single_turn", "qarl_tool_agent", "qarl_environment"):
        assert loops[name].__module__.startswith("qarl.verl.")


ACCEPTED = [
    (f"{LOOP}=tool_agent", TOOLS, f"{TURNS}.enable=true"),
    (f"{LOOP}=qarl_tool_agent", TOOLS, f"{TURNS}.format=every_turn", f"{TURNS}.max_user_turns=2"),
    (f"{LOOP}=qarl_environment", ENVIRONMENT, f"{TURNS}.max_assistant_turns=3", f"{TURNS}.workers=1"),
    (f"{LOOP}=qarl_environment", f"{TURNS}.environment=qarl.demo.calculator:answer"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_loops_with_what_they_read(overrides: tuple[str, ...]) -> None:
    assert told(*overrides) == []


REFUSED = [
    ((f"{TURNS}.enable=true",), f"{TURNS}.enable", "does not read it"),
    ((TOOLS,), f"{TURNS}.function_tool_path", "qarl_tool_agent"),
    ((f"{TURNS}.max_assistant_turns=3",), f"{TURNS}.max_assistant_turns", "qarl_environment"),
    ((f"{TURNS}.max_parallel_calls=2",), f"{TURNS}.max_parallel_calls", "qarl_tool_agent"),
    ((ENVIRONMENT,), f"{TURNS}.environment", "qarl_environment"),
    ((f"{LOOP}=qarl_tool_agent", TOOLS, ENVIRONMENT), f"{TURNS}.environment", "qarl_environment"),
    (
        (f"{LOOP}=qarl_environment", ENVIRONMENT, f"{TURNS}.max_user_turns=2"),
        f"{TURNS}.max_user_turns",
        "qarl_tool_agent",
    ),
    ((f"{TURNS}.num_repeat_rollouts=2",), f"{TURNS}.num_repeat_rollouts", "verl's agent loops"),
    (
        (f"{TURNS}.use_inference_chat_template=true",),
        f"{TURNS}.use_inference_chat_template",
        "verl's agent loops",
    ),
    ((f"{LOOP}=no_such_loop",), LOOP, "one of qarl_environment, qarl_single_turn"),
    (
        (f"{LOOP}=tool_agent",),
        f"{TURNS}.function_tool_path, {TURNS}.tool_config_path",
        "has no tools",
    ),
    (
        (f"{LOOP}=tool_agent", f"{TURNS}.function_tool_path=/no/tools.py"),
        f"{TURNS}.function_tool_path",
        "/no/tools.py",
    ),
    (
        (f"{LOOP}=tool_agent", f"{TURNS}.function_tool_path={SUPPORT}/bad_runs.py"),
        f"{TURNS}.function_tool_path",
        "@function_tool",
    ),
    ((f"{LOOP}=tool_agent", TOOLS, f"{TURNS}.format=own"), f"{TURNS}.format", "no tool parser"),
    ((f"{LOOP}=qarl_environment",), f"{TURNS}.environment", "needs"),
    (
        (f"{LOOP}=qarl_environment", f"{TURNS}.environment=tools.py:answer"),
        f"{TURNS}.environment",
        "relative path",
    ),
    (
        (f"{LOOP}=qarl_environment", f"{TURNS}.environment={SUPPORT}/turn_environments.py:none"),
        "",
        "three_sums",
    ),
    (
        (f"{LOOP}=qarl_environment", ENVIRONMENT, f"{TURNS}.workers=0"),
        f"{TURNS}.workers",
        "workers=0",
    ),
    ((f"{OWN}=/no/loops.yaml",), OWN, "/no/loops.yaml"),
]


@pytest.mark.parametrize(("overrides", "key", "words"), REFUSED)
def test_one_error_names_the_key(overrides: tuple[str, ...], key: str, words: str) -> None:
    errors = told(*overrides)
    assert len(errors) == 1
    assert not key or keys_of(errors) == [key]
    assert words in str(errors[0])


def written(folder: Path, target: str) -> str:
    file = folder / "loops.yaml"
    file.write_text(f"- name: own\n  _target_: {target}\n", encoding="utf-8")
    return f"{OWN}={file}"


def test_a_users_loop(tmp_path: Path) -> None:
    """It may read any key."""
    own = written(tmp_path, "verl_loops.OwnLoop")
    assert told(own, f"{LOOP}=own", TOOLS) == []
    assert told(own, f"{LOOP}=own", TOOLS, f"{TURNS}.num_repeat_rollouts=2") == []
    (idle,) = told(own)
    assert idle.where == OWN and "no row of the data is for own" in (idle.why or "")
    (absent,) = told(written(tmp_path, "no_such_module.Loop"), f"{LOOP}=own")
    assert absent.what == "the agent loop own cannot be imported"


def test_loops_that_the_data_name(tmp_path: Path) -> None:
    def data(*names: str) -> str:
        file = tmp_path / "train.jsonl"
        file.write_text("".join(json.dumps({"agent_name": name}) + "\n" for name in names))
        return f"data.train_files={file}"

    assert told(data("qarl_single_turn", "qarl_tool_agent"), TOOLS) == []
    (error,) = told(data("qarl_single_turn", "other"))
    assert isinstance(error, UserError) and error.where == "the column agent_name"


def test_a_tokenizer_without_the_tokens_of_its_family(tmp_path: Path) -> None:
    from random_models import save_random_model

    path = f"actor_rollout_ref.model.path={save_random_model(tmp_path)}"
    (error,) = told(path, f"{LOOP}=tool_agent", TOOLS)
    assert error.where == LOOP and error.fix == "set it to qarl_tool_agent"
    (error,) = told(path, f"{LOOP}=single_turn_agent")
    assert error.fix == "set it to qarl_single_turn"
    assert told(path, f"{LOOP}=qarl_tool_agent", TOOLS) == []
