"""Asks verl's processes, by the names that verl gives their Ray actors: whether they are alive, and how often vLLM
preempted a response.

If an engine or server dies, verl treats the responses of the other processes as the whole batch. To prevent this, the
sampler asks while it waits for responses, and the actor's first rank asks before a publish.

verl's own `num_preempted` is always empty, because no release of vLLM reports it. So preemptions are read from the
Prometheus metrics of each vLLM server (`/metrics`), which it publishes only if
`actor_rollout_ref.rollout.disable_log_stats` is False.
"""

from __future__ import annotations

import logging
import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from qarl.errors import UserError

RESUME = "run the same command again"
"""The end of a worker's `fix`. A worker does not know the checkpoints, so the driver adds what the command will do."""
KILLED = "something killed it, for example lack of memory (see the kernel's log and Ray's log of the worker)"
SERVER = "vllm_server_"
OTHERS = ("agent_loop_worker_", "reward_loop_worker_")
ANSWER_SECONDS = 10.0
_ENGINE_OF_ACTOR = re.compile(r"vllm_server_\d+_0")
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? (\S+)", re.MULTILINE)

_log = logging.getLogger("qarl.verl")
Answer = TypeVar("Answer")


class Watch:
    """Asks actors whether they are alive. It remembers all actors that it saw, because Ray does not list dead ones.

    `only_servers`: ask only rollout servers, not the workers of agent loops and rewards. In a server with as many
    requests as Ray's `max_concurrency`, some 1000, the question waits for one to end. If the engine dies, they all do.
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
        self._asked = {
            name: answer
            for name, answer in self._asked.items()
            if (answer.exception() if answer.done() else not again)
        }
        for name in ray.util.list_named_actors():
            if name.startswith(self._prefixes) and name not in self._actors:
                self._actors[name] = ray.get_actor(name)
        for name, actor in self._actors.items():
            if name not in self._asked:
                # `check_health` reaches vLLM's workers; `__ray_ready__` says only that the process exists.
                engine = name.startswith(SERVER) and name.endswith(
                    "_0"
                )  # the first server of a replica
                question = (
                    actor.collective_rpc.remote("check_health")
                    if engine
                    else actor.__ray_ready__.remote()
                )
                self._asked[name] = question.future()

    def dead(self, timeout: float = 0.0) -> dict[str, str]:
        """Wait up to `timeout` seconds for answers. Return name -> error of the actors that answered with an error."""
        wait(self._asked.values(), timeout=timeout)
        errors = {}
        waiting = {}
        for name, answer in self._asked.items():
            if answer.done():
                errors[name] = answer.exception()
            else:
                waiting[name] = answer
        self._asked = waiting
        return {name: _in_short(error) for name, error in errors.items() if error is not None}


def engine_servers() -> dict[str, Any]:
    """Return the Ray actors that have an engine of the actor's weights, by name. There is one in each replica. Servers
    of reward models and of teachers (`vllm_server_reward_0_0`, `vllm_server_teacher_0_0`) have other weights."""
    import ray

    if not ray.is_initialized():  # otherwise the call below would start Ray
        return {}
    return {
        name: ray.get_actor(name)
        for name in ray.util.list_named_actors()
        if _ENGINE_OF_ACTOR.fullmatch(name)
    }


def first_refusal(seconds: float) -> dict[str, str | None] | None:
    """Return the parts of an error that a reward, an environment or a loop of QaRL's raised in one of Ray's workers of
    rewards and agent loops, or None.

    Wait up to `seconds` for an answer of each."""
    import ray

    from qarl.verl.first_error import first_error

    if not ray.is_initialized():
        return None
    names = [name for name in ray.util.list_named_actors() if name.startswith(OTHERS)]
    questions: list[Future[dict[str, str | None] | None]] = [
        ray.get_actor(name).__ray_call__.remote(first_error).future() for name in names
    ]
    wait(questions, timeout=seconds)
    answers = [
        question.result()
        for question in questions
        if question.done() and question.exception() is None
    ]
    return next((answer for answer in answers if answer), None)


def refuse_dead_servers(watch: Watch, *, is_first: bool, seconds: float) -> None:
    """Raise UserError on all ranks if a rollout server is dead, because verl would wait for it forever.

    Only the first rank (`is_first`) asks the servers, and the others wait for the result. If a rank published early, it
    would wait for the first rank, because all ranks gather each tensor together, and the first rank for that rank's
    engine, which waits for tensors and does not answer.
    """

    def dead_servers() -> dict[str, str]:
        watch.ask()
        return watch.dead(seconds)

    if dead := _of_first(is_first, dead_servers):
        names = ", ".join(sorted(dead)[:8])
        raise has_stopped(f"rollout servers have stopped and cannot be published to: {names}", dead)


def servers_have_base(*, is_first: bool, seconds: float) -> bool:
    """Return on all ranks whether every rollout server has the weights that adapters are added to. The first rank
    (`is_first`) asks. Raise UserError on all ranks if a server does not answer, because they wait for the first one."""

    def has_base() -> bool | str:
        import ray

        try:
            questions = [server.qarl_has_base.remote() for server in engine_servers().values()]
            return bool(questions) and all(ray.get(questions, timeout=seconds))
        except Exception as error:  # whatever Ray or a server raises, the other ranks must be told
            return _in_short(error)

    if isinstance(why := _of_first(is_first, has_base), str):
        what = "the rollout servers did not say whether they have the base of the adapters"
        raise UserError(what, where="the rollout servers", why=why, fix=RESUME)
    return why


def _of_first(is_first: bool, ask: Callable[[], Answer]) -> Answer:
    """Return on all ranks what `ask` returns on the first one."""
    import torch

    answer: list[Any] = [ask() if is_first else None]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(answer, src=0)
    return cast(Answer, answer[0])


def has_stopped(what: str, dead: dict[str, str]) -> UserError:
    """Return the error for stopped processes. `what`: the error's first line. `dead`: process name -> reason."""
    where = "; ".join(f"{name}: {why}" for name, why in sorted(dead.items())[:4])
    return UserError(what, where=where, why=KILLED, fix=RESUME)


def _in_short(error: BaseException) -> str:
    """Return the type and the first line of the innermost error."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class Preemptions:
    """Counts preemptions between calls of `since_last`. Each one means that the KV cache was too small during a
    generation. A run starts its own servers, so their counters start at 0."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}
        self._before = 0
        self._complained = False

    def since_last(self) -> int | None:
        """Return the preemptions of all servers since the last successful call. If a server reports no counter, return
        None, and log a warning the first time."""
        try:
            before = self._before
            self._before = self._total()
        except Exception as error:  # a missing metric must not end the run, whether Ray, urllib or the server failed
            if not self._complained:
                needs = "actor_rollout_ref.rollout.disable_log_stats=False"
                _log.warning("rollout/preemptions is not known (%r); it needs %s", error, needs)
            self._complained = True
            return None
        return self._before - before

    def _total(self) -> int:
        import ray

        for name, actor in engine_servers().items():
            if name not in self._urls:
                address, port = ray.get(actor.get_server_address.remote(), timeout=ANSWER_SECONDS)
                self._urls[name] = (
                    f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"
                )
        # Without a proxy, because the servers are in the run's own network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        preemptions = 0
        for url in self._urls.values():
            answer = opener.open(url, timeout=ANSWER_SECONDS).read()
            preemptions += preemptions_in(answer.decode())
        return preemptions


def preemptions_in(metrics: str) -> int:
    """Return the sum of the counter over a server's engines. Raise LookupError if the text has no counter."""
    counts = _PREEMPTIONS.findall(metrics)
    if not counts:
        raise LookupError("a server publishes no vllm:num_preemptions_total")
    return round(sum(map(float, counts)))
