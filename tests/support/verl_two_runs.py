"""One run that publishes many times through verl's sender and receiver on a socket that another run uses too: started
twice by test_verl_publish.py.

    python verl_two_runs.py RUN SOCKET ROUNDS FOLDER OUTPUT_FILE

RUN 1 publishes ones, RUN 2 twos. The output: how many publishes brought the run its own tensors, how many brought
others, how many brought nothing or too little without an error (`silent`); and the errors. With an empty FOLDER runs do
not wait for each other.
"""

# The environment is set before torch and verl are imported: they read it then.
# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
run, handle, rounds, folder, output = sys.argv[1:]
os.environ |= {"RAY_RAYLET_PID": run, "RAY_JOB_ID": "01000000", "QARL_PUBLISH_TIMEOUT": "1"}

import torch
import verl  # noqa: F401  registers its platform
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver,
    BucketedWeightSender,
)

from qarl.verl.plugin import publish
from qarl.verl.plugin.publish import Publication, decode, publication, publish_timeout, run_identity, socket_timeouts

publish.SOCKET_FOLDER = Path(folder)
names = [f"model.layers.{i}.weight" for i in range(3)]


def stream() -> Publication:
    made = publication([(name, torch.full((1 << 16,), float(run))) for name in names], 0)
    if folder:
        return made.reserve()
    made._reserved.enter_context(socket_timeouts(publish_timeout()))
    return made


def receive(found: dict[str, Any], errors: list[str]) -> None:
    failures: list[str] = []

    def take(weights: Any, is_last: bool) -> None:
        try:
            for name, tensor in decode(weights, run=run_identity()):
                found[name] = float(tensor.float().mean())
        except Exception as error:
            failures.append(str(error).splitlines()[0])

    try:
        BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(take)
    except Exception as error:
        failures.append(repr(error))
    errors += failures


def meet() -> None:
    """Return once the other run is here too."""
    folder = Path(handle.removeprefix("ipc://")).parent
    (folder / f"ready{run}").touch()
    while not all((folder / f"ready{number}").exists() for number in (1, 2)):
        time.sleep(0.01)


own, foreign, silent = 0, 0, 0
errors: list[str] = []
meet()
for _ in range(int(rounds)):
    time.sleep(random.uniform(0, 0.01))
    weights, found, before = stream(), dict[str, Any](), len(errors)
    worker = threading.Thread(target=receive, args=(found, errors))
    worker.start()
    try:
        asyncio.run(BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(weights))
    except Exception as error:
        errors.append(repr(error))
    worker.join()
    del weights
    values = {found.get(name) for name in names}
    own += values == {float(run)}
    foreign += bool(values - {float(run), None})
    silent += values != {float(run)} and len(errors) == before
Path(output).write_text(json.dumps({"own": own, "foreign": foreign, "silent": silent, "errors": errors}))
os._exit(0)
