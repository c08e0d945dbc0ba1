"""scripts/strip_vllm.py on libraries made here, laid out as nvcc lays out fat binaries."""

from __future__ import annotations

import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from strip_vllm import MACHINE_CODE, MAGIC, PTX, fat_binaries, is_needed, main, stripped


def entry(kind: int, capability: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\x07")
    return (head + struct.pack("<I", capability)).ljust(64, b"\x07") + payload


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


NATIVE = fat_binary(
    entry(MACHINE_CODE, 80, b"ampere" * 9),
    entry(MACHINE_CODE, 90, b"hopper" * 9),
    entry(PTX, 80, b"text80" * 9),
    entry(MACHINE_CODE, 100, b"blackw" * 9),
)
ONLY_PTX = fat_binary(
    entry(MACHINE_CODE, 80, b"other." * 5),
    entry(PTX, 80, b"marlin" * 5),
    entry(PTX, 100, b"newer." * 5),
)
LIBRARY = b"\x7fELF code " + NATIVE + b" data " + MAGIC + b"not a header" + ONLY_PTX + b" end"


def test_only_the_capabilitys_code_stays_and_nothing_moves() -> None:
    data, zeros = stripped(LIBRARY, 90, ptx=True)
    assert len(data) == len(LIBRARY)
    expected = LIBRARY
    for dropped in (b"ampere" * 9, b"text80" * 9, b"blackw" * 9, b"other." * 5, b"newer." * 5):
        expected = expected.replace(dropped, bytes(len(dropped)))
    assert data == expected and zeros == 3 * 54 + 2 * 30
    without, _ = stripped(LIBRARY, 90, ptx=False)
    assert b"marlin" not in without and b"hopper" * 9 in without


def test_what_only_looks_like_a_fat_binary_is_left_alone() -> None:
    for data in (
        b"",
        MAGIC,
        MAGIC + b"\0" * 12,
        MAGIC + struct.pack("<HHQ", 1, 16, 10**9) + b"x" * 99,
    ):
        assert stripped(data, 90, ptx=True) == (data, 0)
    broken = fat_binary(entry(MACHINE_CODE, 80, b"ampere") + b"\1\0\1\1" + b"\xff" * 60)
    (entries,) = fat_binaries(broken)
    assert len(entries) == 1, "the entries end where one does not fit"


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        (
            "vllm/model_executor/layers/fused_moe/configs/E=8,N=7168,device_name=NVIDIA_H200.json",
            True,
        ),
        (
            "vllm/model_executor/layers/fused_moe/configs/E=8,N=7168,device_name=NVIDIA_A100.json",
            False,
        ),
        ("vllm/cumem_allocator.abi3.so", True),
        ("vllm/some.cpython-312-x86_64-linux-gnu.so", True),
        ("vllm/some.cpython-313-x86_64-linux-gnu.so", False),
    ],
)
def test_which_files_stay(name: str, needed: bool) -> None:
    assert is_needed(name, "NVIDIA_H200", "312") is needed


def test_a_wheel_and_a_folder_give_the_same_files(tmp_path: Path) -> None:
    content = {
        "vllm/a.so": LIBRARY,
        "vllm/b.py": b"x = 1\n",
        "vllm-0.24.0.dist-info/METADATA": b"Name: vllm\n",
    }
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (tmp_path / "site" / "torch").mkdir()
    (tmp_path / "site" / "torch" / "c.py").write_text("")
    read = []
    for source in (wheel, tmp_path / "site"):
        output = tmp_path / f"{source.name}.tar.xz"
        assert main([str(source), str(output)]) == 0
        with tarfile.open(output) as packed:
            members = {m.name: packed.extractfile(m) for m in packed.getmembers()}
            read.append({name: file.read() for name, file in members.items() if file is not None})
    assert read[0] == read[1] and read[0].keys() == content.keys()
    assert read[0]["vllm/a.so"] == stripped(LIBRARY, 90, ptx=True)[0]
