"""verl's replay buffer for synchronous training, which polls more often and refuses incomplete batches.

`trainer.v1.sampler.custom_sampler` chooses this class. It differs from verl 0.9.1 in three ways:

- It polls the progress of the rollout more often. verl sleeps two seconds between polls, which is longer than a step of
  a small model.
- A group without all its responses is an error, and so is a process that dies. verl would train on the responses that
  are finished, which are mostly short ones.
- It counts preemptions. verl adds the metrics that a sampler returns to those of the step.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from qarl.errors import UserError
from qarl.verl.failure import RESUME
from qarl.verl.plugin.alive import Watch, has_stopped
from qarl.verl.plugin.preemptions import Preemptions

POLL_SECONDS = 0.05
WATCH_SECONDS = 5.0
ANSWER_SECONDS = 10.0
"""After a group has failed, the sampler asks which processes are alive, and waits at most this many seconds."""
METRIC = "rollout/preemptions"
VERLS_OWN = "trainer.v1.sampler.custom_sampler.path=null and .name=null, which chooses verl's own sampler"


_log = logging.getLogger("qarl.verl.plugin")


class PromptReplayBuffer(ReplayBuffer):
    """The sampler for `trainer.v1.trainer_mode=sync`.

    It does not support `filter_groups` and `sync_refill_failed_groups`, which only verl's own samplers implement. Raise
    UserError if one of them is set in `trainer.v1.sampler.sampler_kwargs`, or if the trainer mode is not sync.
    """

    def __init__(self, **kwargs: Any) -> None:
        asked = kwargs.get("sampler_kwargs") or {}
        refuse_ignored(kwargs.get("trainer_mode", "sync"), asked)
        super().__init__(**{"poll_interval": POLL_SECONDS, **kwargs})
        self._watch = Watch()
        self._watched = time.monotonic()
        self._preemptions = Preemptions()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return verl's batch and metrics. For training batches, add `rollout/preemptions` if servers report it."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        found = self._preemptions.since_last()  # also in evaluations, so that the next batch counts only its own
        if partition_id == "val" or found is None:
            return batch, metrics
        if found:
            _log.warning(
                "%d times vLLM interrupted a response and computed it again, because the KV cache is too small: raise "
                "actor_rollout_ref.rollout.gpu_memory_utilization (on CPU engine_kwargs.vllm.kv_cache_memory_bytes) "
                "or lower max_num_seqs",
                found,
            )
        return batch, metrics | {METRIC: float(found)}

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        failed = sorted(uid for uids in self.failure_keys.values() for uid in uids)
        if failed:
            self._watch.ask(again=True)
            refuse_failed(failed, self._watch.dead(ANSWER_SECONDS))
        if time.monotonic() - self._watched > WATCH_SECONDS:
            self._watched = time.monotonic()
            self._watch.ask()
            if dead := self._watch.dead():
                raise _stopped(dead, "while the sampler waited for its responses")


def refuse_ignored(trainer_mode: str, asked: Any) -> None:
    """Raise UserError if the config sets something that only verl's own samplers support."""
    ignored = {
        f"trainer.v1.trainer_mode={trainer_mode}": trainer_mode != "sync",
        "algorithm.filter_groups.enable=True": bool(asked.get("filter_groups")),
        "trainer.v1.sampler.sync_refill_failed_groups=True": bool(asked.get("sync_refill_failed_groups")),
    }
    if wrong := [key for key, is_wrong in ignored.items() if is_wrong]:
        raise UserError(
            "QaRL's sampler would ignore " + ", ".join(wrong),
            where="trainer.v1.sampler.custom_sampler",
            why="only verl's own samplers implement them",
            fix=f"leave them out, or set {VERLS_OWN}",
        )


def refuse_failed(failed: list[str], dead: dict[str, str]) -> None:
    """Raise UserError for prompts without all responses. `dead`: name of each dead process -> reason."""
    if dead:
        raise _stopped(dead, f"and {len(failed)} prompts lack responses")
    raise UserError(
        f"responses to {len(failed)} of the prompts could not be generated",
        where=", ".join(failed[:4]),
        why="the engine, the agent loop or the reward function raised an error (see Error in _run_prompt in the log "
        "above); an update from the remaining responses would favour short ones",
        fix=f"fix the cause and {RESUME}",
    )


def _stopped(dead: dict[str, str], when: str) -> UserError:
    who = "a process that generates has" if len(dead) == 1 else f"{len(dead)} processes that generate have"
    return has_stopped(f"{who} stopped, {when}", dead)
