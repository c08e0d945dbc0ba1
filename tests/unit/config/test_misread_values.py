"""Values that the reader of the config takes for something else than a user meant: names, escapes, defaults."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from checkpoint_state import interrupted_run
from config_problems import MINIMAL
from engine_helpers import config as engine_config

from qarl.checks.published_base import check_quantized
from qarl.config import ConfigError, build_config, load_config
from qarl.config.hints import unread_paper_keys, unusual_values
from qarl.errors import UserError

SEVERAL = "reward: {functions: [arithmetic, {function: 'mine.py:form', weight: 0.2}]}\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(MINIMAL)
    Path("several.yaml").write_text(MINIMAL + SEVERAL)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(arguments)
    return str(error.value)


def test_a_name_in_the_list_of_rewards_is_a_function_with_the_usual_weight() -> None:
    asked = "reward.functions=[arithmetic, mine.py:form]"
    parts = load_config(["config=one.yaml", asked]).reward.parts
    assert [(part.function, part.weight) for part in parts] == [
        ("arithmetic", 1.0),
        ("mine.py:form", 1.0),
    ]
    written = yaml.safe_load(load_config(["config=several.yaml"]).resolved_yaml())
    assert written["reward"]["functions"][0] == {
        "function": "arithmetic",
        "weight": 1.0,
        "name": None,
    }
    assert build_config(written).reward.labels == ("arithmetic", "form")


@pytest.mark.parametrize("name", ["arithmetic", "math_verify"])
def test_a_function_named_over_the_list_of_a_file_is_refused_also_if_it_is_the_default(
    name: str,
) -> None:
    said = refusal("config=several.yaml", f"reward.function={name}")
    assert "it has no effect with reward.functions" in said and "set that to []" in said
    one = load_config(["config=several.yaml", f"reward.function={name}", "reward.functions=[]"])
    assert one.reward.names == (name,)


def test_the_config_that_a_run_writes_names_both_and_is_read_again() -> None:
    Path("resolved.yaml").write_text(load_config(["config=several.yaml"]).resolved_yaml())
    assert load_config(["config=resolved.yaml"]).reward.labels == ("arithmetic", "form")


@pytest.mark.parametrize(
    ("line", "questioned"),
    [
        (r"['\nQuestion:']", "before 'n'"),
        (r"[a\tb]", "before 't'"),
        (r'["\nQuestion:"]', None),
        (r"['</answer>', '\boxed']", None),
    ],
)
def test_an_escape_that_yaml_does_not_read_is_questioned(line: str, questioned: str | None) -> None:
    Path("stop.yaml").write_text(MINIMAL.replace("rollout:\n", f"rollout:\n  stop: {line}\n"))
    config = load_config(["config=stop.yaml"])
    found = [str(each) for each in unusual_values(config) if each.where == "rollout.stop"]
    assert len(found) == (questioned is not None)
    assert all(questioned in text and "double quotes" in text for text in found if questioned)


QUANTIZED = SimpleNamespace(quantization_config={"quant_method": "compressed-tensors"})


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize("marked", [True, False])
def test_the_export_of_a_run_as_a_model_names_the_command_for_its_weights(
    tmp_path: Path, marked: bool
) -> None:
    run = interrupted_run(engine_config(tmp_path), 2)
    (run / "export").mkdir()
    if marked:
        (run / "export" / "qarl_export.json").write_text(json.dumps({"files": {}}))
    config = load_config([f"config={tmp_path / 'one.yaml'}", f"model.path={run / 'export'}"])
    with pytest.raises(UserError) as error:
        check_quantized(config, QUANTIZED)
    command = f"qarl export run={run} step=2 format=bf16"
    assert (command in str(error.value.fix)) == marked
    assert ("give the original BF16 checkpoint" in str(error.value.fix)) != marked


def test_the_config_of_a_run_asks_for_no_key_without_effect() -> None:
    """It lists all keys, so a command with config=runs/NAME/config.yaml would note what nobody has written."""
    text = MINIMAL.replace("actor:\n", "actor:\n  seq_clip_ratio_low: 0.0003\n")
    Path("table.yaml").write_text(text)
    named = load_config(["config=table.yaml"])
    assert len(unread_paper_keys(named)) == 1
    Path("resolved.yaml").write_text(named.resolved_yaml())
    assert unread_paper_keys(load_config(["config=resolved.yaml"])) == []
