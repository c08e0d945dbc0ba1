"""What a first call compiles on a GPU, saved by scripts/gpu_check.py for the next machine of the same kind.

Triton's kernels, what the driver compiled from PTX (a minute for Marlin's experts), and vLLM's compiled graphs. The
archive is written in pieces of at most `PIECE` bytes, which also a narrow transfer takes, and names the driver and the
packages that made it. With others nothing is restored.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

PIECE = 15 * 2**20
MOST_PIECES = 3
NAME = "gpu_caches.tar.xz"
ABOUT = "about.json"
_HOME = Path.home()
CACHES = {
    "triton": ("TRITON_CACHE_DIR", _HOME / ".triton" / "cache"),
    "driver": ("CUDA_CACHE_PATH", _HOME / ".nv" / "ComputeCache"),
    "vllm": ("VLLM_CACHE_ROOT", _HOME / ".cache" / "vllm"),
}
"""Name in the archive -> the variable that moves the cache, and where it is without it."""


def folders() -> dict[str, Path]:
    return {
        name: Path(os.environ.get(variable) or default)
        for name, (variable, default) in CACHES.items()
    }


def save(output: Path, about: Mapping[str, object]) -> str:
    """Write the caches to `output` in pieces, the smallest files first, as long as there is room. Return what was
    written, in words. `about`: whatever must be equal where they are restored."""
    written = io.BytesIO()
    files = sorted(_files(), key=lambda file: file[1].stat().st_size)
    left_out = 0
    with lzma.open(written, "wb", preset=1) as compressed, \
            tarfile.open(fileobj=compressed, mode="w|") as archive:  # fmt: skip
        text = json.dumps(dict(about), sort_keys=True).encode()
        member = tarfile.TarInfo(ABOUT)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
        for name, path in files:
            if written.tell() + path.stat().st_size > MOST_PIECES * PIECE:
                left_out += 1
                continue
            archive.add(path, name, recursive=False)
    data = written.getvalue()
    for old in output.glob(f"{NAME}.*"):
        old.unlink()
    starts = range(0, len(data), PIECE)
    for number, start in enumerate(starts):
        (output / f"{NAME}.{number}").write_bytes(data[start : start + PIECE])
    summary = f"caches: {len(files) - left_out} files, {len(data) / 2**20:.1f} MiB in {len(starts)} pieces"
    return f"{summary}; no room for {left_out}" if left_out else summary


def restore(source: Path, about: Mapping[str, object]) -> str:
    """Put back what `save` wrote to `source`, beside what is there. Return what was done, in words."""
    pieces = sorted(source.glob(f"{NAME}.*"), key=lambda path: int(path.suffix[1:]))
    if not pieces:
        return f"caches: none in {source}"
    data = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    targets = folders()
    count = 0
    try:
        with tarfile.open(fileobj=data, mode="r:xz") as archive:
            first = archive.next()
            stored = (
                archive.extractfile(first) if first is not None and first.name == ABOUT else None
            )
            if stored is None or json.loads(stored.read()) != json.loads(json.dumps(dict(about))):
                return "caches: made with another driver or other packages, so not restored"
            for member in archive:
                kind, _, name = member.name.partition("/")
                if kind not in targets or not member.isfile():
                    continue
                member.name = name
                archive.extract(member, targets[kind], filter="data")
                count += 1
    except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        return f"caches: cannot be read after {count} files: {error}"
    return f"caches: {count} files restored"


def _files() -> Iterator[tuple[str, Path]]:
    for kind, folder in folders().items():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{kind}/{path.relative_to(folder).as_posix()}", path
