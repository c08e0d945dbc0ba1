"""Checkpoints on disk: saved, loaded, damaged, killed half way, refused by the disk. No engine."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from checkpoint_state import save, small_disk
from ranks import fork

from qarl.checkpoint.model_files import read_tensors
from qarl.checkpoint.resumable import (
    CheckpointError,
    _digest,
    list_checkpoints,
    newest_good,
    open_checkpoint,
    prune,
    tensor_digest,
    tensors_digest,
)
from qarl.checkpoint.storage import StorageError, check_room, recover, whole_folder, write_text
from qarl.errors import UserError

WEIGHTS = "model.safetensors"


def test_what_was_saved_comes_back(pristine_model, tmp_path):
    weights = save(pristine_model, tmp_path / "step_3")
    checkpoint = open_checkpoint(tmp_path / "step_3")
    assert checkpoint.step == 3
    assert (
        checkpoint.metrics["loss"] == 0.1
        and checkpoint.metrics["mismatch/k3"] != checkpoint.metrics["mismatch/k3"]
    )
    loaded = dict(read_tensors(checkpoint.folder))
    assert loaded.keys() == weights.keys() and all(
        torch.equal(loaded[name], weights[name]) for name in weights
    )
    for state in (checkpoint.optimizer(), checkpoint.optimizer(mmap=True)):
        masters = state["masters"]
        assert all(torch.equal(masters[name].to(torch.bfloat16), weights[name]) for name in masters)
    assert torch.equal(checkpoint.rng()["torch"], torch.get_rng_state())
    assert checkpoint.rng()["python"] == random.getstate()


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "bit": (
        lambda folder: rewrite(
            folder, "optimizer.pt", lambda b: b[:9999] + bytes([b[9999] ^ 1]) + b[10000:]
        ),
        "the bytes of optimizer.pt",
    ),
    "cut": (
        lambda folder: rewrite(folder, WEIGHTS, lambda content: content[:-1]),
        f"the bytes of {WEIGHTS}",
    ),
    "missing": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "tokenizer.json cannot be read: No such file",
    ),
    "state cut": (
        lambda folder: rewrite(folder, "state.json", lambda b: b[:100]),
        "state.json is cut short",
    ),
    "state edited": (
        lambda folder: rewrite(
            folder, "state.json", lambda b: b.replace(b'"step": 3', b'"step": 4')
        ),
        "state.json has changed since it was written",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_one_before_is_used(pristine_model, tmp_path, kind):
    save(pristine_model, tmp_path / "step_2", step=2)
    save(pristine_model, tmp_path / "step_3")
    spoil, message = DAMAGE[kind]
    spoil(tmp_path / "step_3")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "step_3")
    checkpoint, problems = newest_good(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2 and len(problems) == 1


def test_another_format_is_an_error_and_no_damage(pristine_model, tmp_path):
    save(pristine_model, tmp_path / "step_2", step=2)
    save(pristine_model, tmp_path / "step_3")
    path = tmp_path / "step_3" / "state.json"
    state = json.loads(path.read_text()) | {"format": 9}
    del state["digest"]
    path.write_text(json.dumps(state | {"digest": _digest(state)}))
    with pytest.raises(UserError, match="has format 9") as caught:
        newest_good(tmp_path)
    assert not isinstance(caught.value, CheckpointError)


def test_only_the_newest_are_kept_by_number(tmp_path):
    for step in (2, 10, 9, 100):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "step_1").symlink_to(tmp_path / "disk")
    (tmp_path / "step_100.damaged").mkdir()
    (tmp_path / "step_12.partial-1").mkdir()
    prune(tmp_path, None)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [100, 10, 9, 2, 1]
    prune(tmp_path, 2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [100, 10, 1]
    assert (tmp_path / "step_100.damaged").is_dir()


@pytest.mark.parametrize("limit", [100_000, 600_000], ids=["in the weights", "in the optimizer"])
def test_a_disk_that_refuses_leaves_nothing_new_and_the_old_ones_whole(
    pristine_model, tmp_path, limit
):
    save(pristine_model, tmp_path / "step_2", step=2)
    sizes = {
        name: part["bytes"]
        for name, part in open_checkpoint(tmp_path / "step_2").state["files"].items()
    }
    assert 100_000 < sizes[WEIGHTS] < 600_000 < sizes["optimizer.pt"]
    with (
        small_disk(limit),
        pytest.raises(StorageError, match="step_3 could not be written") as caught,
    ):
        save(pristine_model, tmp_path / "step_3")
    assert "File too large" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    open_checkpoint(tmp_path / "step_2")
    save(pristine_model, tmp_path / "step_3")
    open_checkpoint(tmp_path / "step_3")


def test_too_little_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(StorageError, match="no room"):
        check_room(tmp_path / "not" / "there", 10**18)
    with (
        pytest.raises(StorageError, match="no room"),
        whole_folder(tmp_path / "new", needed_bytes=10**18),
    ):
        raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_files(tmp_path, monkeypatch):
    """With bytes enough. "No space left on device" alone would send its owner to look for large files."""
    disk = os.statvfs(tmp_path)
    left = SimpleNamespace(
        f_files=1000, f_favail=60, f_frsize=disk.f_frsize, f_bavail=disk.f_bavail
    )
    left.f_blocks, left.f_bfree = disk.f_blocks, disk.f_bfree
    monkeypatch.setattr(os, "statvfs", lambda path: left)
    check_room(tmp_path, 10, least_files=60)
    with pytest.raises(StorageError, match=r"takes only 60 more files \(inodes\)"):
        check_room(tmp_path / "not" / "there", 10, least_files=61)
    left.f_favail = 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"no more files \(inodes\)") as error:
        write_text(tmp_path / "summary.json", "{}")
    assert error.value.fix == "remove files there, or write to another disk"
    left.f_files = 0  # btrfs has no such limit, and says so by 0
    with pytest.raises(StorageError, match="could not be written") as error:
        write_text(tmp_path / "summary.json", "{}")
    assert "inodes" not in str(error.value)
    check_room(tmp_path, 10, least_files=61)


@pytest.mark.parametrize("replaces", [False, True])
def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, replaces):
    """A rename may reach the disk before the bytes of a file that nobody forced there."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def relative(path: object) -> str:
        return Path(str(path)).relative_to(tmp_path).as_posix().replace(str(os.getpid()), "PID")

    def recorded_fsync(descriptor: int) -> None:
        events.append(("fsync", relative(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> None:
        events.append(("rename", relative(target)))
        rename(source, target)

    if replaces:
        (tmp_path / "new").mkdir()
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    with whole_folder(tmp_path / "new") as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
        (partial / "sub").mkdir()
        (partial / "sub" / "deep").touch()
        assert events == []
    first = events.index(("rename", "new.old-PID" if replaces else "new"))
    inside = ("", "/model.safetensors", "/sub", "/sub/deep")
    assert sorted(events[:first]) == [("fsync", f"new.partial-PID{name}") for name in inside]
    assert events[first:] == [("rename", "new.old-PID")] * replaces + [
        ("rename", "new"),
        ("fsync", "."),
    ]


def test_what_killed_processes_left_is_put_in_order(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ended, running = process.pid, os.getppid()
    for name in (
        f"a.partial-{ended}",
        f"b.old-{ended}",
        "c",
        f"c.old-{ended}",
        f"d.partial-{running}",
    ):
        (tmp_path / name).mkdir()
    assert len(recover(tmp_path, "a")) == 1
    assert len(recover(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", f"d.partial-{running}"]
    assert len(recover(tmp_path, alone=True)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "disk" / "model" / "old").touch()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    with whole_folder(tmp_path / "model") as partial:
        assert partial.parent == tmp_path / "disk"
        (partial / "new").touch()
    assert (tmp_path / "model").is_symlink() and [
        p.name for p in (tmp_path / "model").iterdir()
    ] == ["new"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "model", "model", "new"]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.0005)


@pytest.mark.long
def test_sigkill_while_saving_leaves_whole_checkpoints_only(pristine_model, tmp_path):
    """Checkpoints written over and over, some in place of an older one, and killed at three moments, two in a write."""
    chance = random.Random(0)
    left_over = 0
    folder, log = tmp_path / "saved", tmp_path / "log"
    folder.mkdir()
    for attempt in range(3):
        process = fork("save_forever.py", log, pristine_model, folder)
        try:
            while not log.exists() or sum(map(str.isdecimal, log.read_text().splitlines())) < 3:
                assert process.is_alive(), log.read_text()
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.2))
            while attempt >= 1:
                stop(process.pid)
                if any(".partial-" in path.name for path in folder.iterdir()):
                    break
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.001)
        finally:
            process.kill()
            process.join()
        log.unlink()
        before = {path.name for path in folder.iterdir()}
        recover(folder)
        after = {path.name for path in folder.iterdir()}
        left_over += before != after
        assert after == {"step_0", "step_1", "step_2"}
        for _, checkpoint in list_checkpoints(folder):
            open_checkpoint(checkpoint)
    assert left_over >= 2


def test_digests_tell_bytes_dtype_shape_and_name_apart():
    zeros = torch.zeros(4, dtype=torch.int32)
    different = [zeros, zeros.float(), zeros.view(2, 2), -zeros.float(), zeros + 1]
    assert len({tensor_digest(tensor) for tensor in different}) == 5
    assert tensor_digest(torch.arange(6).view(2, 3).t()) == tensor_digest(
        torch.arange(6).view(2, 3).t().contiguous()
    )
    a, b = ("a", zeros), ("b", zeros + 1)
    assert (
        tensors_digest([a, b])
        == tensors_digest([b, a])
        != tensors_digest([("a", b[1]), ("b", a[1])])
    )
    assert tensors_digest([a, b]) != tensors_digest([a, ("c", b[1])])
