"""Asks Ray whether the processes that generate are alive. They are found by the names that verl gives its actors.

If an engine or server dies, verl treats the responses of the other processes as the whole batch. To prevent this, the
sampler makes this check while it waits for responses, and the trainer makes it before a publish.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from qarl.errors import UserError
from qarl.verl.failure import RESUME

SERVER = "vllm_server_"
OTHERS = ("agent_loop_worker_", "reward_loop_worker_")


class Watch:
    """Asks actors whether they are alive. It remembers all actors that it saw, because Ray does not list dead ones.

    `only_servers`: ask only rollout servers, not the workers of agent loops and rewards.
    """

    def __init__(self, only_servers: bool = False) -> None:
        self._prefixes = (SERVER,) if only_servers else (SERVER, *OTHERS)
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Future[Any]] = {}

    def ask(self, again: bool = False) -> None:
        """Ask each actor whether it is alive, except actors that have not answered yet. Answers without an error are
        dropped.

        `again`: ask those actors too, because an engine that has died never answers.
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
                # `check_health` reaches vLLM's workers; `__ray_ready__` says only that the process exists.
                question = (
                    actor.collective_rpc.remote("check_health") if _has_engine(name) else actor.__ray_ready__.remote()
                )
                self._asked[name] = question.future()

    def dead(self, timeout: float = 0.0) -> dict[str, str]:
        """Wait up to `timeout` seconds for answers. Return name -> error of the actors that answered with an error."""
        wait(self._asked.values(), timeout=timeout)
        found = {}
        for name, answer in list(self._asked.items()):
            if answer.done():
                del self._asked[name]
                if (error := answer.exception()) is not None:
                    found[name] = _in_short(error)
        return found


def engine_servers() -> dict[str, Any]:
    """Return the Ray actors that have an engine, by name. There is one in each replica."""
    import ray

    if not ray.is_initialized():  # otherwise the call below would start Ray
        return {}
    return {name: ray.get_actor(name) for name in ray.util.list_named_actors() if _has_engine(name)}


def has_stopped(what: str, dead: dict[str, str]) -> UserError:
    """Return the error for stopped processes. `what`: the error's first line. `dead`: process name -> reason."""
    return UserError(
        what,
        where="; ".join(f"{name}: {why}" for name, why in sorted(dead.items())[:4]),
        why="something killed them, for example lack of memory (see the kernel's log and Ray's log of the worker)",
        fix=RESUME,
    )


def refuse_dead(servers: dict[str, str]) -> None:
    """Raise UserError if a rollout server is dead, because verl would wait for it forever."""
    if servers:
        names = ", ".join(sorted(servers)[:8])
        raise has_stopped(f"rollout servers have stopped and cannot be published to: {names}", servers)


def _has_engine(name: str) -> bool:
    """Return whether the actor has an engine. Only the first server of a replica does: `vllm_server_REPLICA_0`."""
    return name.startswith(SERVER) and name.endswith("_0")


def _in_short(error: BaseException) -> str:
    """Return the type and the first line of the innermost error."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
