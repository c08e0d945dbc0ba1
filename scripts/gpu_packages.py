"""Packages that scripts/gpu_check.py takes along to a machine without a network: wheels, and archives of
scripts/strip_vllm.py."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path


def unpack(folder: Path, site: Path) -> str:
    """Unpack every wheel and .tar.xz of `folder` into `site`, each once. Return what was done, in words.

    A wheel is a zip of its packages. What it would put elsewhere (scripts, headers) is not needed."""
    site.mkdir(parents=True, exist_ok=True)
    done = []
    for source in sorted([*folder.glob("*.whl"), *folder.glob("*.tar.xz")]):
        mark = site / f".{source.name}.{source.stat().st_size}"
        if mark.exists():
            continue
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                wheel.extractall(site)
        else:
            with tarfile.open(source) as archive:
                archive.extractall(site, filter="data")
        mark.touch()
        done.append(source.name)
    return f"packages: {', '.join(done) or 'nothing new'} in {site}"
