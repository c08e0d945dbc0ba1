"""Asks verl's engines whether they have the tensors that a delta publish would change.

verl's servers do not return the results of a worker's method (`collective_rpc` in verl/workers/rollout/vllm_rollout/
vllm_async_server.py). So a worker gets the fingerprint of the tensors, and raises an error if its own is different.
"""

from __future__ import annotations

from qarl.verl.plugin.alive import engine_servers

METHOD = "qarl_check_held"
"""The method of `qarl.verl.plugin.worker_extension.QaRLWorkerExtension` that compares the fingerprints."""


def all_hold(fingerprint: str, seconds: float) -> bool:
    """Return whether every engine confirms within `seconds` that it has the tensors of `fingerprint`."""
    servers = engine_servers()
    if not servers:
        return False
    import ray

    try:
        questions = [server.collective_rpc.remote(METHOD, args=(fingerprint,)) for server in servers.values()]
        ray.get(questions, timeout=seconds)
    except Exception:  # in doubt, all tensors are published, and that publish reports what is wrong
        return False
    return True
