"""Where a run starts: what is resumed, refused or moved aside, decided from folders and config. No engine."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from checkpoint_state import interrupted_run
from engine_helpers import config

from qarl.checkpoint.resumable import STATE_FILE
from qarl.config import Config, write_resolved
from qarl.config.schema import default_values
from qarl.config.types import as_dotted
from qarl.config.unused_keys import RULES
from qarl.errors import UserError
from qarl.metrics.tracker import read_metrics
from qarl.trainer import resume
from qarl.trainer.resume import check_changes, make_newest, open_run

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(settings: Config, words: str) -> str:
    with pytest.raises(UserError, match=words) as caught, open_run(settings):
        raise AssertionError("not reached")
    return str(caught.value)


def test_an_interrupted_run_goes_on_from_its_newest_checkpoint(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 10, 4)
    (run_dir / "checkpoints" / "step_12.partial-4194305").mkdir()
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 10
    assert names(run_dir / "checkpoints") == ["step_10", "step_2", "step_4"]
    assert names(tmp_path) == ["quickstart"]


def test_a_folder_of_checkpoints_may_be_a_link_to_another_disk(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4)
    disk = tmp_path / "disk"
    (run_dir / "checkpoints").rename(disk)
    (run_dir / "checkpoints").symlink_to(disk)
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 4
    assert names(tmp_path) == ["disk", "quickstart"] and names(disk) == ["step_2", "step_4"]


def test_a_resume_forgets_the_metrics_of_later_steps_and_names_damaged_lines(tmp_path, capsys):
    """Also if the run ends before it reaches them again."""
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2)
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) for step in (1, 2, 3)]
    rest = ["{damaged", lines[2], "\0\0\0", '{"step": 2, "rew']
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines[:2], *rest]))
    with open_run(settings) as checkpoint:
        make_newest(run_dir, checkpoint)
    printed = capsys.readouterr().err
    assert f"note: lines of {run_dir / 'metrics.jsonl'} that are torn or damaged" in printed
    assert "report: 3, 4, 5\n" in printed
    assert [entry["step"] for entry in read_metrics(run_dir)] == [1, 2]
    assert "{damaged" in (run_dir / "metrics.jsonl").read_text()


def test_an_unfinished_run_of_another_backend_is_not_moved_aside(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2)
    write_resolved(settings.model_copy(update={"backend": "verl"}), run_dir / "config.yaml")
    assert "set backend=verl" in refusal(settings, "is one of backend=verl")
    assert names(tmp_path) == ["quickstart"]
    with open_run(config(tmp_path, "trainer.resume_mode=disable")):
        assert names(tmp_path) == ["quickstart", "quickstart.1"]


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_finished_or_disabled_run_is_moved_aside(tmp_path, mode, capsys):
    settings = config(tmp_path, f"trainer.resume_mode={mode}")
    interrupted_run(settings, 2, finished=mode == "auto")
    with open_run(settings) as checkpoint:
        assert checkpoint is None
        assert names(tmp_path) == ["quickstart", "quickstart.1"]
        assert names(settings.run_dir) == [".lock"]
    assert ("to resume from its end" in capsys.readouterr().err) is (mode == "auto")


def test_the_note_that_a_run_is_finished_has_the_words_that_extend_it(tmp_path, capsys):
    folder = tmp_path / "my runs"
    interrupted_run(config(folder, "trainer.total_training_steps=4"), 2, 4, finished=True)
    with open_run(config(folder, "trainer.total_training_steps=6")):
        pass
    note = next(line for line in capsys.readouterr().err.splitlines() if "resume from its" in line)
    words = shlex.split(note.rpartition(": ")[2])
    with open_run(config(folder, "trainer.total_training_steps=6", *words)) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 4


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_note(tmp_path, capsys):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4)
    (run_dir / "checkpoints" / "step_4" / STATE_FILE).write_text("{")
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
    note = capsys.readouterr().err
    assert "step_4 is damaged" in note and "state.json is cut short" in note
    assert names(run_dir / "checkpoints") == ["step_2", "step_4.damaged"]


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_checkpoint_with_the_name_of_another_step_is_refused(tmp_path, mode):
    run_dir = interrupted_run(config(tmp_path), 2, 4)
    renamed = run_dir / "checkpoints" / "step_9"
    (run_dir / "checkpoints" / "step_2").rename(renamed)
    path = [f"trainer.resume_from_path={renamed}"] if mode == "resume_path" else []
    settings = config(tmp_path, f"trainer.resume_mode={mode}", *path)
    message = refusal(settings, "is of step 2, but its name is that of step 9")
    assert "rename the folder to step_2" in message
    assert names(run_dir / "checkpoints") == ["step_4", "step_9"]


def test_when_every_checkpoint_is_damaged_nothing_is_touched(tmp_path):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2, 4)
    for step in (2, 4):
        (run_dir / "checkpoints" / f"step_{step}" / STATE_FILE).write_text("{")
    refusal(settings, "all 2 checkpoints of the run are damaged")
    assert names(run_dir / "checkpoints") == ["step_2", "step_4"]


def test_resume_path_leaves_the_later_course_of_the_same_run(tmp_path, capsys):
    run_dir = interrupted_run(config(tmp_path), 2, 4, finished=True)
    path = run_dir / "checkpoints" / "step_2"
    settings = config(
        tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    with open_run(settings) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
        assert names(run_dir / "checkpoints") == ["step_2", "step_4"], (
            "not before the resume has worked"
        )
        assert (run_dir / "summary.json").exists()
        make_newest(run_dir, checkpoint)
    assert names(run_dir / "checkpoints") == ["step_2", "step_4.superseded"]
    assert not (run_dir / "summary.json").exists(), "the run is not finished any more"
    assert "step_4 is of a later step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (None, True),
        ("", True),
        ('{"ste\n', True),
        ('{"step": 1}\n', False),
        ('{"step": 3}\n', True),
    ],
)
def test_a_resume_says_that_the_earlier_metrics_are_lost(tmp_path, capsys, lines, lost):
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 2)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    if lines is not None:
        (run_dir / "metrics.jsonl").write_text(lines)
    with open_run(settings) as checkpoint:
        make_newest(run_dir, checkpoint)
    said = capsys.readouterr().err
    assert ("has lost the steps up to 2" in said) == lost, said


def test_a_run_that_was_killed_in_its_first_step_has_lost_nothing(tmp_path, capsys):
    """The resume logs that step again, from the checkpoint or from verl's log."""
    settings = config(tmp_path)
    run_dir = interrupted_run(settings, 1)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with open_run(settings) as checkpoint:
        make_newest(run_dir, checkpoint)
    assert "has lost the steps" not in capsys.readouterr().err


def test_resume_path_of_another_run_starts_a_folder_of_its_own(tmp_path):
    run_dir = interrupted_run(config(tmp_path), 2, 4)
    path = run_dir / "checkpoints" / "step_2"
    overrides = [
        "name=second",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={path}",
    ]
    with open_run(config(tmp_path, *overrides)) as checkpoint:
        assert checkpoint is not None and checkpoint.step == 2
        assert names(tmp_path) == ["quickstart", "second"]
    assert names(run_dir / "checkpoints") == ["step_2", "step_4"]
    overrides[-1] = f"trainer.resume_from_path={tmp_path}/nowhere"
    refusal(config(tmp_path, *overrides), "no such folder")


@pytest.mark.parametrize("name", ["quickstart", "second"])
def test_resume_path_again_goes_on_where_its_own_run_was_killed(tmp_path, name):
    path = interrupted_run(config(tmp_path), 2, 4) / "checkpoints" / "step_2"
    resume_path = [
        f"name={name}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={path}",
    ]
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
    refusal(settings, "no such folder")


def test_changes_of_what_is_trained_and_an_end_in_the_past_are_refused(tmp_path):
    interrupted_run(config(tmp_path), 2)
    changed = [
        "optim.lr=1e-6",
        "seed=3",
        "quant.scheme=w8a8",
        "data.train_batch_size=6",
        "actor.ppo_epochs=2",
    ]
    message = refusal(config(tmp_path, *changed), "resume_mode=disable")
    for key in (
        "optim.lr was 0.00015, now 1e-06",
        "seed was 0, now 3",
        "quant.scheme",
        "data.train_batch_size",
    ):
        assert key in message
    assert "actor.ppo_epochs" in message
    refusal(config(tmp_path, "trainer.total_training_steps=1"), "past the end of the run")
    assert names(tmp_path) == ["quickstart"]


DECIDES = """
    seed backend verl model.path model.dtype model.head_dtype data.train_files data.train_batch_size
    data.max_prompt_length data.max_response_length data.shuffle data.prompt_key data.filter_overlong_prompts
    data.apply_chat_template_kwargs filter_groups.enable filter_groups.max_num_gen_batches
    rollout.stop rollout.stop_token_ids rollout.min_tokens reward.function reward.functions
    reward.keep_special_tokens reward.overlong_buffer_len reward.overlong_penalty_factor
    actor.mask_truncated_responses rollout.n rollout.temperature rollout.top_p rollout.top_k
    rollout.environment multi_turn.max_assistant_turns multi_turn.max_tool_response_length
    multi_turn.tool_response_truncate_side multi_turn.max_turn_length
    rollout.tensor_model_parallel_size rollout.router_replay quant.scheme quant.group_size quant.ignore quant.align
    quant.kernels lora.r lora.alpha lora.target_modules actor.loss actor.loss_agg_mode actor.clip_ratio_low
    actor.clip_ratio_high actor.clip_ratio_c actor.tau_pos actor.tau_neg actor.mis_imp_ratio_cap actor.use_kl_loss
    actor.kl_loss_coef actor.ppo_mini_batch_size actor.old_log_probs actor.old_log_probs_sample actor.ppo_epochs
    actor.grad_clip actor.seq_clip_ratio_high actor.seq_clip_ratio_low actor.neg_seq_clip_ratio_low
    actor.neg_seq_clip_ratio_high actor.seq_tis_imp_ratio_cap actor.mismatch_outside_cap actor.positive_band
    actor.band_scaling actor.band_reference_length algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo
    rollout_correction.bypass_mode rollout_correction.rollout_is rollout_correction.rollout_is_mode
    rollout_correction.rollout_is_threshold rollout_correction.rollout_is_threshold_lower
    rollout_correction.rollout_is_batch_normalize rollout_correction.rollout_rs
    rollout_correction.rollout_rs_threshold rollout_correction.rollout_rs_threshold_lower
    rollout_correction.rollout_rs_ratio rollout_correction.veto_threshold optim.name optim.lr optim.betas optim.eps
    optim.weight_decay optim.lr_warmup_steps optim.lr_scheduler_type optim.min_lr_ratio optim.muon_lr
    optim.muon_momentum optim.master_dtype trainer.nnodes trainer.n_gpus_per_node trainer.staleness
    trainer.staleness_strategy rollout.n_gpus_per_node
"""


def test_every_key_has_a_verdict():
    """A new key belongs to one of the groups of `qarl.trainer.resume` (it may change), or here (it decides)."""
    assert set(DECIDES.split()) == default_values().keys() - resume.UNTRAINED


def test_a_key_that_an_old_checkpoint_lacks_had_its_default(tmp_path):
    settings = config(tmp_path, "actor.grad_clip=0.5")
    saved = settings.model_dump(mode="json")
    del saved["actor"]["grad_clip"]
    with pytest.raises(UserError, match=r"actor\.grad_clip was 1\.0, now 0\.5"):
        check_changes(settings, tmp_path / "step_1", 1, saved)
    assert check_changes(config(tmp_path), tmp_path / "step_1", 1, saved) == ()


def test_only_listed_keys_may_change_on_a_resume(tmp_path):
    """Every key of the config, each changed alone: without a word, with a note about rounding or validations, or
    refused by name. A key that had no effect in the checkpoint may change."""
    settings = config(tmp_path, "optim.lr_scheduler_type=constant")
    in_effect = as_dotted(settings.model_dump(mode="json"))
    silent = {key for rule in RULES if not rule.reads(in_effect[rule.decider]) for key in rule.keys}
    assert "actor.kl_loss_coef" in silent
    for key in in_effect:
        saved = settings.model_dump(mode="json")
        section, _, leaf = key.rpartition(".")
        (saved[section] if section else saved)[leaf] = "another value"
        if key in resume._FREE or key in silent:
            assert check_changes(settings, tmp_path / "step_1", 1, saved) == (), key
        elif key in resume._ROUNDING:
            (note,) = check_changes(settings, tmp_path / "step_1", 1, saved)
            assert note.startswith(f"changed {key}: the training is the same"), key
        elif key in resume._VALIDATION:
            (note,) = check_changes(settings, tmp_path / "step_1", 1, saved)
            assert note.startswith(f"changed {key}: figures of validations"), key
        else:
            with pytest.raises(UserError, match="cannot resume from") as caught:
                check_changes(settings, tmp_path / "step_1", 1, saved)
            assert caught.value.where.startswith(f'{key} was "another value", now '), key


def test_another_starting_adapter_may_not_change_the_reference_of_a_kl_term(tmp_path):
    """The reference is base and starting adapter together. Without it the checkpoint has all that is trained."""
    adapters = ("lora.r=8", "actor.loss=grpo")
    for use_kl_loss in (False, True):
        settings = config(tmp_path, *adapters, f"actor.use_kl_loss={str(use_kl_loss).lower()}")
        saved = settings.model_dump(mode="json")
        saved["lora"]["path"] = "adapters/sft"
        if not use_kl_loss:
            assert check_changes(settings, tmp_path / "step_1", 1, saved) == ()
            continue
        with pytest.raises(UserError, match="cannot resume from") as caught:
            check_changes(settings, tmp_path / "step_1", 1, saved)
        assert caught.value.where.startswith('lora.path was "adapters/sft", now ')
