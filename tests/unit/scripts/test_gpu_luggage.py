"""What scripts/gpu_check.py takes to a GPU and brings back: packages without a network, and compiled kernels."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_caches
from gpu_packages import unpack

ABOUT = {"device": "NVIDIA H200, 580.1", "torch": "2.11.0"}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for the caches, of which two hold files."""
    for name, (variable, _) in gpu_caches.CACHES.items():
        monkeypatch.setenv(variable, str(tmp_path / "home" / name))
    home = tmp_path / "home"
    for name, data in {"triton/AB/kernel.cubin": b"cubin" * 99, "driver/0/c1": b"sass" * 9}.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_bytes(data)
    return home


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def moved(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine, whose caches are empty."""
    other = home.with_name("other")
    for name, (variable, _) in gpu_caches.CACHES.items():
        monkeypatch.setenv(variable, str(other / name))
    return other


def test_caches_come_back_on_the_next_machine(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_caches, "PIECE", 100)
    monkeypatch.setattr(gpu_caches, "MOST_PIECES", 20)
    said = gpu_caches.save(tmp_path, ABOUT)
    pieces = list(tmp_path.glob("gpu_caches.tar.xz.*"))
    assert "caches: 2 files" in said and len(pieces) > 1
    assert all(path.stat().st_size <= 100 for path in pieces)
    other = moved(caches, monkeypatch)
    assert gpu_caches.restore(tmp_path, ABOUT) == "caches: 2 files restored"
    assert contents(other) == contents(caches)


def test_caches_of_another_driver_or_release_are_not_restored(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_caches.save(tmp_path, ABOUT)
    other = moved(caches, monkeypatch)
    for about in (ABOUT | {"torch": "2.12.0"}, ABOUT | {"device": "NVIDIA H200, 590.0"}):
        assert "not restored" in gpu_caches.restore(tmp_path, about)
    assert not other.exists()
    assert "none in" in gpu_caches.restore(other, ABOUT)


def test_the_smallest_files_are_kept_and_a_broken_archive_ends_nothing(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_caches, "PIECE", 150)
    assert gpu_caches.save(tmp_path, ABOUT).endswith("no room for 1")
    piece = tmp_path / "gpu_caches.tar.xz.0"
    piece.write_bytes(piece.read_bytes()[:-9] + b"123456789")
    moved(caches, monkeypatch)
    assert "cannot be read" in gpu_caches.restore(tmp_path, ABOUT)


def test_packages_are_unpacked_once(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    with zipfile.ZipFile(carried / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small/__init__.py", "x = 1\n")
    (tmp_path / "module.py").write_text("y = 2\n")
    with tarfile.open(carried / "vllm_hopper.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "module.py", "vllm/module.py")
    site = tmp_path / "site"
    said = unpack(carried, site)
    assert "small-1.0-py3-none-any.whl, vllm_hopper.tar.xz" in said
    (site / "small/__init__.py").write_text("changed")
    assert "nothing new" in unpack(carried, site)
    assert contents(site)["small/__init__.py"] == b"changed"
    assert contents(site)["vllm/module.py"] == b"y = 2\n"
