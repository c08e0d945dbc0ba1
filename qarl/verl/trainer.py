"""verl's synchronous trainer, and what QaRL adds to any of verl's. `qarl.verl.separate_trainer` has the asynchronous
one, `qarl.verl.sampler` the samplers.

The trainer, `qarl_sync`, also saves by time and can skip the pass that recomputes the old log-probs. QaRL's configs
choose it by `trainer.v1.trainer_mode`. `qarl.step.old_log_probs` explains when the pass is skipped and what is
checked (`actor.old_log_probs`). These methods of verl's trainer are overridden:

    step, _validate         are phases of `qarl.progress`, as are the parts of a step below. Their lines, one a minute,
                            reach the terminal through Ray
    on_train_begin, on_step_end   also save if `trainer.save_minutes` have passed (`qarl.verl.saving.Saving`), and
                            end a run whose folder was deleted
    _compute_old_log_prob   recomputes the old log-probs, or takes the rollout's and checks a sample of rows
    _compute_advantage      sets the advantages of equal rewards to 0, where verl's are rounding noise
                            (`qarl.verl.advantages`), and adds weights that are divided by their mean over the batch
                            (`qarl.verl.batch_weights`)
    _compute_metrics        counts responses that were cut off, not those as long as the longest
                            (`qarl.verl.response_ends`)
    _update_actor           tells the engine to check the first mini-batch (`qarl.verl.training_steps`). If it drops
                            the update, this recomputes old log-probs and advantages, and updates again.
    _val_metrics_update   adds QaRL's figures of an evaluation (`qarl.metrics.validation`)
    _save_checkpoint, _load_checkpoint   also write and read the counts of `auto`. Saving also logs the step before
                            (`qarl.verl.saved_rows`), and removes the checkpoint that the new one replaces.

verl computes `actor/entropy` in the pass. In a step without the pass, it is the entropy of the sampled rows, or is
missing if no rows were sampled. verl divides a step's rows into equal, contiguous shares, one per rank. Each rank takes
its mini-batches from its share in order, unless `actor.shuffle` is set.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transfer_queue as tq
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from qarl.checkpoint.run_folder import RunFolder
from qarl.checkpoint.storage import write_json
from qarl.data.weighted_reward import PREFIX
from qarl.metrics.validation import Answer, answers_metrics
from qarl.progress import live
from qarl.step.old_log_probs import (
    PassSchedule,
    differing_tokens,
    drawn,
    last_bits,
    sample_size,
)
from qarl.verl.advantages import rows_of_equal_rewards
from qarl.verl.batch_weights import with_weights
from qarl.verl.config_classes import QuantSettings
from qarl.verl.loss import DIFFERING, RELIES
from qarl.verl.response_ends import corrected_metrics, end_tokens
from qarl.verl.sampler import PromptReplayBuffer as PromptReplayBuffer  # configs name it here
from qarl.verl.saved_rows import SavedRows
from qarl.verl.saving import Saving
from qarl.verl.stops import Stops
from qarl.verl.turns import conversation_metrics, conversations_of

COUNTS = "old_log_probs.json"
"""File in verl's folder of a checkpoint, with the counts of `auto`."""
_log = logging.getLogger("qarl.verl")
_log.setLevel(logging.INFO)


class QaRLTrainer(SavedRows):
    """What QaRL's trainers add to verl's, before which they stand among the bases. The settings are `old_log_probs` and
    `old_log_probs_sample` in the actor's section `quant`."""

    MODE: ClassVar[str]
    """verl's name of the trainer that this one extends."""

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = self.MODE  # verl also checks for its own trainer's name
        super().__init__(config)

    _relies: str | None = None
    """The value of `RELIES` for the batch of this step."""

    def _setting(self, name: str) -> Any:
        """Return a setting of the actor's section `quant`. One that is missing or null has its default."""
        quant = self.config.actor_rollout_ref.actor.fsdp_config.get("quant")
        if quant is None:
            return {"old_log_probs": "recompute", "old_log_probs_sample": 0.0}[name]
        value = quant.get(name)
        return QuantSettings.model_fields[name].default if value is None else value

    @functools.cached_property
    def _schedule(self) -> PassSchedule:
        return PassSchedule(str(self._setting("old_log_probs")))

    @functools.cached_property
    def _saving(self) -> Saving:
        return Saving(self.config.trainer)

    @functools.cached_property
    def _run_folder(self) -> RunFolder | None:
        """The folder of a run of `qarl train`, if it is on this machine."""
        log = os.environ.get("VERL_FILE_LOGGER_PATH")
        folder = Path(log).parent if log else None
        return RunFolder(folder) if folder and (folder / "verl.yaml").is_file() else None

    def _check_run_folder(self) -> None:
        """Raise StorageError if the run folder was deleted or moved since the training began."""
        if self._run_folder is not None:
            self._run_folder.check()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._check_run_folder()
        self._saving.begin()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        with live.phase(f"step {self.global_steps}/{self.total_training_steps}"):
            return super().step(metrics, timing_raw)

    def _validate(self) -> Any:
        with live.phase("evaluating"):
            return super()._validate()

    def on_step_end(self) -> None:
        self._check_run_folder()
        if self._saving.due(self.global_steps, last=self.global_steps >= self.total_training_steps):
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        with live.phase("publishing"):
            super().on_step_end()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with live.phase("old log-probs"):
            return self._old_log_probs(batch, metrics)

    def _old_log_probs(self, batch: Any, metrics: dict[str, Any]) -> Any:
        schedule = self._schedule
        if schedule.mode == "recompute":
            return super()._compute_old_log_prob(batch, metrics)
        self._relies = None
        skips = schedule.begin()
        metrics |= schedule.metrics
        if not skips:
            metrics["old_log_probs/checked_frac"] = 1.0
            return self._recompute(batch, metrics)
        metrics["old_log_probs/checked_frac"] = self._first_rows() / (len(batch) // self._ranks())
        if schedule.mode == "auto" and self._sample_differs(batch, metrics):
            return self._fall_back(batch, metrics)
        return self._take_rollouts(batch)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        algorithm = self.config.algorithm
        partition = batch.partition_id
        column = "token_level_rewards" if algorithm.use_kl_in_reward else "rm_scores"
        names = [column, "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition, select_fields=names)
        sums = []
        for name in names:
            rows = data[name].unbind()
            sums.append(torch.stack([row.float().sum() for row in rows]))
        rewards, tokens = sums
        if equal := rows_of_equal_rewards(batch.keys, rewards, tokens > 0, algorithm):
            keys = [batch.keys[row] for row in equal]
            data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["advantages"])
            data["advantages"] = torch.zeros_like(data["advantages"])
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=data)
        return with_weights(batch, self.config, tq)

    def _compute_metrics(
        self,
        batch: Any,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        keys = [
            key
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding", False)
        ]
        if not keys:
            return
        names = ["prompts", "responses", "response_mask", "rm_scores"]
        more = "extra_fields"
        fields = [*names, more]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        told = data.pop(more).tolist()
        prompts, responses, masks, scores = (data[name].unbind() for name in names)
        metrics |= corrected_metrics(
            [float(row.sum()) for row in scores],
            responses,
            masks,
            [len(row) for row in prompts],
            self.config.data,
            self._ends,
            [
                each.get("finish_reason") or self._ended_by_text(row)
                for each, row in zip(told, responses, strict=True)
            ],
        )
        metrics |= function_means(told)
        conversations = conversations_of(prompts, masks, told)
        if conversations is not None:
            metrics |= conversation_metrics(conversations)

    def _ended_by_text(self, response: Tensor) -> str | None:
        """Return why a response of the limit's length ended, or None if its last token says it."""
        full = self._stops.texts and len(response) >= self.config.data.max_response_length
        return "stop" if full and self._stops.in_text(response.tolist(), self.tokenizer) else None

    @functools.cached_property
    def _ends(self) -> set[int]:
        model = self.config.actor_rollout_ref.model
        trust = model.get("trust_remote_code", False)
        ends = end_tokens(model.path, self.tokenizer, trust_remote_code=trust)
        return ends.union(self._stops.token_ids)

    @functools.cached_property
    def _stops(self) -> Stops:
        return Stops.of(self.config.actor_rollout_ref.rollout)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with live.phase("update"):
            return self._update(batch, metrics)

    def _update(self, batch: Any, metrics: dict[str, Any]) -> Any:
        update_metrics: dict[str, Any] = {}
        updated = super()._update_actor(self._told(batch), update_metrics)
        if self._relies == "auto" and update_metrics.get(f"actor/{DIFFERING}", 0):
            batch = self._compute_advantage(self._fall_back(batch, metrics), metrics)
            update_metrics = {}
            updated = super()._update_actor(self._told(batch), update_metrics)
        metrics |= update_metrics
        return updated

    def _told(self, batch: Any) -> Any:
        """Return the batch, with `RELIES` set for the engine."""
        batch.extra_info.pop(RELIES, None)
        if self._relies is not None:
            batch.extra_info[RELIES] = self._relies
        return batch

    def _fall_back(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Recompute all old log-probs, because a check of this step found a difference."""
        self._schedule.fell_back()
        metrics |= self._schedule.metrics | {"old_log_probs/checked_frac": 1.0}
        what = "step %d: the trainer's log-probs differ from the rollout's, so this and the next %d steps recompute"
        patience = self._schedule.skipping.patience
        _log.warning(f"{what} them (actor.old_log_probs=auto)", self.global_steps, patience)
        self._relies = None
        return self._recompute(batch, metrics)

    def _recompute(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        self._schedule.recomputed(self._differing(batch, "old_log_probs"))
        return self._take_rollouts(batch) if self._schedule.mode == "rollout" else batch

    def _take_rollouts(self, batch: Any) -> Any:
        """Set `old_log_probs` of a batch to its `rollout_log_probs`."""
        self._relies = self._schedule.mode
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rollout_log_probs"]
        )
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)
        return batch

    def _differing(self, batch: Any, own: str) -> int:
        """Return how many tokens of the trainer's log-probs (column `own`) differ from the rollout's."""
        return differing_tokens(*self._columns(batch, own), last_bits(self.config.trainer.device))

    def _columns(self, batch: Any, own: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trainer's log-probs (column `own`), the rollout's, and the mask, each padded to [rows, R]."""
        from verl.workers.utils.padding import response_from_nested

        names = [own, "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=names
        )
        if own != "old_log_probs":  # the other columns also have values of prompts
            data[own] = response_from_nested(data[own], data["response_mask"])
        data = data.select(*names).to_padded_tensor()
        return data[own].float(), data["rollout_log_probs"].float(), data["response_mask"] != 0

    def _sample_differs(self, batch: Any, metrics: dict[str, Any]) -> bool:
        """Compute a random sample of the rows outside the first mini-batch. Return whether any token differs."""
        others = self._other_rows(batch)
        ranks = self._ranks()
        count = sample_size(len(others), float(self._setting("old_log_probs_sample")))
        count = (
            min(math.ceil(count / ranks), len(others) // ranks) * ranks
        )  # the same number on each rank
        if not count:
            return False
        seed = (self.config.data.get("seed") or 0) * 1_000_003 + self.global_steps
        rows = [others[index] for index in drawn(len(others), count, seed).tolist()]
        keys = [batch.keys[row] for row in rows]
        sample = self._for_log_probs(batch, keys, count // ranks)
        self.actor_rollout_wg.compute_log_prob(sample)
        metrics["actor/entropy"] = self._entropy(sample)
        self._schedule.sampled(count, len(others))
        metrics |= self._schedule.metrics
        metrics["old_log_probs/checked_frac"] += count / len(batch)
        return self._differing(sample, "log_probs") > 0

    def _for_log_probs(self, batch: Any, keys: Sequence[str], of_rank: int) -> Any:
        """Return some rows of `batch` as the actor takes them for log-probs. `of_rank`: how many each rank gets."""
        sample = batch.select_keys(keys)
        rollout = self.config.actor_rollout_ref.rollout
        sample.extra_info |= {
            "calculate_entropy": True,
            "compute_loss": False,
            "micro_batch_size_per_gpu": math.gcd(
                of_rank, rollout.log_prob_micro_batch_size_per_gpu or 1
            ),
            "temperature": rollout.temperature,
        }
        return sample

    def _entropy(self, sample: Any) -> float:
        """Return the entropy of sampled rows, averaged as verl averages that of all rows."""
        actor = self.config.actor_rollout_ref.actor
        entropies, _, mask = self._columns(sample, "entropy")
        scale = actor.loss_scale_factor
        return float(
            agg_loss(entropies, mask.float(), actor.loss_agg_mode, loss_scale_factor=scale)
        )

    def _val_metrics_update(
        self,
        data_sources: Sequence[str],
        sample_uids: Sequence[str],
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        *more: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """Return verl's metrics of an evaluation and QaRL's. All arguments have an entry for each response."""
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, *more, **named
        )
        figures = answer_figures(data_sources, reward_extra_infos_dict)
        metrics |= {
            f"val/{name}/mean": float(np.mean([value for value in values if value is not None]))
            for name, values in reward_extra_infos_dict.items()
            if name.startswith(PREFIX)
        }
        known = reward_extra_infos_dict.get("pred", [None] * len(figures))
        votes = [None if vote is None else str(vote) for vote in known]
        rows = zip(data_sources, sample_uids, figures, votes, strict=True)
        return metrics | answers_metrics(starmap(Answer, rows))

    def _save_checkpoint(self) -> None:
        self._check_run_folder()
        if self._run_folder is not None:
            self.log_unfinished()
        # verl declares the checkpoint complete at the end of its own method.
        folder = self._saving.folder(self.global_steps)
        write_json(folder / COUNTS, self._schedule.skipping.state_dict())
        with live.phase("writing a checkpoint"):
            super()._save_checkpoint()
        self._saving.saved(folder)

    def _load_checkpoint(self) -> Any:
        loaded = super()._load_checkpoint()
        trainer = self.config.trainer
        folder = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = (
            Path(folder or f"{trainer.default_local_dir}/global_step_{self.global_steps}") / COUNTS
        )
        if path.is_file():
            self._schedule.skipping.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        return loaded

    def _ranks(self) -> int:
        """Return the number of data-parallel ranks, which have different rows."""
        trainer = self.config.trainer
        actor = self.config.actor_rollout_ref.actor
        return max(
            1,
            trainer.nnodes
            * trainer.n_gpus_per_node
            // actor.get("ulysses_sequence_parallel_size", 1),
        )

    def _other_rows(self, batch: Any) -> list[int]:
        """Return the rows outside the first mini-batch, without the rows that verl adds to pad a batch.

        With `actor.shuffle`, return all rows, because any row may be in any mini-batch."""
        first = self._first_rows()
        share = len(batch) // self._ranks()
        shuffled = self.config.actor_rollout_ref.actor.get("shuffle", False)
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        filled = [row for row, is_padding in enumerate(padding) if not is_padding]
        return [row for row in filled if shuffled or row % share >= first]

    def _first_rows(self) -> int:
        """Return the number of rows of the first mini-batch on each rank."""
        root = self.config.actor_rollout_ref
        return int(root.actor.ppo_mini_batch_size * root.rollout.n // self._ranks())


@register_trainer("qarl_sync")
class QaRLTrainerSync(QaRLTrainer, PPOTrainerSync):
    """The trainer that waits for the engine, which waits for the trainer."""

    MODE = "sync"


def answer_figures(data_sources: Sequence[str], infos: Mapping[str, Sequence[Any]]) -> list[float]:
    """Return the figure of each response: `acc` in data sources whose reward function returns one, else the reward. A
    response without an `acc` there counts as 0, as in verl. `infos`: what reward functions returned, by name."""
    rewards = infos["reward"]
    accuracies = infos.get("acc", [None] * len(rewards))
    with_accuracy = {
        source for source, value in zip(data_sources, accuracies, strict=True) if is_figure(value)
    }
    rows = zip(data_sources, accuracies, rewards, strict=True)
    return [
        float(reward if source not in with_accuracy else accuracy if is_figure(accuracy) else 0.0)
        for source, accuracy, reward in rows
    ]


def function_means(told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean score of each of several reward functions (`reward.functions`). `told`: verl's `extra_fields` of
    each response."""
    infos = [each.get("reward_extra_info") or {} for each in told]
    names = {name for info in infos for name in info if str(name).startswith(PREFIX)}
    return {
        f"{name}/mean": float(np.mean([info[name] for info in infos if name in info]))
        for name in sorted(names)
    }


def is_figure(value: Any) -> bool:
    """Return whether verl takes the mean of such values: numbers and truth values, not None and text."""
    return isinstance(value, bool | int | float | np.number | np.bool_)
