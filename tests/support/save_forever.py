"""Saves checkpoints over and over until it is killed: run by tests/unit/checkpoint/test_checkpoint.py.

save_forever.py MODEL FOLDER, by `ranks.fork`
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from pathlib import Path

from checkpoint_state import save

model, folder = map(Path, sys.argv[1:])
parent = multiprocessing.parent_process()
for step in itertools.count(1):
    save(model, folder / f"step_{step % 3}", step=step % 3)
    print(step, flush=True)
    if (
        parent is None or not parent.is_alive()
    ):  # the tests are over, and nobody will end this program
        break
