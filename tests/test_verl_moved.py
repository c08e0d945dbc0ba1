"""verl runs from before QaRL's modules became packages: they resume; a class that moved is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT

from qarl.config import Config, build_config, write_resolved
from qarl.errors import UserError
from qarl.verl.resume import find_verl_start, open_verl_run

KEY = "actor_rollout_ref.actor.policy_loss._target_"
OLD = {KEY: "qarl.verl_plugin.config.TBPOPolicyLossConfig"}
NEW = {KEY: "qarl.verl.plugin.config.TBPOPolicyLossConfig"}


def config(folder: Path, verl: dict[str, str]) -> Config:
    values = yaml.safe_load((ROOT / "configs/quickstart_verl.yaml").read_text(encoding="utf-8"))
    return build_config(values | {"output_dir": str(folder), "verl": verl})


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder as a killed verl run of that time left it, with next to nothing in the checkpoint's files.

    Its verl.yaml names classes that moved; each run writes it again."""
    run = tmp_path / "quickstart_verl"
    actor = run / "checkpoints/global_step_4/actor"
    actor.mkdir(parents=True)
    torch.save({}, actor.parent / "data.pt")
    torch.save({}, actor / "model_world_size_1_rank_0.pt")
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    (run / "verl.yaml").write_text(yaml.safe_dump(OLD))
    return run


def test_a_run_without_class_names_resumes(old_run: Path, tmp_path: Path) -> None:
    write_resolved(config(tmp_path, {}), old_run / "config.yaml")
    with open_verl_run(config(tmp_path, {})) as step:
        assert step == 4


@pytest.mark.parametrize("now", [OLD, NEW, {}])
def test_a_saved_class_that_moved_is_refused_by_name(old_run: Path, tmp_path: Path, now: dict[str, str]) -> None:
    write_resolved(config(tmp_path, OLD), old_run / "config.yaml")
    with pytest.raises(UserError) as refused:
        find_verl_start(config(tmp_path, now))
    text = str(refused.value)
    assert f"{KEY} names a class of QaRL that has moved" in text and "qarl.verl_plugin is now qarl.verl.plugin" in text
    assert str(old_run / "config.yaml") in text


def test_and_resumes_once_it_is_renamed(old_run: Path, tmp_path: Path) -> None:
    write_resolved(config(tmp_path, NEW), old_run / "config.yaml")
    assert find_verl_start(config(tmp_path, NEW)) == (4, True)


def test_a_config_that_names_one_is_refused_before_verl_starts(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from qarl.verl.run import verl_config

    with pytest.raises(UserError, match=r"has moved[\s\S]*qarl\.verl_plugin is now qarl\.verl\.plugin"):
        verl_config(config(tmp_path, OLD), on_cpu=True)
