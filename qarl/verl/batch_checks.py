"""Checks that the ranks of a verl run can divide its batches evenly, and that verl can read batches of prompts.

Statements here about verl were checked against the source of verl 0.9.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from qarl.errors import UserError
from qarl.verl.keys import ACTOR, BATCH_KEYS, REFERENCE, ROLLOUT, SEPARATE_MODE
from qarl.verl.refusals import Conflict


def reading_conflicts(data: Any) -> Iterator[Conflict]:
    """Yield sizes of the section `data` with which verl reads other batches of prompts than the key says, or none.

    verl takes 0 for a missing value. What its loaders of data refuse, a process of Ray refuses after the start, and a
    `gen_batch_size` that does not divide a step is found in the first step (`_create_dataloader` and
    `_fetch_one_gen_batch` of trainer/ppo/v1/trainer_base.py)."""
    for name, instead in (
        ("val_batch_size", "all prompts"),
        ("gen_batch_size", "data.train_batch_size"),
    ):
        value = data.get(name)
        if value is not None and not _is_count(value, least=1):
            why = f"verl takes 0 for {instead}, as null, and its loader refuses what is no whole number above 0"
            yield Conflict(
                f"data.{name}", value, f"a whole number above 0, or to null for {instead}", why
            )
    size = data.get("gen_batch_size")
    if _is_count(size, least=1) and data.train_batch_size % size:
        why = f"verl reads whole batches of it, and a step has data.train_batch_size={data.train_batch_size} prompts"
        yield Conflict("data.gen_batch_size", size, f"a divisor of {data.train_batch_size}", why)
    workers = data.get("dataloader_num_workers")
    if not _is_count(workers, least=0):
        why = "it is the number of processes that read prompts, 0 for none besides verl's own"
        yield Conflict("data.dataloader_num_workers", workers, "a whole number, at least 0", why)


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def refuse_partial_batches(composed: Any, written: set[str]) -> None:
    """Raise UserError unless all ranks get equal shares of each batch, and a share splits into whole micro-batches.

    verl pads the responses of a step to whole mini-batches and gives every rank an equal share: of the whole step to
    compute log-probs, of a mini-batch for an update. It checks the shares only in the first step, after a whole
    generation, and its AssertionErrors name no key. If micro-batches are filled by tokens (`use_dynamic_bsz`), shares
    need only be equal, and a row of full length must fit into a micro-batch. See `_get_required_batch_multiple`
    (trainer/ppo/v1/trainer_base.py), `train_mini_batch` (workers/engine_workers.py) and `prepare_micro_batches`
    (workers/engine/utils.py). QaRL uses no critic. `written`: the keys of the section `verl`.
    """
    from omegaconf import OmegaConf

    actor = composed.actor_rollout_ref.actor
    rollout = composed.actor_rollout_ref.rollout
    trainer = composed.trainer
    reference = actor.use_kl_loss or composed.algorithm.use_kl_in_reward
    prompts = composed.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    responses = mini * rollout.n

    def refusal(key: str, problem: str, fix: str) -> UserError:
        ours = key in BATCH_KEYS and key not in written
        name = BATCH_KEYS[key] if ours else f"verl.{key}"
        why = f"{prompts} prompts, {rollout.n} responses each, mini-batches of {mini} prompts, {ranks} ranks"
        value = OmegaConf.select(composed, key)
        return UserError(f"{name}={value} {problem}", where=name, why=why, fix=fix)

    if responses % ranks:
        unit = ranks // math.gcd(ranks, rollout.n)
        problem = f"does not give each of {ranks} ranks the same number of responses"
        fix = f"make it and data.train_batch_size multiples of {unit}"
        raise refusal(f"{ACTOR}.ppo_mini_batch_size", problem, fix)
    multiple = math.lcm(responses, ranks)
    at_once = mini if trainer.v1.trainer_mode == SEPARATE_MODE else prompts
    step = math.ceil(at_once * rollout.n / multiple) * multiple
    longest = composed.data.max_prompt_length + composed.data.max_response_length
    shares = {f"{ACTOR}.ppo": responses // ranks}
    if actor.use_dynamic_bsz or not composed.algorithm.rollout_correction.bypass_mode:
        shares[f"{ROLLOUT}.log_prob"] = step // ranks
    if reference:
        shares[f"{REFERENCE}.log_prob"] = step // ranks
    unit_of_limit = "max_token_len" if actor.use_dynamic_bsz else "micro_batch_size"
    for part, share in shares.items():
        key = f"{part}_{unit_of_limit}_per_gpu"
        limit = OmegaConf.select(composed, key)
        if not isinstance(limit, int) or limit < 1:
            raise refusal(key, "is not a whole number above 0", "set it to 1 or more")
        if actor.use_dynamic_bsz and limit < longest:
            problem = f"does not hold a row of {longest} tokens"
            raise refusal(key, problem, f"set it to {longest} or more")
        if not actor.use_dynamic_bsz and share % limit:
            fix = f"choose a divisor of {share}"
            raise refusal(key, f"does not divide a rank's {share} responses", fix)
