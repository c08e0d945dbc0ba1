"""What `qarl convert-gguf` refuses before it reads a tensor: one clear error each, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from smollm2 import skip_unless_installed

from qarl.convert_gguf.__main__ import main

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 92871040\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (LFS.encode(), "has pointers of git-lfs"),
        (b"GGUF\x03\x00\x00\x00", "cut short or damaged"),
        (b"GGUF" + bytes(range(200)), "cut short or damaged"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_is_no_whole_gguf_file(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if said.startswith("cut"):
        skip_unless_installed("gguf")
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    assert main([str(file), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
