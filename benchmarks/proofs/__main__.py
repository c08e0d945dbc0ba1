"""Make a committed result again, or compare it: `python -m benchmarks.proofs NAME [--check] [KEY=VALUE ...]`.

    python -m benchmarks.proofs --list                       names, what they show, and their parameters
    python -m benchmarks.proofs top_p                        measures what benchmarks/results/top_p_cpu.json lacks
    python -m benchmarks.proofs top_p --again                measures everything again
    python -m benchmarks.proofs top_p --check schemes=w4a16  measures into runs/proofs, and compares with the file
    python -m benchmarks.proofs --index                      writes docs/lookup/results/index.md

The exit code is 1 if a row does not show what the proof says, or with --check if it differs from the committed one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.proofs import index
from benchmarks.proofs.harness import ROOT, Record, differences, rows_of
from benchmarks.proofs.registry import RESULTS, Result, proofs


def parameters(proof: Result, settings: list[str]) -> dict[str, Any]:
    """Return the values of `KEY=VALUE`, as the proof's function takes them. A list has commas."""
    known = {n: p.default for n, p in list(inspect.signature(proof.load()).parameters.items())[1:]}
    values = {}
    for name, _, text in (setting.partition("=") for setting in settings):
        if name not in known:
            raise SystemExit(
                f"{proof.name} has no parameter {name}; it has {', '.join(known) or 'none'}"
            )
        default = known[name]
        read = (
            str if isinstance(default, tuple) and isinstance(default[0], str) else yaml.safe_load
        )  # "off" is a word
        values[name] = (
            tuple(map(read, text.split(","))) if isinstance(default, tuple) else read(text)
        )
    return values


def check(proof: Result, path: Path) -> int:
    """Print how the rows in `path` differ from the committed ones; return in how many places."""
    committed, fresh = (
        rows_of(json.loads(file.read_text()), proof.key) for file in (RESULTS / proof.file, path)
    )
    messages = [
        f"{name}: {line}"
        for name in fresh
        for line in differences(committed.get(name), fresh[name])
    ]
    print(
        *messages,
        f"{len(fresh)} of {len(committed)} rows compared, {len(messages)} differences",
        sep="\n",
    )
    return len(messages)


def without_amx() -> None:
    """Make this process that of a CPU without AMX: vLLM asks torch which kernels to choose, oneDNN its environment."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = (
        "AVX512_CORE_BF16"  # oneDNN reads it once, so before the import
    )
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=[*proofs(), None], metavar="NAME")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="parameters of the proof")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--index", action="store_true", help="write docs/lookup/results/index.md")
    parser.add_argument("--check", action="store_true", help="compare with the committed file")
    parser.add_argument("--output", type=Path, help="another file to write and to continue")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of the names of rows")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has")
    parser.add_argument("--without-amx", action="store_true", help="as on a CPU without AMX")
    args = parser.parse_intermixed_args(argv)
    if args.index:
        index.PAGE.write_text(index.page(), encoding="utf-8")
        return 0
    if args.list or args.name is None:
        for proof in proofs().values():
            names = list(inspect.signature(proof.load()).parameters)[1:]
            print(f"{proof.name:18} {proof.shows}\n{'':18} {proof.file}; {', '.join(names)}")
        return 0
    if args.without_amx:
        without_amx()
    import torch

    torch.set_num_threads(1)
    proof = proofs()[args.name]
    path = args.output or (
        ROOT / "runs" / "proofs" / proof.file if args.check else RESULTS / proof.file
    )
    command = shlex.join(
        ["python", "-m", "benchmarks.proofs", *(sys.argv[1:] if argv is None else argv)]
    )
    record = Record(path, command, proof.key, only=args.only, again=args.again or args.check)
    proof.load()(record, **parameters(proof, args.settings))
    differ = check(proof, path) if args.check else 0
    return int(not record.ok or bool(differ))


if __name__ == "__main__":
    sys.exit(main())
