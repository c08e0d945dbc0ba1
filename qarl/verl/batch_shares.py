"""The check that each rank's share of verl's batches splits into whole micro-batches.

verl pads the responses of a step to whole mini-batches and gives every rank an equal share. The share must be a
multiple of the micro-batch size. To compute log-probs, a rank gets a share of all responses of a step. For an update,
it gets a share of a mini-batch. verl checks the shares only in the first step, after a whole generation, and its
AssertionErrors name no key. If micro-batches are filled by tokens (`use_dynamic_bsz`), shares need only be equal, and
a row of full length must fit into a micro-batch.

Statements here about verl were checked against the source of verl 0.9.1: `_get_required_batch_multiple`
(trainer/ppo/v1/trainer_base.py), `train_mini_batch` (workers/engine_workers.py), `get_data_parallel_size`
(workers/engine/fsdp/transformer_impl.py), `prepare_micro_batches` (workers/engine/utils.py) and
`rearrange_micro_batches` (utils/seqlen_balancing.py). The batches of the critic are
not checked, because QaRL does not use a critic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qarl.config.checks import divisors
from qarl.errors import UserError

ACTOR, ROLLOUT, REFERENCE = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
PROMPTS, RESPONSES, MINI_BATCH = "data.train_batch_size", f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size"
NODES, GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
MICRO_BATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
LOG_PROBS, REFERENCE_LOG_PROBS = (f"{part}.log_prob_micro_batch_size_per_gpu" for part in (ROLLOUT, REFERENCE))
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
LOG_PROB_TOKENS, REFERENCE_TOKENS = (f"{part}.log_prob_max_token_len_per_gpu" for part in (ROLLOUT, REFERENCE))
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"

OURS = {key: key for key in (PROMPTS, PROMPT, RESPONSE, NODES, GPUS)} | {
    RESPONSES: "rollout.n",
    MINI_BATCH: "actor.ppo_mini_batch_size",
    MICRO_BATCH: "actor.ppo_micro_batch_size_per_gpu",
    LOG_PROBS: "actor.log_prob_micro_batch_size_per_gpu",
    TOKENS: "actor.ppo_max_token_len_per_gpu",
    LOG_PROB_TOKENS: "actor.log_prob_max_token_len_per_gpu",
}
"""verl's keys that QaRL's config sets, and QaRL's names for them."""


class Batches:
    """The batch sizes in verl's config `composed`. `written` is the section `verl` of QaRL's config.

    Raise UserError if a size is not a whole number above 0.
    """

    def __init__(self, composed: Any, written: Mapping[str, Any]) -> None:
        self._composed, self._written = composed, {key.removeprefix("+") for key in written}
        self.prompts, self.n, self.mini = (self.size(key) for key in (PROMPTS, RESPONSES, MINI_BATCH))
        self.ranks, self.responses = self.size(NODES) * self.size(GPUS), self.mini * self.n
        self.shown_ranks = f"{self.name(NODES)} * {self.name(GPUS)} = {self.ranks} rank{'s' * (self.ranks > 1)}"
        product = f"{self.name(MINI_BATCH)} * {self.name(RESPONSES)}"
        self.shown_mini_batch = f"a mini-batch is {product} = {self.responses} responses"

    def size(self, key: str) -> int:
        from omegaconf import OmegaConf

        value = OmegaConf.select(self._composed, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = self.name(key)
            raise UserError(
                f"{name} must be a whole number above 0, got {value!r}",
                where=name,
                why="verl counts prompts, responses, tokens or ranks with it",
                fix=f"set {name} to a whole number, for example 1",
            )
        return value

    def name(self, key: str) -> str:
        """Return QaRL's name of verl's `key`, or `verl.KEY` if it has none or is set in the section `verl`."""
        return OURS[key] if key in OURS and key not in self._written else f"verl.{key}"


def refuse_partial_batches(composed: Any, written: Mapping[str, Any]) -> None:
    """Raise UserError unless all ranks get equal shares of each batch, and a share splits into whole micro-batches."""
    batches = Batches(composed, written)
    _refuse_partial_shares(batches)
    with_reference = composed.actor_rollout_ref.actor.use_kl_loss or composed.algorithm.use_kl_in_reward
    if composed.actor_rollout_ref.actor.use_dynamic_bsz:
        for key in (TOKENS, LOG_PROB_TOKENS, *([REFERENCE_TOKENS] if with_reference else [])):
            _refuse_short_limit(batches, key)
        return
    _refuse_partial_micro_batches(batches, MICRO_BATCH, batches.responses, batches.shown_mini_batch)
    multiple = math.lcm(batches.responses, batches.ranks)
    step = math.ceil(batches.prompts * batches.n / multiple) * multiple
    shown_step = f"a step has {batches.name(PROMPTS)} * {batches.name(RESPONSES)} = {step} responses"
    if step != batches.prompts * batches.n:
        shown_step = f"verl pads a step to whole mini-batches, which is {step} responses"
    if not composed.algorithm.rollout_correction.bypass_mode:
        _refuse_partial_micro_batches(batches, LOG_PROBS, step, shown_step)
    if with_reference:
        _refuse_partial_micro_batches(batches, REFERENCE_LOG_PROBS, step, shown_step)


def _refuse_partial_shares(batches: Batches) -> None:
    if batches.responses % batches.ranks == 0:
        return
    name, prompts = batches.name(MINI_BATCH), batches.name(PROMPTS)
    unit = batches.ranks // math.gcd(batches.ranks, batches.n)
    fix = f"make it a multiple of {unit} that divides {prompts}={batches.prompts}"
    if batches.prompts % unit:
        fix = f"make {prompts} and {name} multiples of {unit}"
    raise UserError(
        f"{name}={batches.mini} does not give each of {batches.ranks} ranks the same number of responses",
        where=name,
        why=f"{batches.shown_mini_batch}, {batches.shown_ranks}, and verl gives every rank an equal share of each "
        "mini-batch",
        fix=f"{fix}, or change the number of ranks",
    )


def _refuse_short_limit(batches: Batches, key: str) -> None:
    limit, name = batches.size(key), batches.name(key)
    longest = batches.size(PROMPT) + batches.size(RESPONSE)
    if limit < longest:
        raise UserError(
            f"{name}={limit} does not hold a row of full length",
            where=name,
            why=f"{batches.name(PROMPT)} + {batches.name(RESPONSE)} = {longest} tokens, and a row is never divided",
            fix=f"set {name} to {longest} or more, or lower {batches.name(RESPONSE)}",
        )


def _refuse_partial_micro_batches(batches: Batches, key: str, responses: int, of: str) -> None:
    micro, name, share = batches.size(key), batches.name(key), responses // batches.ranks
    if share % micro:
        raise UserError(
            f"{name}={micro} does not divide a rank's {share} responses",
            where=name,
            why=f"{of}, a rank's share is {share} ({batches.shown_ranks}), and verl needs whole micro-batches",
            fix=f"choose a divisor of {share}: {divisors(share)}",
        )
