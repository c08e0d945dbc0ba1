"""Whether the processes that generate are alive: asked through Ray, by the names that verl gives its actors.

verl notices a dead engine or server only while it waits for its answer, and takes what the survivors have
generated for the whole batch. Whoever depends on them asks here: the sampler while it waits, the trainer before it
publishes.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, wait
from typing import Any

_log = logging.getLogger("qarl.verl.plugin")

SERVER = "vllm_server_"
OTHERS = ("agent_loop_worker_", "reward_loop_worker_")


class Watch:
    """Remembers the actors that it has seen: one that dies has no name any more.

    `only_servers`: leave out the workers of agent loops and rewards.
    """

    def __init__(self, only_servers: bool = False) -> None:
        self._prefixes = (SERVER,) if only_servers else (SERVER, *OTHERS)
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Future[Any]] = {}

    def ask(self, again: bool = False) -> None:
        """Send a question to every actor whose last one was answered. A good answer that nobody looked at is dropped:
        it is from before, and the actor may have died since.

        `again`: ask those too that have not answered yet. A question that an engine takes with it stays without one.
        """
        import ray

        if not ray.is_initialized():
            return
        self._asked = {name: one for name, one in self._asked.items() if (one.exception() if one.done() else not again)}
        for name in ray.util.list_named_actors():
            if name.startswith(self._prefixes) and name not in self._actors:
                self._actors[name] = ray.get_actor(name)
        for name, actor in self._actors.items():
            if name not in self._asked:
                # Goes through to vLLM's workers; Ray answers for itself that a process is there.
                question = (
                    actor.collective_rpc.remote("check_health") if _has_engine(name) else actor.__ray_ready__.remote()
                )
                self._asked[name] = question.future()

    def dead(self, timeout: float = 0.0) -> dict[str, str]:
        """Names of actors that answered with an error, and its last line; waits `timeout` seconds for answers."""
        wait(self._asked.values(), timeout=timeout)
        found = {}
        for name, answer in list(self._asked.items()):
            if answer.done():
                del self._asked[name]
                if (error := answer.exception()) is not None:
                    found[name] = _in_short(error)
        return found


def engine_servers() -> dict[str, Any]:
    """Ray's actors around an engine, by name: one a replica."""
    import ray

    if not ray.is_initialized():  # asking would start a Ray
        return {}
    return {name: ray.get_actor(name) for name in ray.util.list_named_actors() if _has_engine(name)}


def _has_engine(name: str) -> bool:
    """Whether an actor is the server of its replica's first node, `vllm_server_REPLICA_0`: the others have none."""
    return name.startswith(SERVER) and name.endswith("_0")


def _in_short(error: BaseException) -> str:
    """The innermost error's type and first line."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
