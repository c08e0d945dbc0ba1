"""verl's samplers (replay buffers), for trainers that wait for the engine and for those with engines of their own.

`trainer.v1.sampler.custom_sampler` chooses the sampler. They differ from verl 0.9.1 in three ways:

- It polls the progress of the rollout more often. verl sleeps two seconds between polls, which is longer than a step of
  a small model.
- A group without all its responses is an error, and so is a process that dies. verl's synchronous sampler would train
  on the responses that are finished, which are mostly short ones, and its asynchronous one would take other prompts.
- It counts preemptions. verl adds the metrics that a sampler returns to those of the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from qarl.errors import UserError
from qarl.progress import live
from qarl.progress.phases import Sampled
from qarl.verl.ask_servers import (
    ANSWER_SECONDS,
    RESUME,
    Preemptions,
    Watch,
    first_refusal,
    has_stopped,
)
from qarl.verl.refusals import Conflict, refuse

POLL_SECONDS = 0.05
WATCH_SECONDS = 5.0
COUNT_SECONDS = 1.0
"""Seconds between two counts of what has been sampled, for the line of progress."""

_log = logging.getLogger("qarl.verl")
_log.setLevel(logging.INFO)


class WholeGroups(ReplayBuffer):
    """Base of the samplers: all responses of a group, or an error.

    It does not support `filter_groups` and `sync_refill_failed_groups`, which only verl's own samplers implement. Raise
    UserError if one of them is set in `trainer.v1.sampler.sampler_kwargs`, or if the trainer's mode is not `MODE`.
    """

    MODE: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        refuse(self._conflicts(kwargs))
        super().__init__(**{"poll_interval": POLL_SECONDS, **kwargs})
        self._watch = Watch()
        self._watched = time.monotonic()
        self._preemptions = Preemptions()
        self._partition = "train"
        self._sampled = Sampled(0, 0, 0)
        self._counted = time.monotonic()

    @classmethod
    def _conflicts(cls, arguments: Mapping[str, Any]) -> Iterator[Conflict]:
        others = "null to trainer.v1.sampler.custom_sampler.path and .name, which chooses verl's own sampler"
        why = "QaRL's sampler would ignore it, and only verl's own samplers implement it"
        mode = arguments.get("trainer_mode", cls.MODE)
        if mode != cls.MODE:
            yield Conflict("trainer.v1.trainer_mode", mode, f"{cls.MODE}; it, or {others}", why)
        asked = arguments.get("sampler_kwargs") or {}
        keys = {
            "filter_groups": "algorithm.filter_groups.enable",
            "sync_refill_failed_groups": "trainer.v1.sampler.sync_refill_failed_groups",
        }
        for name, key in keys.items():
            if asked.get(name):
                yield Conflict(key, True, f"False; it, or {others}", why)

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[Any, dict[str, Any]]:
        """Return verl's batch and metrics. For training batches, add `rollout/preemptions` if servers report it."""
        self._partition = partition_id
        self._sampled = Sampled(0, 0, 0)
        with live.phase(
            "sampling", total=batch_size, unit="prompts", measure=lambda: self._sampled
        ):
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        preemptions = (
            self._preemptions.since_last()
        )  # also in evaluations, so that the next batch counts only its own
        if partition_id == "val" or preemptions is None:
            return batch, metrics
        if preemptions:
            what = "%d times vLLM interrupted a response and computed it again, because the KV cache is too small"
            keys = "actor_rollout_ref.rollout.gpu_memory_utilization (on CPU engine_kwargs.vllm.kv_cache_memory_bytes)"
            _log.warning(f"{what}: raise {keys} or lower max_num_seqs", preemptions)
        return batch, metrics | {"rollout/preemptions": float(preemptions)}

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        failed = sorted(uid for uids in self.failure_keys.values() for uid in uids)
        if failed:
            self._watch.ask(again=True)
            if dead := self._watch.dead(ANSWER_SECONDS):
                what = f"a process that generates has stopped, and {len(failed)} prompts lack responses"
                raise has_stopped(what, dead)
            if cause := first_refusal(ANSWER_SECONDS):
                what = str(cause["what"])
                fix = f"{cause['fix']}; then {RESUME}"
                raise UserError(what, where=cause["where"], why=cause["why"], fix=fix)
            raise UserError(
                f"responses to {len(failed)} of the prompts could not be generated",
                where=", ".join(failed[:4]),
                why="the engine or the agent loop raised an error (Error in _run_prompt in the log); an update from "
                "the remaining responses would favour short ones",
                fix=f"fix the cause and {RESUME}",
            )
        if time.monotonic() - self._counted > COUNT_SECONDS:
            self._counted = time.monotonic()
            self._sampled = self._count()
        if time.monotonic() - self._watched > WATCH_SECONDS:
            self._watched = time.monotonic()
            self._watch.ask()
            if dead := self._watch.dead():
                what = "a process that generates has stopped, while the sampler waited for its responses"
                raise has_stopped(what, dead)

    def _count(self) -> Sampled:
        """Count the prompts all of whose responses have ended, and the tokens of all responses that have."""
        finished = self.finished_keys[self._partition]
        tags = self.partitions[self._partition]
        of_finished = [tag for key, tag in tags.items() if key.split("_")[0] in finished]
        return Sampled(len(finished), tokens_of(tags.values()), tokens_of(of_finished))


class PromptReplayBuffer(WholeGroups):
    """The sampler for `trainer.v1.trainer_mode=sync`."""

    MODE = "sync"


class StalePromptReplayBuffer(WholeGroups, ReplayBufferAsync):
    """The sampler for `trainer.v1.trainer_mode=separate_async`. verl's own bounds the age of prompts, by waiting for
    those that lag or by dropping them (`max_off_policy_strategy`). This one also says so."""

    MODE = "separate_async"
    _waited = False
    """Whether this sample has waited for prompts that lag, while enough others were ready."""

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[Any, dict[str, Any]]:
        self._waited = False
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id == "val":
            return batch, metrics
        if dropped := metrics.get("training/off_policy/evicted_samples"):
            what = "step %d: %d prompts were dropped with their responses, which would be older than %d steps"
            _log.warning(
                f"{what} (trainer.staleness_strategy=drop)",
                global_steps,
                dropped,
                (self.max_off_policy_threshold or 1) - 1,
            )
        return batch, metrics | {"staleness/waited": float(self._waited)}

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        enough: bool = super()._has_enough_samples(
            global_steps, partition_id, batch_size, sampleable_keys
        )
        self._waited |= not enough and len(sampleable_keys) >= batch_size
        return enough


def tokens_of(tags: Iterable[Mapping[str, Any]]) -> int:
    """Return the tokens of responses. `tags`: what verl's agent loop says of each."""
    return sum(int(tag.get("response_len", 0)) for tag in tags)
