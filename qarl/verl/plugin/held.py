"""Asks verl's engines whether they hold the tensors that a delta publish would change.

verl's servers do not return what a worker's method returns (`collective_rpc` in verl/workers/rollout/vllm_rollout/
vllm_async_server.py). So a worker is asked whether it holds one fingerprint, and raises an error if it does not.
"""

from __future__ import annotations

from qarl.verl.plugin.alive import engine_servers

METHOD = "qarl_check_held"
"""The method of `qarl.verl.plugin.worker_extension.QaRLWorkerExtension` that answers."""


def all_hold(fingerprint: str, seconds: float) -> bool:
    """Return whether every worker of every engine says within `seconds` that it holds the tensors of `fingerprint`."""
    servers = engine_servers()
    if not servers:
        return False
    import ray

    try:
        questions = [server.collective_rpc.remote(METHOD, args=(fingerprint,)) for server in servers.values()]
        ray.get(questions, timeout=seconds)
    except Exception:  # any doubt means a publish of all tensors, which reports what is wrong
        return False
    return True
