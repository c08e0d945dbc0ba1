"""Where a run starts: what is resumed, refused or moved aside, decided from folders and config. No engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from checkpoint_state import interrupted_run, reseal
from engine_helpers import config

from qarl.checkpoint.folder import STATE_FILE, CheckpointError
from qarl.config.types import as_dotted
from qarl.config.unread import RULES
from qarl.dry_run import dry_run
from qarl.errors import UserError
from qarl.trainer.checkpoints import rng_state, set_rng_state
from qarl.trainer.resume import changed_keys, check_changes, find_start, make_newest, open_run

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_interrupted_run_goes_on_from_its_newest_checkpoint(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 10, 4)
    (run_dir / "checkpoints" / "step_12.partial-4194305").mkdir()
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 10
    assert names(run_dir / "checkpoints") == ["step_10", "step_2", "step_4"]
    assert names(tmp_path) == ["quickstart"]


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_finished_or_disabled_run_is_moved_aside(tmp_path, mode, capsys):
    settings = config(tmp_path, f"trainer.resume_mode={mode}")
    interrupted_run(settings, 2, finished=mode == "auto")
    with open_run(settings) as checkpoint:
        assert checkpoint is None
    assert names(tmp_path) == ["quickstart", "quickstart.1"]
    assert names(settings.run_dir) == [".lock"]
    assert ("to resume from its end" in capsys.readouterr().err) is (mode == "auto")


def test_a_run_without_checkpoints_starts_anew(tmp_path):
    settings = config(tmp_path)
    interrupted_run(settings)
    with open_run(settings) as checkpoint:
        assert checkpoint is None
    assert names(tmp_path) == ["quickstart", "quickstart.1"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_note(tmp_path, capsys):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4)
    (run_dir / "checkpoints" / "step_4" / STATE_FILE).write_text("{")
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
    note = capsys.readouterr().err
    assert "step_4 is damaged" in note and "state.json is cut short" in note
    assert names(run_dir / "checkpoints") == ["step_2", "step_4.damaged"]


def test_when_every_checkpoint_is_damaged_nothing_is_touched(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4)
    for step in (2, 4):
        (run_dir / "checkpoints" / f"step_{step}" / STATE_FILE).write_text("{")
    with pytest.raises(UserError, match="all 2 checkpoints of the run are damaged"), open_run(settings):
        raise AssertionError("not reached")
    assert names(run_dir / "checkpoints") == ["step_2", "step_4"]


def test_resume_path_leaves_the_later_course_of_the_same_run(tmp_path, capsys):
    run_dir = interrupted_run(config(tmp_path), 2, 4, finished=True)
    path = run_dir / "checkpoints" / "step_2"
    settings = config(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
        assert names(run_dir / "checkpoints") == ["step_2", "step_4"], "not before the resume has worked"
        assert (run_dir / "summary.json").exists()
        make_newest(run_dir, checkpoint)
    assert names(run_dir / "checkpoints") == ["step_2", "step_4.superseded"]
    assert not (run_dir / "summary.json").exists(), "the run is not finished any more"
    assert "step_4 is of a later step" in capsys.readouterr().err


def test_resume_path_of_another_run_starts_a_folder_of_its_own(tmp_path):
    run_dir = interrupted_run(config(tmp_path), 2, 4)
    path = run_dir / "checkpoints" / "step_2"
    overrides = ["name=second", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    with open_run(config(tmp_path, *overrides)) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
    assert names(run_dir / "checkpoints") == ["step_2", "step_4"]
    assert names(tmp_path) == ["quickstart", "second"]
    overrides[-1] = f"trainer.resume_from_path={tmp_path}/nowhere"
    with pytest.raises(CheckpointError, match="no such folder"), open_run(config(tmp_path, *overrides)):
        raise AssertionError("not reached")


@pytest.mark.parametrize("name", ["quickstart", "second"])
def test_resume_path_again_goes_on_where_its_own_run_was_killed(tmp_path, name):
    path = interrupted_run(config(tmp_path), 2, 4) / "checkpoints" / "step_2"
    resume_path = [f"name={name}", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    settings = config(tmp_path, *resume_path)
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
        make_newest(settings.run_dir, checkpoint)
    interrupted_run(settings, 6, 8)
    (settings.run_dir / "checkpoints" / "step_8" / STATE_FILE).write_text("{")
    shutil.rmtree(path)  # as max_ckpt_to_keep does
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 6
        make_newest(settings.run_dir, checkpoint)
    assert not (tmp_path / f"{name}.1").exists()
    (settings.run_dir / "summary.json").write_text('{"finished": true}')
    with pytest.raises(CheckpointError, match="no such folder"), open_run(settings):
        raise AssertionError("not reached")


@pytest.mark.parametrize("began", [5, ["a"], {}, "\0", None])
def test_a_beginning_of_another_type_is_no_beginning(tmp_path, began):
    """A state.json that somebody changed and sealed again."""
    path = interrupted_run(config(tmp_path, "name=origin"), 2) / "checkpoints" / "step_2"
    settings = config(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    run_dir = interrupted_run(settings, 6)
    saved = settings.model_dump(mode="json")
    saved["trainer"]["resume_from_path"] = began
    reseal(run_dir / "checkpoints" / "step_6", config=saved)
    assert find_start(settings).checkpoint.step == 2


def test_finding_the_start_changes_nothing(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4, 6)
    (run_dir / "checkpoints" / "step_6" / STATE_FILE).write_text("{")
    (run_dir / "checkpoints" / "step_8.partial-4194305").mkdir()
    before = sorted(tmp_path.rglob("*"))
    start = find_start(settings)
    assert start.checkpoint is not None and start.checkpoint.step == 4 and start.stays_in(run_dir)
    assert [folder.name for folder, _ in start.damaged] == ["step_6"]
    path = run_dir / "checkpoints" / "step_2"
    resume_path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    assert not find_start(config(tmp_path, "name=second", *resume_path)).stays_in(tmp_path / "second")
    assert find_start(config(tmp_path, *resume_path)).stays_in(run_dir)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_length_of_a_cosine_is_said(tmp_path, capsys):
    interrupted_run(config(tmp_path), 2)
    with open_run(config(tmp_path, "trainer.total_training_steps=500")):
        assert "learning rates from now on" in capsys.readouterr().err


def test_changes_of_what_is_trained_are_refused_by_name(tmp_path):
    interrupted_run(config(tmp_path), 2)
    changed = ["optim.lr=1e-6", "seed=3", "quant.scheme=w8a8", "data.train_batch_size=6", "actor.ppo_epochs=2"]
    with pytest.raises(UserError) as caught, open_run(config(tmp_path, *changed)):
        raise AssertionError("not reached")
    message = str(caught.value)
    for key in ("optim.lr was 0.00015, now 1e-06", "seed was 0, now 3", "quant.scheme", "data.train_batch_size"):
        assert key in message
    assert "actor.ppo_epochs" in message and "resume_mode=disable" in message
    assert names(tmp_path) == ["quickstart"]


def test_a_dry_run_refuses_a_resume_that_the_run_refuses(tmp_path):
    run_dir = interrupted_run(config(tmp_path), 4)
    dry_run(config(tmp_path))
    with pytest.raises(UserError, match="changes what is trained"):
        dry_run(config(tmp_path, "optim.lr=1"))
    (run_dir / "checkpoints" / "step_4" / STATE_FILE).write_text("{")
    with pytest.raises(UserError, match="checkpoints of the run are damaged"):
        dry_run(config(tmp_path))
    assert names(run_dir / "checkpoints") == ["step_4"]


def test_changes_of_length_and_output_are_allowed(tmp_path, capsys):
    constant = "optim.lr_scheduler_type=constant"
    interrupted_run(config(tmp_path, constant), 2)
    overrides = [constant, "trainer.total_training_steps=500", "trainer.test_freq=1", "trainer.save_freq=7"]
    with open_run(config(tmp_path, *overrides, "trainer.logger=[console]")) as checkpoint:
        assert checkpoint is not None
    assert "note:" not in capsys.readouterr().err
    with open_run(config(tmp_path, constant, "actor.ppo_micro_batch_size_per_gpu=6")) as checkpoint:
        assert checkpoint is not None
    assert "rounds differently than" in capsys.readouterr().err
    with pytest.raises(UserError, match="past the end of the run"):
        open_run(config(tmp_path, constant, "trainer.total_training_steps=1")).__enter__()


MAY_CHANGE = {
    "name": "the folder of the run, which a resume may choose",
    "output_dir": "as the name",
    "dry_run": "nothing runs",
    "data.val_files": "validation teaches nothing",
    "rollout.rebuild_on_failure": "a rebuilt engine has the same weights",
    "publish.delta": "the engine gets the same weights",
    "quant.mismatch_limit": "an error of a run tells to raise it; it teaches nothing",
    "reward.timeout_s": "an error of a run tells to raise it; it teaches nothing",
    "model.trust_remote_code": "an error of a run tells to set it; it teaches nothing",
    "trainer.total_training_steps": "a longer run; with a cosine that is said",
    "trainer.test_freq": "validation teaches nothing",
    "trainer.val_before_train": "validation teaches nothing",
    "trainer.val_max_prompts": "validation teaches nothing",
    "trainer.logger": "output",
    "trainer.plots": "output",
    "trainer.report": "output",
    "trainer.save_final": "output",
    "trainer.save_freq": "output",
    "trainer.save_minutes": "output",
    "trainer.max_ckpt_to_keep": "output",
    "trainer.resume_mode": "how a run starts, not what it trains",
    "trainer.resume_from_path": "how a run starts, not what it trains",
}
OTHER_ROUNDING = {
    "trainer.num_threads": "sums in another order",
    "model.gradient_checkpointing": "memory: the forward is computed twice",
    "actor.ppo_micro_batch_size_per_gpu": "memory: gradients are summed in other parts",
    "actor.log_prob_micro_batch_size_per_gpu": "memory: other rows side by side",
    "actor.use_dynamic_bsz": "memory: other rows side by side",
    "actor.ppo_max_token_len_per_gpu": "memory: gradients are summed in other parts",
    "actor.log_prob_max_token_len_per_gpu": "memory: other rows side by side",
    "model.use_remove_padding": "memory: padding changes no log-prob",
    "rollout.max_num_seqs": "memory: other rows side by side",
    "rollout.max_num_batched_tokens": "memory: prompts are cut elsewhere",
    "rollout.gpu_memory_utilization": "memory: other preemptions",
    "rollout.cpu_kvcache_space_gib": "memory: other preemptions",
    "rollout.enforce_eager": "other kernels for the same numbers",
    "rollout.free_cache_engine": "memory: the engine sleeps or not",
}


def test_a_key_may_change_on_a_resume_for_a_reason_or_not_at_all(tmp_path):
    """Every key of the config, each changed alone: without a word, with a note about rounding, or refused by name. A
    key that had no effect in the checkpoint may change."""
    settings = config(tmp_path, "optim.lr_scheduler_type=constant")
    assert changed_keys(settings.model_dump(mode="json"), settings) == {}
    in_effect = as_dotted(settings.model_dump(mode="json"))
    silent = {key for rule in RULES if not rule.reads(in_effect[rule.decider]) for key in rule.keys}
    assert "actor.kl_loss_coef" in silent
    keys = list(as_dotted(settings.model_dump(mode="json")))
    assert len(keys) > 70 and MAY_CHANGE.keys() | OTHER_ROUNDING.keys() <= set(keys)
    for key in keys:
        saved = settings.model_dump(mode="json")
        section, _, leaf = key.rpartition(".")
        (saved[section] if section else saved)[leaf] = "another value"

        def check(saved: dict[str, Any] = saved) -> tuple[str, ...]:
            return check_changes(settings, tmp_path / "step_1", 1, saved)

        if key in MAY_CHANGE or key in silent:
            assert check() == (), key
        elif key in OTHER_ROUNDING:
            (note,) = check()
            assert note.startswith(f"changed {key}: the training is the same"), key
        else:
            with pytest.raises(UserError, match="changes what is trained") as caught:
                check()
            assert caught.value.where.startswith(f'{key} was "another value", now '), key


@pytest.mark.parametrize("gpu", [False, True])
def test_the_default_of_enforce_eager_is_no_change(tmp_path, monkeypatch, gpu):
    """Earlier checkpoints hold the value that null now means on the same machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = config(tmp_path)
    saved = settings.model_dump(mode="json")
    assert saved["rollout"]["enforce_eager"] is None
    saved["rollout"]["enforce_eager"] = not gpu
    assert check_changes(settings, tmp_path / "step_1", 1, saved) == ()
    saved["rollout"]["enforce_eager"] = gpu
    assert check_changes(settings, tmp_path / "step_1", 1, saved)[0].startswith("changed rollout.enforce_eager:")


def test_a_checkpoint_without_quant_kernels_is_one_of_the_engines_kernels(tmp_path):
    settings = config(tmp_path)
    saved = settings.model_dump(mode="json")
    del saved["quant"]["kernels"]
    assert check_changes(settings, tmp_path / "step_1", 1, saved) == ()
    with pytest.raises(UserError, match="changes what is trained") as caught:
        check_changes(config(tmp_path, "quant.kernels=dequantized"), tmp_path / "step_1", 1, saved)
    assert caught.value.where == 'quant.kernels was "engine", now "dequantized"'


_HOLD = "import sys; from qarl.config import load_config; from qarl.trainer.resume import open_run\n" + (
    "with open_run(load_config(sys.argv[1:])): print('held', flush=True); sys.stdin.read()"
)


def test_two_processes_cannot_work_on_one_run(tmp_path):
    arguments = ["config=quickstart.yaml", f"output_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _HOLD, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process"), open_run(config(tmp_path)):
            raise AssertionError("not reached")
        process.kill()
    with open_run(config(tmp_path)):
        pass


def test_global_generators_come_back(tmp_path):
    import random

    import numpy as np

    state = rng_state()
    torch.save(state, tmp_path / "rng.pt")
    drawn = torch.rand(3), np.random.rand(3), random.random()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(3), drawn[0])
    assert (np.random.rand(3) == drawn[1]).all() and random.random() == drawn[2]
