"""A rollout worker of verl's checkpoint engine `qarl` in another process: run by test_verl_checkpoint_engine.py.

    python verl_remote.py PUBLISHES [DIE_AT]

Reads what `init_process_group` gets, one JSON line per publish, as verl's manager would send it. Its engine is a model
of transformers. Prints what the receiver holds. With DIE_AT it kills itself at that tensor.
"""

# ruff: noqa: E402  the process must be set up first
from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to stdout
os.environ |= {"VERL_PLATFORM": "cpu", "RAY_RAYLET_PID": str(os.getpid()), "RAY_JOB_ID": "01000000"}

import verl  # noqa: F401  registers its platform
from publish_streams import engine_model
from verl.workers.rollout.utils import ensure_async_iterator

from qarl.verl.plugin import publishing
from qarl.verl.plugin.checkpoint_engine import QaRLCheckpointEngine
from qarl.verl.plugin.publishing import run_identity
from qarl.verl.plugin.transport import decode
from qarl.verl.plugin.worker_extension import make_receiver

publishes, *die_at = sys.argv[1:]
publishing.SOCKET_FOLDER = Path(tempfile.mkdtemp())  # waits for no other run on this machine
model = engine_model("llama")
config = SimpleNamespace(model_config=SimpleNamespace(hf_config=model.config))
receiver: Any = make_receiver(SimpleNamespace(vllm_config=config, get_model=lambda: model, kv_caches=[]))
engine = QaRLCheckpointEngine(bucket_size=1 << 20)


async def receive() -> None:
    async for name, tensor in ensure_async_iterator(engine.receive_weights(global_steps=1)):
        if name in die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        receiver.feed(decode([(name, tensor)], run=run_identity()))


for _ in range(int(publishes)):
    assert engine.prepare() == {}
    print("prepared", file=out, flush=True)
    engine.init_process_group(**json.loads(sys.stdin.readline()))
    asyncio.run(receive())
    engine.finalize()
    print(receiver.version, receiver.held, file=out, flush=True)
os._exit(0)
