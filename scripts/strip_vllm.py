"""Write a small vLLM for one kind of GPU: its machine code stays, that of other GPUs is dropped.

    python scripts/strip_vllm.py WHEEL vllm_hopper.tar.xz
    python scripts/strip_vllm.py .venv-gpu/lib/python3.11/site-packages vllm_hopper.tar.xz --no-ptx

For a machine that no network and only small transfers reach. vLLM's libraries hold each kernel for six and more
capabilities, so most of its 279 MB are of no use on one GPU. The source is a wheel, or a folder with an installed vLLM.
There, `tar -C SITE -xJf vllm_hopper.tar.xz` and `PYTHONPATH=SITE`; scripts/gpu_check.py does it with --packages.

A library holds fat binaries: a header, and for each capability an entry with machine code or with PTX, which the driver
compiles. The payloads that are not needed are filled with zeros, so nothing moves, and xz makes nothing of them. PTX
stays of kernels that have no machine code for this capability, as Marlin's for experts on 9.0; --no-ptx drops it.
Left out besides: FlashAttention 2 (Hopper runs 3), tables of other GPUs, kernels for Blackwell, vLLM's program in Rust,
and modules for other versions of Python. What is written has not been loaded on a GPU yet.

The layout of a fat binary is not documented; it is that of cuda-gdb's and cuobjdump's output, and a file without
such entries stays as it is.
"""

from __future__ import annotations

import argparse
import io
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of the entries."""
ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of the payload."""
PTX, MACHINE_CODE = 1, 2
CAPABILITY_AT = 28
"""Where an entry's header has the capability, times ten."""
LARGEST_ENTRY_HEADER = 4096
DROPPED = (
    "_vllm_fa2_C", "_flashmla", "_qutlass", "fmha_sm100", "vllm/vllm-rs", "_rust_tool_parser", "/configs/", "swagger",
    ".jpg", "/include/cut",
)  # fmt: skip
"""Parts of the names of files that an engine on Hopper does not need."""
PYTHONS = ("310", "311", "312", "313", "314")


class Entry(NamedTuple):
    """An entry of a fat binary, and where its payload is."""

    kind: int
    capability: int
    start: int
    end: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="vLLM's wheel, or a folder with vLLM in it")
    parser.add_argument("output", type=Path, help="the file to write, .tar.xz")
    parser.add_argument("--capability", type=int, default=90, help="times ten; 90 by default")
    parser.add_argument("--device", default="NVIDIA_H200", help="whose tables of tiles stay")
    parser.add_argument("--python", default="312", help="the version there: 312 is 3.12")
    parser.add_argument("--no-ptx", action="store_true", help="drop all PTX")
    args = parser.parse_args(argv)
    used = dropped = 0
    with tarfile.open(args.output, "w:xz") as archive:
        for name, data in files(args.source):
            if not is_needed(name, args.device, args.python):
                continue
            if name.endswith(".so"):
                data, zeros = stripped(data, args.capability, ptx=not args.no_ptx)
                dropped += zeros
                used += len(data) - zeros
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
    size = args.output.stat().st_size
    print(
        f"libraries: {used / 1e6:.0f} MB kept, {dropped / 1e6:.0f} MB dropped; {args.output}: {size / 2**20:.1f} MiB"
    )
    return 0


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each of vLLM's files, from a wheel or a folder."""
    if source.is_dir():
        for path in sorted(source.glob("vllm*/**/*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(source).as_posix(), path.read_bytes()
        return
    with zipfile.ZipFile(source) as wheel:
        for item in wheel.infolist():
            if not item.is_dir():
                yield item.filename, wheel.read(item)


def is_needed(name: str, device: str, python: str) -> bool:
    """Return whether an engine on `device` needs the file `name` of vLLM."""
    if device in name:
        return True
    others = [f"cpython-{version}" for version in PYTHONS if version != python]
    return not any(part in name for part in (*DROPPED, *others))


def stripped(data: bytes, capability: int, *, ptx: bool) -> tuple[bytes, int]:
    """Return a library with zeros in place of the payloads that are not needed, and how many bytes these are.

    `ptx`: whether PTX stays of kernels without machine code for this capability."""
    result = bytearray(data)
    zeros = 0
    for entries in fat_binaries(data):
        native = any(is_native(entry, capability) for entry in entries)
        for entry in entries:
            by_driver = entry.kind == PTX and entry.capability <= capability and not native
            if is_native(entry, capability) or (ptx and by_driver):
                continue
            result[entry.start : entry.end] = bytes(entry.end - entry.start)
            zeros += entry.end - entry.start
    return bytes(result), zeros


def is_native(entry: Entry, capability: int) -> bool:
    return entry.kind == MACHINE_CODE and entry.capability == capability


def fat_binaries(data: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of every fat binary in a library."""
    place = data.find(MAGIC)
    while place >= 0:
        end = place + len(MAGIC)
        if place + HEADER.size <= len(data):
            _, _, head, size = HEADER.unpack_from(data, place)
            if head == HEADER.size and 0 < size <= len(data) - place - head:
                end = place + head + size
                yield list(_entries(data, place + head, end))
        place = data.find(MAGIC, end)


def _entries(data: bytes, at: int, end: int) -> Iterator[Entry]:
    while at + CAPABILITY_AT + 4 <= end:
        kind, _, head, size = ENTRY.unpack_from(data, at)
        start = at + head
        if not CAPABILITY_AT + 4 <= head <= LARGEST_ENTRY_HEADER or start + size > end:
            return
        (capability,) = struct.unpack_from("<I", data, at + CAPABILITY_AT)
        yield Entry(kind, capability, start, start + size)
        at = start + size


if __name__ == "__main__":
    sys.exit(main())
