"""A receiver in another process, without an engine: run by test_publish_sockets.py.

    remote_receiver.py HOST PORT TOKEN PUBLISHES [DIE_AT]

After each publish it prints the version and whether the engine is stale. With DIE_AT it kills itself at that tensor.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from publish_streams import engine_model, receiver

from qarl.errors import UserError
from qarl.rollout.remote.sockets import WeightClient

host, port, token, publishes, *die_at = sys.argv[1:]
inbox = receiver(engine_model("llama"))
take = inbox._take


def dying(name: str, tensor: Any) -> None:
    if name in die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    take(name, tensor)


inbox._take = dying  # type: ignore[method-assign]  # it dies in the middle of a publish
for _ in range(int(publishes)):
    try:
        with WeightClient(
            (host, int(port)), token, fingerprint=inbox.fingerprint, seconds=20
        ) as client:
            client.feed(inbox)
    except UserError as error:
        print(f"error {error}", file=sys.stderr, flush=True)
    print(inbox.weights.version, inbox.stale, inbox.fingerprint, flush=True)
