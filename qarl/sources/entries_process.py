"""The program of a process that prints the entries of a task of reasoning-gym, one a line, without end.

It is a process of its own because some tasks iterate over sets of text, whose order depends on Python's hash seed, and
some draw from the global generators of `random` and NumPy. Here all of these are set. Some tasks print while they work.

A line is {"entry": text}, or {"error": words} as the last one.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

CHUNK = 1000
"""Size of the library's datasets. Some tasks draw all their problems at once, so the size decides what they draw."""


def entries(task: str, parameters: dict[str, str], seed: int) -> Iterator[Any]:
    """Yield entries. Entry i of an ordinary task depends on `seed` + i alone."""
    from qarl.data.reasoning_gym_tasks import make_dataset

    while True:
        dataset = make_dataset(task, parameters, seed=seed, size=CHUNK)
        for index in range(CHUNK):
            yield dataset[index]
        seed += CHUNK


def main(task: str, parameters: dict[str, str], seed: int) -> None:
    import numpy

    from qarl.data.entry_text import to_text

    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        for entry in entries(task, parameters, seed):
            output.write(json.dumps({"entry": to_text(entry)}) + "\n")
    except BrokenPipeError:
        os._exit(0)  # the reader has enough
    except Exception as error:  # of the library
        output.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    output.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
