"""The folder of a verl run: metrics under our names, checkpoints, resume, export; what a run says meanwhile."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from verl_runs import quickstart

from qarl.checkpoint.read_weights import (
    BASE_FILE,
    find_checkpoint,
    open_ranks,
    whole_and_torn,
    whole_tensor,
)
from qarl.errors import UserError
from qarl.hangup import interrupted_code
from qarl.metrics.tracker import read_metrics
from qarl.rollout.publish.checksum import checksums
from qarl.verl.config import trainer_keys
from qarl.verl.config_classes import QuantSettings
from qarl.verl.followed_log import MetricsFollower, our_names
from qarl.verl.interrupts import answered_interrupt
from qarl.verl.saving import HAS_QUEUE, QUEUE
from qarl.verl.state_record import (
    PARTS,
    check_before_loading,
    check_record,
    engine_state,
    save_record,
)

pytest.importorskip("verl")

from qarl.train import dry_run

pytestmark = pytest.mark.usefixtures("own_environment")


def test_metrics_take_our_names():
    accuracy = "val-core/column_addition/acc/mean@1"
    verls = {
        "actor/mismatch/k3": 1.0,
        "actor/pg_loss": 2.0,
        "timing_s/gen": 3.0,
        accuracy: 0.5,
        "text": "no number",
    }
    ours = {
        "mismatch/k3": 1.0,
        "actor/pg_loss": 2.0,
        "timing_s/rollout": 3.0,
        accuracy: 0.5,
        "val/accuracy": 0.5,
    }
    assert our_names(verls) == ours


def test_one_bad_line_of_verls_does_not_end_the_metrics(tmp_path, capsys):
    config = quickstart(**{"output_dir": str(tmp_path), "trainer.logger": []})
    config.run_dir.mkdir()
    path = config.run_dir / "verl.jsonl"

    def line(step: int) -> str:
        return json.dumps({"step": step, "data": {"x": float(step)}}) + "\n"

    follower = MetricsFollower(config, path, 0.0)
    with follower:
        path.write_text(line(1) + "no json\n" + '{"step": 2}\n' + line(3) + line(4)[:8])
        follower._stop.set()
        follower._thread.join()
        follower._read()
        with path.open("a") as file:
            file.write(line(4)[8:])
    assert [entry["step"] for entry in read_metrics(config.run_dir)] == [1, 3, 4]
    assert capsys.readouterr().err.count("was not logged") == 2


def checkpoint(run: Path, step: int, *, ranks: int = 1) -> Path:
    """A folder as verl's FSDP checkpoint manager and trainer leave it, with next to nothing in its files."""
    folder = run / "checkpoints" / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    torch.save({}, folder / "data.pt")
    for rank in range(ranks):
        torch.save({}, folder / "actor" / f"model_world_size_{ranks}_rank_{rank}.pt")
    return folder


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """verl's loop in QaRL's trainer, without its work: each step takes `minutes`. Returns the steps that are saved."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from qarl.verl import saving
    from qarl.verl.trainer import QaRLTrainerSync

    clock, saved = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def save(trainer: object) -> None:
        checkpoint(tmp_path, trainer.global_steps)
        saved.append(trainer.global_steps)

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.trainer_base.tq", SimpleNamespace(kv_clear=lambda **more: None)
    )

    def run(minutes: float, start: int = 0, total: int = 9, **changes: object) -> list[int]:
        trainer = object.__new__(QaRLTrainerSync)
        keys = trainer_keys(quickstart(**{"trainer.save_final": False, **changes}))
        trainer.config = OmegaConf.create(
            {
                "skip": {},
                "global_profiler": {"steps": None},
                "trainer": {},
                "actor_rollout_ref": {"actor": {"fsdp_config": {}}},
            }
        )
        for key, value in keys.items():
            OmegaConf.update(trainer.config, key.removeprefix("+"), value, force_add=True)
        trainer.config.trainer.update({"logger": [], "val_before_train": False, "test_freq": -1})
        trainer.config.trainer.default_local_dir = str(tmp_path / "checkpoints")
        trainer.global_steps, trainer.total_training_steps, trainer.steps_per_epoch = (
            start,
            total,
            100,
        )
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)

        def step(*arguments: object) -> object:
            clock.now += 60 * minutes
            return SimpleNamespace(keys=[], partition_id="train")

        trainer.step = step
        for name in (
            "_start_profiling",
            "_stop_profiling",
            "_reissue_inflight_prompts",
            "_shutdown_dump_executor",
        ):
            setattr(trainer, name, lambda: None)
        trainer._compute_metrics = lambda *arguments, **more: None
        saved.clear()
        trainer.fit(None)
        return list(saved)

    return run


# The table of trainer/test_saving.py without its interrupts: keys, minutes of a step, steps that are saved, and
# those that are left.
SAVES = {
    "short": ({}, 1, [], []),
    "by time": ({}, 3, [4, 8, 9], [9]),
    "by another time": ({"trainer.save_minutes": 6}, 3, [2, 4, 6, 8, 9], [9]),
    "by steps": ({"trainer.save_freq": 4}, 0, [4, 8, 9], [4, 8, 9]),
    "by steps and time": ({"trainer.save_freq": 4}, 4, [3, 4, 7, 8, 9], [4, 8, 9]),
    "the newest": ({"trainer.max_ckpt_to_keep": 2}, 3, [4, 8, 9], [8, 9]),
    "never": ({"trainer.save_minutes": -1}, 30, [], []),
}


@pytest.mark.parametrize("case", SAVES)
def test_when_a_run_saves_and_what_it_leaves(loop, tmp_path, case):
    changes, minutes, steps, left = SAVES[case]
    assert loop(minutes, **changes) == steps
    assert sorted(whole_and_torn(tmp_path / "checkpoints")[0]) == left


def test_a_resumed_run_replaces_only_what_was_saved_by_time(loop, tmp_path):
    assert loop(4, total=5, **{"trainer.save_freq": 3}) == [3, 5]
    assert loop(3, start=5) == [9]
    assert sorted(whole_and_torn(tmp_path / "checkpoints")[0]) == [3, 9]
    assert loop(
        1, start=9, total=12, **{"trainer.save_freq": 12, "trainer.max_ckpt_to_keep": 2}
    ) == [12]
    assert sorted(whole_and_torn(tmp_path / "checkpoints")[0]) == [9, 12]
    begins = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(tmp_path / "checkpoints/global_step_9"),
    }
    keys = {"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 2}
    assert loop(1, start=12, total=15, **keys, **begins) == [13, 14, 15]
    assert sorted(whole_and_torn(tmp_path / "checkpoints")[0]) == [9, 14, 15], (
        "a repeated command begins with 9"
    )


def test_a_run_goes_on_from_verls_newest_checkpoint(opened, tmp_path):
    folder = checkpoint(opened.run, 4)
    opened.tracker.write_text("4")
    assert opened() == 4
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder)}
    assert opened(**path) == 4
    (opened.run / "summary.json").write_text(json.dumps({"finished": True}))
    assert opened(**path) == 4 and not (opened.run / "summary.json").exists()
    (opened.run / "summary.json").write_text(json.dumps({"finished": True}))
    assert opened() == 0
    assert Path(f"{opened.run}.1").is_dir() and not (opened.run / "checkpoints").exists()
    with pytest.raises(UserError, match="is not a complete checkpoint of verl"):
        opened(**{"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path)})


def test_half_a_checkpoint_is_none(opened, capsys):
    for step in (2, 4, 6):
        checkpoint(opened.run, step, ranks=2)
    opened.tracker.write_text("6")
    last = opened.run / "checkpoints" / "global_step_6"
    whole = (last / "data.pt").read_bytes()
    (last / "data.pt").write_bytes(whole[:-30])
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(last)}
    with pytest.raises(UserError, match=r"data\.pt"):
        opened(**path)
    (last / "data.pt").write_bytes(whole)
    (last / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(UserError, match="one rank"):
        opened(**path)
    assert opened() == 4
    assert opened.tracker.read_text() == "4"  # which verl resumes from
    assert not last.exists() and "global_step_4 is the newest complete" in capsys.readouterr().err
    opened.tracker.write_text("")
    assert opened() == 4
    for folder in (2, 4):
        (opened.run / "checkpoints" / f"global_step_{folder}" / "data.pt").unlink()
    with pytest.raises(UserError, match="the run has no complete checkpoint"):
        opened()


@pytest.mark.parametrize("file", ["optim", "extra_state", "record"])
def test_a_checkpoint_that_lacks_a_saved_part_is_no_start(opened, capsys, file):
    """verl's workers would find out after the start of the engines. The weights alone are enough for an export."""
    record = {"model.a": "0", "optimizer.0.exp_avg": "0", "scheduler": "0", "rng.cpu": "0"}
    for step in (2, 4):
        actor = checkpoint(opened.run, step) / "actor"
        for part in ("optim", "extra_state"):
            torch.save({}, actor / f"{part}_world_size_1_rank_0.pt")
        (actor / "qarl_state_world_size_1_rank_0.json").write_text(json.dumps(record))
    assert opened() == 4
    if file == "record":
        (actor / "qarl_state_world_size_1_rank_0.json").write_text("{")
    else:
        (actor / f"{file}_world_size_1_rank_0.pt").unlink()
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(actor.parent)}
    with pytest.raises(UserError, match=r"missing or cut short|is damaged"):
        opened(**path)
    assert find_checkpoint(opened.run, None) == actor.parent
    assert opened() == 2 and "global_step_4 is incomplete" in capsys.readouterr().err


def test_a_checkpoint_without_the_responses_that_wait_is_no_start(opened, capsys):
    """verl writes them last, and starts without them if they are missing."""
    for step in (2, 4):
        folder = checkpoint(opened.run, step)
        (folder / HAS_QUEUE).touch()
        (folder / QUEUE).mkdir()
    assert opened() == 4
    (folder / QUEUE).rmdir()
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder)}
    with pytest.raises(UserError, match="the responses that wait"):
        opened(**path)
    assert opened() == 2
    assert "global_step_4 is incomplete" in capsys.readouterr().err


def test_an_export_says_what_a_checkpoint_lacks(tmp_path, capsys):
    folder = checkpoint(tmp_path, 6, ranks=2)
    (folder / "actor" / "model_world_size_2_rank_1.pt").unlink()
    whole = checkpoint(tmp_path, 4)
    assert find_checkpoint(tmp_path, None) == whole
    assert "note: the checkpoint of step 6 is incomplete: actor/ lacks" in capsys.readouterr().err
    checkpoint(tmp_path, 7)
    (tmp_path / "config.yaml").write_text("lora: {r: 8}")
    (whole / "actor" / BASE_FILE).write_text("{}")
    assert find_checkpoint(tmp_path, None) == whole
    assert f"step 7 is incomplete: actor/{BASE_FILE}" in capsys.readouterr().err
    for step, what in ((6, "step 6 is incomplete"), (8, "no checkpoint of step 8")):
        with pytest.raises(UserError, match=what):
            find_checkpoint(tmp_path, step)


def test_weights_are_checked_by_a_record_or_said_to_be_unchecked(tmp_path, capsys):
    actor = checkpoint(tmp_path, 4) / "actor"
    weight = torch.randn(4, 4)
    torch.save({"a": weight, "b": weight + 1}, actor / "model_world_size_1_rank_0.pt")
    assert torch.equal(whole_tensor(open_ranks(actor), "a"), weight)
    assert "read unchecked" in capsys.readouterr().err
    record = actor / "qarl_state_world_size_1_rank_0.json"
    sums = [f"{value & (2**64 - 1):016x}" for value in checksums([weight, weight + 1])]
    record.write_text(json.dumps({"model.a": sums[0], "model.b": sums[1]}))
    assert (
        torch.equal(whole_tensor(open_ranks(actor), "b"), weight + 1)
        and capsys.readouterr().err == ""
    )
    record.write_text(json.dumps({"model.a": sums[0]}))
    with pytest.raises(UserError, match="b differs from what was saved"):
        whole_tensor(open_ranks(actor), "b")


def test_a_resume_that_changes_what_is_trained_is_refused(opened):
    checkpoint(opened.run, 4)
    opened.tracker.write_text("4")
    assert opened(**{"trainer.total_training_steps": 200, "verl": {"trainer.val_only": True}}) == 4
    for changes in ({"optim.lr": 1e-3}, {"verl": {"actor_rollout_ref.rollout.top_k": 5}}):
        with pytest.raises(UserError, match="changes what is trained"):
            opened(**changes)
    with pytest.raises(UserError, match="past the end"):
        opened(**{"trainer.total_training_steps": 3})


def test_a_dry_run_refuses_a_resume_that_the_run_refuses(opened, tmp_path):
    checkpoint(opened.run, 4)
    opened.tracker.write_text("4")
    settings = {"output_dir": str(tmp_path), "model.path": "elsewhere/model"}
    (opened.run / "config.yaml").write_text(quickstart(**settings).resolved_yaml())
    dry_run(quickstart(**settings))
    with pytest.raises(UserError, match=r"on another number of ranks[\s\S]*n_gpus_per_node"):
        dry_run(quickstart(**settings, **{"trainer.n_gpus_per_node": 2}))
    assert opened.tracker.read_text() == "4"


@pytest.mark.parametrize("ray_has_started", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_is_answered_and_ends_the_run(capfd, number, ray_has_started):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), answered_interrupt(lambda: "it resumes after step 12"):
        if ray_has_started:
            signal.signal(
                signal.SIGTERM, lambda number, frame: sys.exit(number)
            )  # as ray.init does
        signal.raise_signal(number)
    assert (
        "stopping verl now" in (err := capfd.readouterr().err)
        and "it resumes after step 12\n" in err
    )
    assert signal.getsignal(number) is before


def test_a_closed_terminal_ends_verl_once_and_leaves_time_for_the_last_files(capfd, monkeypatch):
    monkeypatch.setattr("qarl.hangup._HangUp.came", False)
    before = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(KeyboardInterrupt), answered_interrupt(lambda: "it resumes"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "stopping verl now" in capfd.readouterr().err and interrupted_code() == 129


def stepped_engine() -> Any:
    """What a record reads of verl's engine, after one update of a linear."""
    module = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler: Any = SimpleNamespace(state_dict=dict)
    manager = SimpleNamespace(model=module)  # which is the adapters, if there are any
    for part in PARTS:
        setattr(manager, f"should_load_{part}", part != "extra")
    return SimpleNamespace(
        checkpoint_manager=manager,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        rank=0,
        quant=QuantSettings(),
    )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"model.bias": "0" * 16}, "model.bias"),
        ({"model.bias": None}, "model.bias"),
        ({"model.other": "0" * 16}, "model.other"),
        ({"optimizer.2.exp_avg": "0" * 16}, r"optimizer\.2\.exp_avg"),
    ],
    ids=["equal", "another number", "too much", "a weight is left out", "a moment is left out"],
)
def test_a_loaded_state_must_be_the_saved_one(tmp_path, monkeypatch, changes, wrong):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    engine = stepped_engine()
    saved = engine_state(engine, ("model", "optimizer")) | changes
    record = {name: digest for name, digest in saved.items() if digest is not None}
    (tmp_path / "qarl_state_world_size_1_rank_0.json").write_text(json.dumps(record))
    if wrong is None:
        assert "equals the saved one" in check_record(engine, str(tmp_path))
        return
    with pytest.raises(UserError, match=rf"1 parts of the loaded state differ[\s\S]*{wrong}"):
        check_record(engine, str(tmp_path))


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        ({"scheme": "w8a8"}, {"scheme": "w8a8"}, None),
        ({"mismatch_limit": 0.1}, {"mismatch_limit": 0.2}, None),
        ({"scheme": "w8a8"}, {"scheme": "fp8"}, "quant.scheme=fp8, saved with w8a8"),
        ({"align": "model"}, {"align": "off"}, "quant.align=off, saved with model"),
        ({"group_size": 64}, {"group_size": 32}, "quant.group_size=32, saved with 64"),
        ({"lora": {"r": 8}}, {}, "quant.lora="),
        ({"scheme": "w8a8"}, None, "quant.scheme=None, saved with w8a8"),
    ],
)
def test_a_resume_multiplies_as_before(tmp_path, monkeypatch, saved, now, named):
    """verl's own command line has no other check of this."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    engine = stepped_engine()
    engine.checkpoint_manager.should_save_model = True
    engine.checkpoint_manager.should_save_optimizer = True
    engine.checkpoint_manager.should_save_extra = False
    engine.quant = QuantSettings(**saved)
    save_record(engine, str(tmp_path))
    engine.quant = None if now is None else QuantSettings(**now)
    if named is None:
        check_before_loading(engine, str(tmp_path))
        assert "equals the saved one" in check_record(engine, str(tmp_path))
        return
    with pytest.raises(UserError, match="other settings of quant") as error:
        check_before_loading(engine, str(tmp_path))
    assert named in str(error.value)


def test_copies_to_the_host_are_complete_before_they_are_read(monkeypatch):
    """With param_offload on a GPU the copies end only at the device's next synchronization. Here that is when they are
    made."""
    engine = stepped_engine()
    module, optimizer = engine.checkpoint_manager.model, engine.optimizer
    expected = engine_state(engine)
    tensors = [*module.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    copies = [tensor.detach().clone() for tensor in tensors]
    torch._foreach_zero_([tensor.detach() for tensor in tensors])

    def synchronize() -> None:
        torch._foreach_copy_([tensor.detach() for tensor in tensors], copies)

    assert engine_state(engine) != expected, "without an accelerator nothing is waited for"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    assert engine_state(engine) == expected
