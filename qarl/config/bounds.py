"""Bounds of sane values for every numeric key. A value outside its bounds is allowed, but gives a warning.

The types in `qarl.config` refuse values that cannot work. These bounds find values that work but are almost certainly
mistakes, such as a learning rate of 4096. The bounds are wide, so every reasonable run is within them. `unusual_values`
reports them when a run starts, in a dry run and in the doctor. `TABLE` has a row for every numeric key: its bounds, or
the reason why it needs no bounds. A test checks that no key is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qarl.config.errors import show

if TYPE_CHECKING:
    from qarl.config import Config


@dataclass(frozen=True)
class Bounds:
    """Values from `low` to `high` are sane. `below`: effect of a smaller value. `above`: effect of a larger value."""

    low: float
    high: float
    above: str
    below: str = ""


@dataclass(frozen=True)
class Exempt:
    """A key that needs no bounds beyond its type. `why`: the reason."""

    why: str


@dataclass(frozen=True)
class Unusual:
    """A value outside its bounds: the dotted key, what is wrong, why, and what to write instead."""

    key: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.key}\n  why: {self.why}\n  fix: {self.fix}"


_BATCH = "no usual run has that many responses per step, and time and memory of a step grow with their number"
_LENGTH = "no model has that many positions"
_BAND = "the band is so wide that it does not limit how far an update moves a sequence's probability"
_NARROW = "the band is narrower than rounding errors, so almost every response is outside after the first update"
_STEPS = "the run would not end"
_MACHINES = "no run uses that many machines"
_CLIP = "the ratio is hardly limited, so a few tokens could outweigh the rest of the batch"
_CLIPPED = "almost every token is clipped after the first update"
_WEIGHT = "a single token or response could outweigh the rest of the batch"
_BOUNDED = "even tokens without a mismatch are out of bounds"
_MEMORY = "no micro-batch of that size fits into memory"

TABLE: dict[str, Bounds | Exempt] = {
    "seed": Exempt("every 32-bit number is equally good"),
    "data.train_batch_size": Bounds(1, 65536, _BATCH),
    "data.max_prompt_length": Bounds(1, 2**20, _LENGTH),
    "data.max_response_length": Bounds(1, 2**20, _LENGTH),
    "reward.timeout_s": Bounds(0.01, 3600, "a stuck reward delays the run for that long", "most answers need longer"),
    "rollout.n": Bounds(2, 1024, "a group of that size costs many rollouts but hardly improves its mean score"),
    "rollout.temperature": Bounds(
        0.1, 2.0, "responses are close to random tokens", "responses to one prompt are almost alike and teach little"
    ),
    "rollout.top_p": Bounds(0.1, 1.0, "", "almost only the likeliest token is left: responses are almost alike"),
    "rollout.top_k": Bounds(-1, 2**24, "no vocabulary has that many tokens, so it keeps all of them, as -1 does"),
    "rollout.val_temperature": Bounds(0.0, 2.0, "responses are close to random tokens"),
    "rollout.max_num_seqs": Bounds(1, 16384, "vLLM reserves buffers for every sequence"),
    "rollout.max_num_batched_tokens": Bounds(1, 2**21, "vLLM reserves activations for every token of a step"),
    "rollout.gpu_memory_utilization": Bounds(
        0.01, 0.97, "no memory is left for the trainer", "no model's weights fit into this share of the GPU"
    ),
    "rollout.cpu_kvcache_space_gib": Bounds(
        1 / 1024, 4096, "no machine has that much memory", "it holds only a few tokens"
    ),
    "rollout.tensor_model_parallel_size": Bounds(1, 64, "splitting a layer over that many GPUs gains nothing"),
    "quant.group_size": Bounds(8, 4096, "one scale for that many weights is as coarse as one per output channel"),
    "quant.mismatch_limit": Bounds(0.0, 5.0, "no two useful models differ that much, so the guard would never act"),
    "actor.ppo_mini_batch_size": Bounds(1, 65536, _BATCH),
    "actor.ppo_micro_batch_size_per_gpu": Bounds(1, 16384, _MEMORY),
    "actor.log_prob_micro_batch_size_per_gpu": Bounds(1, 65536, _MEMORY),
    "actor.ppo_max_token_len_per_gpu": Bounds(1, 2**24, _MEMORY),
    "actor.log_prob_max_token_len_per_gpu": Bounds(1, 2**24, _MEMORY),
    "actor.kl_loss_coef": Bounds(1e-5, 1.0, "the KL term outweighs the reward", "the KL term changes nothing"),
    "actor.old_log_probs_sample": Bounds(
        0.01, 1.0, "", "a difference outside the first mini-batch is hardly ever found"
    ),
    "actor.ppo_epochs": Bounds(1, 32, "after that many passes the policy is far from the one that sampled"),
    "actor.grad_clip": Bounds(
        1e-4, 1e9, "even 1e9 clips no gradient", "every gradient is scaled down to almost nothing"
    ),
    "actor.seq_clip_ratio_high": Bounds(1e-6, 1.0, _BAND, _NARROW),
    "actor.seq_clip_ratio_low": Bounds(1e-6, 0.5, _BAND, _NARROW),
    "actor.neg_seq_clip_ratio_low": Bounds(1e-6, 0.5, _BAND, _NARROW),
    "actor.neg_seq_clip_ratio_high": Bounds(1e-6, 1.0, _BAND, _NARROW),
    "actor.band_reference_length": Bounds(1, 2**20, _LENGTH),
    "actor.seq_tis_imp_ratio_cap": Bounds(1, 100, "a single sequence could outweigh the rest of the batch"),
    "actor.clip_ratio_low": Bounds(1e-6, 0.9, _CLIP, _CLIPPED),
    "actor.clip_ratio_high": Bounds(1e-6, 10.0, _CLIP, _CLIPPED),
    "actor.clip_ratio_c": Bounds(1.01, 100.0, _CLIP, "tokens with a negative advantage teach almost nothing"),
    "actor.tau_pos": Bounds(0.01, 100.0, "only ratios of almost exactly 1 have a gradient", "nothing limits the ratio"),
    "actor.tau_neg": Bounds(0.01, 100.0, "only ratios of almost exactly 1 have a gradient", "nothing limits the ratio"),
    "actor.mis_imp_ratio_cap": Bounds(1.0, 100.0, _WEIGHT, "even responses without a mismatch are left out"),
    "rollout_correction.rollout_is_threshold": Bounds(1.0, 100.0, _WEIGHT, _BOUNDED),
    "rollout_correction.rollout_is_threshold_lower": Bounds(1e-6, 1.0, _BOUNDED, "no weight is so small"),
    "rollout_correction.rollout_rs_threshold": Exempt("the metrics correction/rejected_* show its effect"),
    "rollout_correction.rollout_rs_threshold_lower": Exempt("the metrics correction/rejected_* show its effect"),
    "rollout_correction.veto_threshold": Bounds(1e-30, 0.1, "most responses have such a token", "no token is so rare"),
    "optim.lr": Bounds(1e-9, 1e-2, "the first update would destroy the model", "nothing would be learned"),
    "optim.betas[0]": Bounds(0.0, 0.999, "the first moment would take longer than the run to follow the gradient"),
    "optim.betas[1]": Bounds(
        0.5, 0.99999, "the second moment would take longer than the run to follow the gradient", "steps are noisy"
    ),
    "optim.eps": Bounds(
        1e-20, 1e-2, "it is larger than any gradient, so the weights would hardly move", "a division by 0 is possible"
    ),
    "optim.weight_decay": Bounds(0.0, 10.0, "the weights would decay faster than they learn"),
    "optim.lr_warmup_steps": Bounds(0, 100_000, "the learning rate would never reach its peak"),
    "optim.min_lr_ratio": Exempt("its type keeps it between 0 and 1, and both of these values are useful"),
    "optim.muon_lr": Bounds(1e-8, 1.0, "the first update would destroy the model", "nothing would be learned"),
    "optim.muon_momentum": Bounds(0.0, 0.999, "the momentum would take longer than the run to follow the gradient"),
    "trainer.nnodes": Bounds(1, 4096, _MACHINES),
    "trainer.n_gpus_per_node": Bounds(1, 128, "no machine has that many"),
    "trainer.total_training_steps": Bounds(1, 10_000_000, _STEPS),
    "trainer.test_freq": Exempt("a frequency beyond the run's last step means: evaluate at the end"),
    "trainer.save_freq": Exempt("a frequency beyond the run's last step means: save at the end"),
    "trainer.save_minutes": Exempt("longer than the run means: save at Ctrl-C"),
    "trainer.val_max_prompts": Exempt("above the number of prompts it means all of them"),
    "trainer.num_threads": Bounds(1, 1024, "no machine has that many CPUs"),
    "trainer.max_ckpt_to_keep": Exempt("above the number of checkpoints it means all of them; the doctor counts disk"),
}
"""Maps dotted keys to bounds. `optim.betas` has a row for each value. Keys of the section `verl` have no row."""


def unusual_values(config: Config) -> list[Unusual]:
    """Return values of `config` that are outside their bounds, and combinations of values that make no sense."""
    values = dict(flat_numbers(config.model_dump(exclude={"verl"})))
    found = []
    for key, value in values.items():
        row = TABLE.get(key)
        if isinstance(row, Bounds) and not row.low <= value <= row.high:
            found.append(_question(key, value, row))
    return found + [unusual for check in _TOGETHER if (unusual := check(config)) is not None]


def flat_numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield dotted key and value of every number in a nested mapping. The key of a list's item is `key[i]`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield from flat_numbers({f"{key}[{i}]": one for i, one in enumerate(value)}, prefix)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _question(key: str, value: float, row: Bounds) -> Unusual:
    below = value < row.low
    limit, side = (row.low, "below") if below else (row.high, "above")
    fix = f"choose {show(row.low)} to {show(row.high)}, unless this is what you want"
    return Unusual(key, f"{key}={show(value)} is {side} {show(limit)}", row.below if below else row.above, fix)


def _warm_up_without_end(config: Config) -> Unusual | None:
    warm_up, total = config.optim.lr_warmup_steps, config.trainer.total_training_steps
    if warm_up == 0 or warm_up < total:
        return None
    what = f"optim.lr_warmup_steps={warm_up} covers the whole run of {total} steps"
    return Unusual("optim.lr_warmup_steps", what, "the learning rate would never reach its peak", "lower it")


def _responses_of_a_step(config: Config) -> Unusual | None:
    prompts, n = config.data.train_batch_size, config.rollout.n
    if prompts * n <= MOST_RESPONSES:
        return None
    what = f"data.train_batch_size * rollout.n = {prompts} * {n} is above {MOST_RESPONSES} responses per step"
    return Unusual("data.train_batch_size, rollout.n", what, _BATCH, "lower one of the two")


def _reinforce_on_old_responses(config: Config) -> Unusual | None:
    updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
    if config.actor.loss != "reinforce" or updates == 1:
        return None
    what = f"actor.loss=reinforce makes {updates} updates per step"
    why = "it has no ratio to the policy that sampled, so every update after the first is biased"
    fix = f"set actor.ppo_mini_batch_size={config.data.train_batch_size} and actor.ppo_epochs=1"
    return Unusual("actor.loss", what, why, fix)


def _one_token_to_sample(config: Config) -> Unusual | None:
    if config.rollout.top_k != 1:
        return None
    why = "only the likeliest token is left, so the responses to one prompt are alike and teach nothing"
    return Unusual("rollout.top_k", "rollout.top_k=1 leaves nothing to sample", why, "choose 2 or more, or -1 for all")


def _mismatch_in_the_ratio(config: Config) -> Unusual | None:
    """docs/ablations.md has the eight runs."""
    from_rollout = config.actor.old_log_probs == "rollout"
    if config.quant.align != "off" or config.quant.scheme not in ("w4a16", "w4a8") or config.actor.loss == "reinforce":
        return None
    if not (from_rollout or config.rollout_correction.bypass_mode):
        return None
    key = "actor.old_log_probs" if from_rollout else "rollout_correction.bypass_mode"
    what = "the ratio of the loss contains the mismatch of 4-bit rollouts"
    why = "it is far from 1 on some tokens before any update; in W4A16 eight of eight runs with GRPO collapsed"
    return Unusual(key, what, why, "set quant.align=model, or actor.old_log_probs=recompute without bypass_mode")


MOST_RESPONSES = 2**20
_TOGETHER: tuple[Callable[[Config], Unusual | None], ...] = (
    _warm_up_without_end,
    _responses_of_a_step,
    _one_token_to_sample,
    _reinforce_on_old_responses,
    _mismatch_in_the_ratio,
)
