"""verl's task runner, with processes that start side by side.

Every process of a run imports torch, tensordict and verl, which takes 8 to 19 s of a core. verl's own `TaskRunnerV1`
(0.9.1, trainer/main_ppo.py) waits for each before it starts the next. Here the transfer queue's processes start while
the task runner imports the trainer, and the agent loop's workers start with the trainer's; they get the clients of the
servers when these run. verl's printed config is left out, because the run folder has it (verl.yaml).

`run_ppo` takes the class of the task runner as an argument. verl's own command line has verl's.
`actor_rollout_ref.rollout.agent.agent_loop_manager_class`, if it is set, starts the agent loop as in verl.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from qarl.progress import live


@ray.remote
class TaskRunner:
    """The actor that runs verl's trainer."""

    def run(self, config: Any) -> None:
        """Run the trainer until it ends. Raise what it raised. `config`: verl's whole config."""
        import transfer_queue
        from omegaconf import OmegaConf

        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        queue = ThreadPoolExecutor(1).submit(transfer_queue.init, config.transfer_queue)
        trainer = None
        exit_code = 1
        try:
            from verl.trainer.ppo.v1 import get_trainer_cls
            from verl.utils.logging_utils import configure_verl_logging

            configure_verl_logging()
            queue.result()
            trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            connect = start_agent_loop(config)
            with live.phase("starting verl's trainer and the rollout engines"):
                trainer.init()
            agent_loop = connect(
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(agent_loop)
            exit_code = 0
        finally:
            try:
                if (tracking := getattr(trainer, "logger", None)) is not None:
                    tracking.finish(exit_code=exit_code)
            finally:
                transfer_queue.close()


def start_agent_loop(config: Any) -> Callable[..., Any]:
    """Start the processes of the agent loop. Return the function that takes the other arguments of
    `AgentLoopManager.create` by name and returns the manager."""
    import verl.trainer.ppo.v1 as v1
    from verl.utils.import_utils import load_class_from_fqn

    if name := config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
        manager_class: Any = load_class_from_fqn(name, "AgentLoopManager")
        return partial(manager_class.create, config=config)

    class AgentLoopWorker(v1.AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined]  # made by ray.remote
        def __init__(self, *absent: Any) -> None:
            """Only what was imported is here, until `connect`."""

        def connect(self, clients: dict[str, Any]) -> None:
            super().__init__(config, **clients)

    class AgentLoopManager(v1.AgentLoopManagerTQ):
        def __init__(self) -> None:
            super().__init__(config, None)
            self.agent_loop_workers_class = ray.remote(AgentLoopWorker)

    manager = AgentLoopManager.create()

    def connect(**clients: Any) -> Any:
        vars(manager).update(clients)
        ray.get([worker.connect.remote(clients) for worker in manager.agent_loop_workers])
        return manager

    return connect
