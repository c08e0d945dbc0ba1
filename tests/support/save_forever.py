"""Saves checkpoints over and over until it is killed: run by tests/unit/checkpoint/test_checkpoint.py.

python save_forever.py MODEL FOLDER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from checkpoint_state import save

model, folder = map(Path, sys.argv[1:])
for step in itertools.count(1):
    save(model, folder / f"step_{step % 3}", step=step % 3)
    print(step, flush=True)
