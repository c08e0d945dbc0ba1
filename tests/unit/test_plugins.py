"""Own files are imported before the config is read, in this process and in those that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from typing import Any

import pytest

from qarl import plugins
from qarl.config import load_config
from qarl.config.objectives import get_objective
from qarl.config.objectives import unregister as unregister_objective
from qarl.config.optimizers import get_optimizer
from qarl.config.optimizers import unregister as unregister_optimizer
from qarl.errors import UserError

SOURCE = """
from qarl.config.objectives import Objective, register as register_objective
from qarl.config.optimizers import Optimizer, register as register_optimizer

register_objective(Objective("policy_gradient", function="qarl_plugin_mine:loss"))
register_optimizer(Optimizer("sgd", factory="qarl_plugin_mine:sgd", matrix_state_bytes=0))

def sgd(named, *, lr, betas, eps, weight_decay, seed):
    import torch
    return torch.optim.SGD([parameter for _, parameter in named], lr=lr)

def loss(inputs, settings):
    ratio = (inputs.log_prob - inputs.old_log_prob.detach()).exp()
    return -(ratio * inputs.token_advantages).sum() / inputs.tokens, {}
"""
RUN = """
name: run
model: {path: model}
data: {train_files: [a.parquet], train_batch_size: 2, max_prompt_length: 4, max_response_length: 4}
reward: {function: arithmetic}
rollout: {n: 2}
actor: {ppo_mini_batch_size: 2, ppo_micro_batch_size_per_gpu: 2, log_prob_micro_batch_size_per_gpu: 2}
trainer: {total_training_steps: 2, test_freq: -1, val_before_train: false}
"""


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "run.yaml").write_text(RUN)
    yield
    if sys.modules.pop("qarl_plugin_mine", None) is not None:
        unregister_objective("policy_gradient")
        unregister_optimizer("sgd")


OWN = ["actor.loss=policy_gradient", "optim.name=sgd"]


def test_the_names_of_a_plugin_are_values_of_the_config(tmp_path):
    config = load_config(["config=run.yaml", "plugins=[mine.py]", *OWN])
    assert get_objective(config.actor.loss).load().__name__ == "loss"
    assert get_optimizer(config.optim.name).load().__name__ == "sgd"
    assert os.environ[plugins.VARIABLE] == str(tmp_path / "mine.py")
    assert load_config(["config=run.yaml", "plugins=[mine.py]", *OWN]) == config


def test_without_the_plugin_the_names_are_unknown():
    with pytest.raises(UserError, match="tbpo"):
        load_config(["config=run.yaml", "actor.loss=policy_gradient"])


def test_a_process_that_reads_no_config_has_them_too(tmp_path):
    plugins.load_plugins(["mine.py"])
    code = (
        "from qarl.plugins import load_plugins_of_parent; load_plugins_of_parent();"
        "from qarl.config.objectives import objective_names; print(objective_names()[-1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "policy_gradient"


@pytest.mark.parametrize(
    ("source", "names", "said"),
    [
        (None, ["missing.py"], "there is no plugin"),
        ("1 / 0", ["broken.py"], "ZeroDivisionError"),
        ("x =", ["broken.py"], "SyntaxError"),
        (None, ["no.such.module"], "No module named"),
    ],
)
def test_a_plugin_that_cannot_be_imported(tmp_path, source, names, said):
    if source is not None:
        (tmp_path / "broken.py").write_text(source)
    with pytest.raises(UserError, match=said) as raised:
        load_config(["config=run.yaml", f"plugins=[{names[0]}]"])
    assert raised.value.where == "plugins"
    assert os.environ[plugins.VARIABLE] == ""


def test_an_error_inside_a_plugin_names_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("import os\nfrom os import no_such_name\n")
    with pytest.raises(UserError) as raised:
        load_config(["config=run.yaml", "plugins=[broken.py]"])
    assert "broken.py, line 2, in <module>" in raised.value.why
    assert raised.value.fix == "correct the plugin, or install what it imports"


def test_a_second_file_of_the_same_name_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.py").write_text("")
    plugins.load_plugins(["mine.py"])
    with pytest.raises(UserError, match="two plugins are files called mine"):
        plugins.load_plugins(["other/mine.py"])


def test_bf16_masters_need_an_optimizer_that_rounds():
    arguments = ["config=run.yaml", "plugins=[mine.py]", *OWN, "optim.master_dtype=bf16"]
    with pytest.raises(UserError, match="sgd updates only FP32 parameters"):
        load_config(arguments)


def test_a_name_that_is_taken_is_refused():
    taken = SOURCE.replace('"policy_gradient"', '"tbpo"')
    with open("mine.py", "w") as file:
        file.write(taken)
    with pytest.raises(UserError, match="there already is an objective 'tbpo'"):
        load_config(["config=run.yaml", "plugins=[mine.py]"])


def test_a_plugin_may_import_torch_before_the_threads_are_limited(tmp_path):
    """The config is read, and with it the plugin, before trainer.num_threads is known."""
    (tmp_path / "torch_user.py").write_text("import torch\n")
    code = (
        "from qarl.plugins import load_plugins; from qarl.process import limit_threads;"
        "load_plugins(['torch_user.py']); limit_threads(1);"
        "import torch; print(torch.get_num_threads())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_plugin_that_ends_the_program(tmp_path):
    """A script that somebody names as a plugin: its exit code, 0 perhaps, would be that of the run."""
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match="ends the program when it is imported") as error:
        load_config(["config=run.yaml", "plugins=[script.py]"])
    assert "sys.exit(0)" in error.value.why and "script.py, line 2" in error.value.why


def test_the_place_is_the_plugins_also_if_a_package_has_replaced_sys_exit(tmp_path, monkeypatch):
    """As wandb does for its run."""
    source = "def leave(code): raise SystemExit(code)"
    names: dict[str, Any] = {}
    exec(compile(source, f"{sysconfig.get_path('purelib')}/hooks.py", "exec"), names)
    monkeypatch.setattr(sys, "exit", names["leave"])
    (tmp_path / "other.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match="ends the program") as error:
        load_config(["config=run.yaml", "plugins=[other.py]"])
    assert "other.py, line 2" in error.value.why


def test_a_name_without_its_plugin():
    for key in ("actor.loss", "optim.name", "quant.scheme"):
        with pytest.raises(UserError, match=r"plugins=\[FILE.py\]"):
            load_config(["config=run.yaml", f"{key}=mine"])


def test_a_plugin_that_is_gone(tmp_path):
    """Its name is right, so the advice is not about names."""
    with pytest.raises(UserError, match=rf"there is no plugin {tmp_path / 'gone.py'}") as error:
        load_config(["config=run.yaml", "plugins=[gone.py]"])
    assert error.value.fix.startswith("put the file back")
