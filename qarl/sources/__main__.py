"""Write data files for training and validation from a source of problems.

usage: qarl data SOURCE [KEY=VALUE ...]
       qarl data SOURCE --help

  qarl data reasoning_gym task=chain_sum size=4000 validation=200 min_terms=2 max_terms=2

No question stands twice, neither in a file nor in both. The rows have verl's schema, so every backend, TRL
and `qarl eval` read them. The folder appears when all files are complete.

keys of every source:
  size=4000          rows of train.parquet
  validation=200     rows of validation.parquet; 0: no such file
  seed=1             the same seed gives the same files; the validation rows do not depend on size
  out=data/NAME      the folder to write; NAME is the name of the task
  instruction=TEXT   text below every question, such as "Answer with the number only."
  system=TEXT        text of a system message
  format=parquet     or jsonl
  overwrite=false    true: replace data that this command wrote with other arguments

exit codes:
  0    the files are there
  2    the arguments, the source or the folder cannot be used; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qarl.config.command_arguments import read_request
from qarl.config.errors import nearest
from qarl.console import entry, say
from qarl.errors import UserError
from qarl.progress import live
from qarl.sources import COMMON, SOURCES
from qarl.sources.problems import TRAIN, VALIDATION, Wording, split, to_rows

_EXAMPLE = "qarl data reasoning_gym task=chain_sum"


@dataclass(frozen=True, config={"extra": "forbid"})
class DataRequest:
    """The keys of every source. None is the default that the help names."""

    size: Annotated[int, Field(gt=0)] = 4000
    validation: Annotated[int, Field(ge=0)] = 200
    seed: Annotated[int, Field(ge=0)] = 1
    out: Path | None = None
    instruction: str = ""
    system: str = ""
    format: Literal["parquet", "jsonl"] = "parquet"
    overwrite: bool = False


def _main(argv: list[str]) -> int:
    if not argv:
        print(_help([]))
        return 2
    write(argv)
    return 0


def write(argv: list[str]) -> None:
    """Write the files that the words of a command ask for. Raise UserError if that fails."""
    source = _source(argv[0])
    request, own = _parsed(argv)
    _write(source, own, request, argv)


def _parsed(argv: list[str]) -> tuple[DataRequest, dict[str, str]]:
    """Return the keys of every source, and those of the source `argv[0]`."""
    common = [word for word in argv[1:] if word.partition("=")[0] in COMMON]
    request = read_request(DataRequest, common, example=_EXAMPLE)
    own = [word for word in argv[1:] if word not in common]
    return request, _words(own)


def _write(
    source: ModuleType, words: dict[str, str], request: DataRequest, argv: list[str]
) -> None:
    stream = source.read(words, request.seed)
    folder = request.out or Path("data", stream.name)
    from qarl.sources.files import check_folder, read_record, refuse_other_data, write_files

    check_folder(folder)
    command = ["qarl", "data", *(word for word in argv if not word.startswith("overwrite="))]
    record = {"command": command, "seed": request.seed, **stream.settings}
    old = read_record(folder)
    if old is not None and not request.overwrite:
        if not _asks_for_the_same(old, record):
            refuse_other_data(folder, old)
        names = [TRAIN, VALIDATION] if request.validation else [TRAIN]
        if all((folder / f"{name}.{request.format}").is_file() for name in names):
            say(f"{folder} is up to date")
            return
    count = request.size + request.validation
    with live.phase(f"drawing problems of {stream.name}", total=count, unit="problems"):
        problems = split(stream, train=request.size, validation=request.validation)
    wording = Wording(request.system, request.instruction)
    rows = {name: to_rows(part, name, wording) for name, part in problems.items()}
    paths = write_files(folder, rows, ending=request.format, record=record)
    for name, path in paths.items():
        questions = [len(problem.question) for problem in problems[name]]
        print(
            f"{path}: {len(questions)} prompts, questions of {min(questions)} to {max(questions)} characters"
        )
    print("use them with")
    print(f"  data.train_files={paths[TRAIN]}")
    if VALIDATION in paths:
        print(f"  data.val_files={paths[VALIDATION]}")
    print(f"  reward.function={stream.reward}")


def _asks_for_the_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two records are of the same data: equal settings and keys, in any order and wherever written."""
    if {**old, "command": None} != {**new, "command": None}:
        return False
    try:
        requests = [_parsed(record["command"][2:])[0] for record in (old, new)]
    except (UserError, LookupError, TypeError, AttributeError):
        return False
    first, second = (replace(request, out=None) for request in requests)
    return old["command"][2] == new["command"][2] and first == second


def _words(words: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"{word!r} is not KEY=VALUE", where="command line", fix=f"write {_EXAMPLE}"
            )
        if key in values:
            what = f"{key} is given twice: {values[key]}, then {value}"
            raise UserError(what, where="command line", fix="keep one of them")
        values[key] = value
    return values


def _source(name: str) -> ModuleType:
    """Return the module of a source. Raise UserError if there is no such source."""
    if name in SOURCES:
        return importlib.import_module(SOURCES[name][0])
    listing = f"the sources are {', '.join(SOURCES)}"
    if "=" in name:
        fix = f"write qarl data {next(iter(SOURCES))} {name}"
        raise UserError("the source is missing", where="command line", fix=fix)
    guess = nearest(name, SOURCES)
    fix = f"did you mean {guess}? {listing}" if guess else listing
    raise UserError(f"there is no source {name!r}", where="command line", fix=fix)


def _help(topics: list[str]) -> str:
    """Return the help: this module's docstring and the sources, or the help of the source `topics[0]`."""
    if topics:
        return str(_source(topics[0]).describe(topics[1:]))
    from qarl.config.help import columns

    summaries = columns({name: summary for name, (_, summary) in SOURCES.items()})
    return "\n".join([(__doc__ or "").strip(), "", "sources:", *summaries])


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
