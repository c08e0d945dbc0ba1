"""Problems of reasoning-gym: any of its tasks, with the task's own parameters and its own scorer.

A row's `extra_info` has what the scorer reads (`qarl.data.reasoning_gym_reward`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from qarl.data import reasoning_gym_reward as reward
from qarl.data.entry_text import from_text
from qarl.data.reasoning_gym_tasks import (
    check_task,
    make_dataset,
    parameter_fields,
    parameter_values,
    task_names,
    type_name,
)
from qarl.errors import UserError
from qarl.sources import COMMON, entries_process
from qarl.sources.problems import Problem, Stream

NAME = "reasoning_gym"
DEFAULT_WAY = "auto"
_HELP = """Problems of a task of reasoning-gym (https://github.com/open-thought/reasoning-gym).

usage: qarl data reasoning_gym task=NAME [KEY=VALUE ...]
       qarl data reasoning_gym --help tasks    names of all tasks
       qarl data reasoning_gym --help NAME     parameters of a task, with types and defaults

keys, beside those of `qarl data --help`:
  task=NAME          such as chain_sum
  answer_in=auto     where the scorer finds the answer: `tags` (the last <answer>...</answer>), `last_line`,
                     `last_number`, `whole` (the whole response), or `auto`: tags if there are any, else the whole
                     response
  PARAMETER=VALUE    of the task, such as min_terms=2; lists as [a, b] or a,b

Train on the files with reward.function=reasoning_gym, which is the task's own scorer."""


def read(words: Mapping[str, str], seed: int) -> Stream:
    """Return the problems of the task that `words` name. Raise UserError for unknown words, before any work."""
    parameters = dict(words)
    task = parameters.pop("task", "")
    if not task:
        raise UserError(
            "task is missing",
            where="command line",
            fix="write task=NAME, such as task=chain_sum; `qarl data reasoning_gym --help tasks` lists all",
        )
    answer_in = parameters.pop(reward.ANSWER_IN, DEFAULT_WAY)
    if answer_in not in reward.WAYS:
        raise UserError(
            f"answer_in={answer_in} is no way to find an answer",
            where="command line",
            fix=f"choose one of {', '.join(reward.WAYS)}",
        )
    check_task(task)
    parameter_values(task, parameters, ("task", reward.ANSWER_IN, *COMMON))
    make_dataset(task, parameters)
    info = {
        reward.TASK: task,
        reward.PARAMETERS: json.dumps(parameters, sort_keys=True),
        reward.ANSWER_IN: answer_in,
    }
    settings = {"task": task, "parameters": parameters, "answer_in": answer_in}
    settings["reasoning-gym"] = _version()
    return Stream(task, NAME, _problems(task, parameters, seed, info), settings)


def _problems(
    task: str, parameters: dict[str, str], seed: int, info: Mapping[str, Any]
) -> Iterator[Problem]:
    for text in _entries(task, parameters, seed):
        entry = from_text(text)
        part = entry["metadata"].get("source_dataset", task)
        yield Problem(f"{NAME}/{part}", entry["question"], entry["answer"], {**info, "entry": text})


def _entries(task: str, parameters: dict[str, str], seed: int) -> Iterator[str]:
    """Yield the texts of entries, which a process with a fixed hash seed draws."""
    program = [sys.executable, "-P", entries_process.__file__]
    arguments = [task, json.dumps(parameters), str(seed)]
    environment = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | environment,
        start_new_session=True,  # keeps Ctrl-C away from it: it is ended below
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise _failed(task, message["error"])
                yield message["entry"]
        finally:
            process.kill()
    raise _failed(task, f"its process ended with exit code {process.returncode}")


def _failed(task: str, why: str) -> UserError:
    return UserError(
        f"the task {task} cannot make a problem",
        where="reasoning-gym",
        why=why,
        fix="give it other parameters; its message says which",
    )


def _version() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return "unknown"


def describe(topics: list[str]) -> str:
    """Return the help: of the source, of all tasks (`tasks`), or of one task."""
    if not topics:
        return _HELP
    if topics[0] == "tasks":
        return "tasks of reasoning-gym:\n" + "\n".join(f"  {name}" for name in task_names())
    lines = [f"parameters of the task {topics[0]}:"]
    for name, (kind, default) in parameter_fields(topics[0]).items():
        known = "" if default is dataclasses.MISSING else f"default: {default}"
        lines.append(f"  {name:28} {type_name(kind):20} {known}".rstrip())
    return "\n".join(lines)
