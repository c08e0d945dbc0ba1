"""The NVIDIA driver against PyTorch's CUDA, on files as the driver writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qarl.checks import driver
from qarl.checks.run import CHECKS
from qarl.errors import UserError

CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Sep  5 22:00:00 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version:  13.2.0\n"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def of(text: str | None, cuda: str | None, sees_gpu: bool = False) -> None:
        monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
        if text is not None:
            (tmp_path / "version").write_text(text)

    return of


@pytest.mark.parametrize("sees_gpu", [True, False])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("compiler", [True, False])
def test_triton_needs_headers_and_a_compiler(monkeypatch, tmp_path, sees_gpu, header, compiler) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(driver.sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's own Python
    paths = {"posix_prefix": tmp_path}
    monkeypatch.setattr(driver.sysconfig, "get_path", lambda name, scheme: str(paths[scheme]))
    monkeypatch.setattr(driver.shutil, "which", lambda name: "/usr/bin/gcc" if compiler else None)
    monkeypatch.delenv("CC", raising=False)
    if header:
        (tmp_path / "Python.h").touch()
    if not sees_gpu or (header and compiler):
        return driver.check_compiler()
    with pytest.raises(UserError) as error:
        driver.check_compiler()
    assert ("Python.h" in str(error.value), "gcc or clang" in str(error.value)) == (not header, not compiler)


@pytest.mark.parametrize("form", [CLOSED, OPEN])
@pytest.mark.parametrize(
    ("version", "cuda", "refused"),
    [("550.54.15", "13.0", True), ("579.99", "13.0", True), ("580.65.06", "13.0", False), ("590.1", "13.0", False),
     ("550.54.15", "12.9", False), ("515.105.01", "12.4", True)],
)  # fmt: skip
def test_a_driver_that_is_too_old_is_refused(machine, form: str, version: str, cuda: str, refused: bool) -> None:
    machine(form.format(version), cuda)
    assert driver.driver_version() == version
    check = next(check for check in CHECKS if check.name == "NVIDIA driver")
    if not refused:
        check.make(None)  # type: ignore[arg-type]  # it looks at no input
        return
    needed = {"13": 580, "12": 525}[cuda[:2]]
    with pytest.raises(
        UserError, match=rf"(?s)driver {version} is too old.*CUDA {cuda} needs driver {needed}.*R{needed}"
    ):
        check.make(None)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("text", "cuda", "sees_gpu"),
    [
        (CLOSED.format("550.54.15"), "13.0", True),  # with cuda-compat
        (CLOSED.format("550.54.15"), None, False),  # a CPU build of PyTorch
        (None, "13.0", False),  # no driver
        ("something else\n", "13.0", False),
    ],
)
def test_nothing_else_is_refused(machine, text: str | None, cuda: str | None, sees_gpu: bool) -> None:
    machine(text, cuda, sees_gpu)
    driver.check_driver()
