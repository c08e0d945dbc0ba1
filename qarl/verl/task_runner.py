"""verl's task runner, with processes that start side by side. verl 0.9.1 (`trainer/main_ppo.py`) starts each after the
one before it.

Every process of a run imports torch, tensordict and verl, which takes 8 to 19 s of a core, and an engine more. Here

- the task runner starts while the driver checks the run (`EarlyTaskRunner`),
- the transfer queue's two processes start while the task runner still imports, and
- the workers of the agent loop start with the trainer's, and get the client of the servers when these run.

What runs, and in which process, is verl's. `actor_rollout_ref.rollout.agent.agent_loop_manager_class`, if it is set,
starts the agent loop as in verl.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray


class EarlyTaskRunner:
    """What `run_ppo` takes as the class of its task runner. Its first call starts Ray and the actor, and returns at
    once. Its second call runs the actor. `config`: verl's whole config."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._options: dict[str, Any] = {}
        self._actor: Any = None

    def options(self, **options: Any) -> EarlyTaskRunner:
        self._options = options
        return self

    def remote(self) -> Any:
        if self._actor is not None:
            return self._actor
        self._actor = ray.remote(TaskRunner).options(**self._options).remote(self._config)
        return SimpleNamespace(run=SimpleNamespace(remote=ray.put))  # run_ppo gets what this returns


class TaskRunner:
    """The actor that runs verl's trainer."""

    def __init__(self, config: Any) -> None:
        import transfer_queue

        config.transfer_queue.enable = True
        self._queue = ThreadPoolExecutor(1).submit(transfer_queue.init, config.transfer_queue)
        import verl.trainer.ppo.v1  # noqa: F401  # while the queue's processes start

    def run(self, config: Any) -> None:
        """Run the trainer until it ends. Raise what it raised."""
        import transfer_queue
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import get_trainer_cls
        from verl.utils.logging_utils import configure_verl_logging

        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        self._queue.result()
        trainer, code = None, 1
        try:
            trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            begin = early_agent_loop(config)
            trainer.init()
            agent_loop = begin(
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(agent_loop)
            code = 0
        finally:
            if (tracking := getattr(trainer, "logger", None)) is not None:
                tracking.finish(exit_code=code)
            transfer_queue.close()


def early_agent_loop(config: Any) -> Callable[..., Any]:
    """Start the processes of the agent loop. Return the function that makes their manager from the other arguments of
    `AgentLoopManager.create`."""
    import verl.trainer.ppo.v1 as v1
    from verl.utils.import_utils import load_class_from_fqn

    if name := config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
        manager_class: Any = load_class_from_fqn(name, "AgentLoopManager")
        return partial(manager_class.create, config=config)

    class AgentLoopWorker(v1.AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined]  # the class under ray.remote
        def __init__(self, *absent: Any) -> None:
            """Only what was imported is here, until `begin`."""

        def begin(self, clients: dict[str, Any]) -> None:
            super().__init__(config, **clients)

    class Manager(v1.AgentLoopManagerTQ):
        def __init__(self) -> None:
            super().__init__(config, None)
            self.agent_loop_workers_class = ray.remote(AgentLoopWorker)

    manager = Manager.create()

    def begin(**clients: Any) -> Any:
        ray.get([worker.begin.remote(clients) for worker in manager.agent_loop_workers])
        return manager

    return begin
