"""verl's keys for `trainer.staleness` above 0: its trainer `separate_async`, with engines of their own.

verl counts otherwise than QaRL (verl 0.9.1, trainer/ppo/v1/replay_buffer.py and trainer_separate_async.py):

    max_off_policy_threshold  how many steps a prompt may take from its dispatch to its update, both counted. A prompt
                              is dispatched to engines with the weights that its step updates first, so 1 is age 0
    num_warmup_batches        batches dispatched before the first step. Each step dispatches one and updates by one, so
                              this is the age of all later batches, if the engines do not lag
    parameter_sync_step       updates between two publishes; verl wants a step's mini-batches, no more and no less

One step is one publish, as in verl's synchronous trainer. verl makes its updates one by one, each with a mini-batch of
its own, and the learning rate advances with each.
"""

from __future__ import annotations

from typing import Any

from qarl.config import Config
from qarl.verl.keys import ACTOR, PLUGIN, QUANT, ROLLOUT, SAMPLER, SEPARATE, SEPARATE_MODE


def separate_keys(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Return verl's keys that differ from those of the synchronous trainer, {} if `trainer.staleness` is 0."""
    trainer = config.trainer
    if not trainer.staleness:
        return {}
    engines = config.rollout.n_gpus_per_node
    updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    keys = {
        "trainer.v1.trainer_mode": SEPARATE_MODE,
        f"{SEPARATE}.num_warmup_batches": trainer.staleness,
        f"{SEPARATE}.parameter_sync_step": updates,
        f"{SAMPLER}.max_off_policy_threshold": trainer.staleness + 1,
        f"{SAMPLER}.max_off_policy_strategy": trainer.staleness_strategy,
        f"{SAMPLER}.custom_sampler.path": f"pkg://{PLUGIN}.sampler",
        f"{SAMPLER}.custom_sampler.name": "StalePromptReplayBuffer",
        "actor_rollout_ref.hybrid_engine": False,
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.n_gpus_per_node": engines,
        # Nothing else is on the engine's GPU, and an engine that sleeps would lose what a delta is applied to.
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.checkpoint_engine.backend": "qarl",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module": f"{PLUGIN}.publish",
        f"{ACTOR}.optim.lr_warmup_steps": config.optim.lr_warmup_steps * updates,
        f"+{QUANT}.old_log_probs": "recompute",
        f"+{QUANT}.staleness": trainer.staleness,
    }
    if on_cpu:
        processes = trainer.n_gpus_per_node + engines
        keys["ray_kwargs.ray_init.num_cpus"] = 16 + 8 * processes
        keys["ray_kwargs.ray_init.num_gpus"] = processes
    return keys
