"""Score responses with a reward function, in its worker processes.

If the function raises, calls `sys.exit`, does not return a finite number or takes longer than `reward.timeout_s`, the
run stops with an error that names the row. If an exception scored 0 instead, the model would learn to avoid the bug. If
a timeout scored 0, the rewards would depend on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qarl.config.reward import RewardConfig
from qarl.config.types import TURN_REWARDS
from qarl.data.prompts import Prompt
from qarl.data.reward_outcomes import Outcome, Scored
from qarl.data.reward_workers import InProcessReward, Reward, WorkerReward
from qarl.data.rewards import BUILTIN, IN_PROCESS
from qarl.data.weighted_reward import Part, WeightedReward
from qarl.data.worker_roles import ONE_OF_REWARDS, REWARD, Role
from qarl.errors import UserError, shortened
from qarl.progress import live


def find_reward(
    spec: str, workers: int = 1, folder: str | None = None, *, role: Role = REWARD
) -> Reward:
    """Return the reward that `spec` names (`reward.function`). Its function is loaded in its first worker process.

    `workers`: most worker processes (`reward.workers`). `folder`: the folder that they work in; None: the current one.
    `role`: how errors call its key.
    """
    if spec in IN_PROCESS:
        return InProcessReward(spec, BUILTIN[spec])
    return WorkerReward(spec, workers, folder, role=role)


def reward_of(keys: RewardConfig, folder: str | None = None) -> Reward:
    """Return the reward of a run: its function, or the weighted sum of several. `folder`: as in `find_reward`."""
    if not keys.functions:
        return find_reward(keys.function, keys.workers, folder)
    parts = [
        Part(
            part.label,
            part.weight,
            find_reward(part.function, keys.workers, folder, role=ONE_OF_REWARDS),
        )
        for part in keys.functions
    ]
    return WeightedReward(parts)


def refuse_batches(reward_fn: Reward) -> None:
    """Raise UserError if a function scores all responses of a batch in one call, which verl does not do.

    `reward_fn`: one that has been loaded."""
    functions, role = [reward_fn], REWARD
    if isinstance(reward_fn, WeightedReward):
        functions, role = [part.reward for part in reward_fn.parts], ONE_OF_REWARDS
    if of_batches := [function.name for function in functions if function.scores_all]:
        raise UserError(
            f"the reward function {of_batches[0]} takes all responses of a batch at once, and verl scores each by "
            "itself",
            where=role.key,
            why="it has the parameter solution_strs, and would get batches of one response",
            fix="give it the parameters data_source, solution_str, ground_truth and extra_info, it may be async; or "
            "set backend=local",
        )


def compares_answers(keys: RewardConfig, reward: Reward) -> tuple[str, Reward] | None:
    """Return the function that most likely compares a response with the ground truth, with its name, or None.

    Of several functions it is a built-in one, because others may judge form or length. `reward`: that of `keys`."""
    if not isinstance(reward, WeightedReward):
        return None if keys.function in TURN_REWARDS else (keys.function, reward)
    for part, entry in zip(reward.parts, keys.functions, strict=True):
        if entry.function in BUILTIN and entry.function not in TURN_REWARDS:
            return entry.function, part.reward
    return None


def score_responses(
    reward: Reward,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    *,
    timeout_s: float | None = None,
) -> list[float]:
    """Return the score of each `responses[i]`, an answer to `prompts[i]`, as `scored_responses` does."""
    outcomes = scored_responses(reward, prompts, responses, timeout_s=timeout_s)
    return [outcome.score for outcome in outcomes]


def scored_responses(
    reward: Reward,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    *,
    timeout_s: float | None = None,
) -> list[Scored]:
    """Return the score of each `responses[i]`, an answer to `prompts[i]`, with what the function returned beside it.

    `timeout_s`: time limit per response, in seconds; None means no limit.

    Raises:
        UserError: the function cannot be loaded, raised an exception, took longer than `timeout_s`, or did not return a
            finite number (alone or under "score"). It names the first such row.
    """
    rows = [
        reward_arguments(prompt, response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return scored_rows(
        reward, rows, [f"row {prompt.index}, " for prompt in prompts], timeout_s=timeout_s
    )


def score_rows(
    reward: Reward,
    rows: Sequence[Mapping[str, Any]],
    locations: Sequence[str],
    *,
    timeout_s: float | None,
) -> list[float]:
    """Do the same as `score_responses` with the arguments of each call. `locations`: a text for each, for errors."""
    outcomes = scored_rows(reward, rows, locations, timeout_s=timeout_s)
    return [outcome.score for outcome in outcomes]


def scored_rows(
    reward: Reward,
    rows: Sequence[Mapping[str, Any]],
    locations: Sequence[str],
    *,
    timeout_s: float | None,
) -> list[Scored]:
    """Do the same as `scored_responses` with the arguments of each call. `locations`: a text for each, for errors."""
    futures = reward.submit_all(rows, timeout_s)
    scores = []
    try:
        with live.phase("scoring", total=len(rows), unit="responses") as phase:
            for row, location, future in zip(rows, locations, futures, strict=True):
                outcome = future.result()
                scores.append(scored(reward.name, outcome, row, where=location))
                phase.advance()
    except BaseException:
        reward.stop()
        raise
    return scores


def reward_arguments(prompt: Prompt, response: str) -> dict[str, Any]:
    """Return the four arguments of a reward function."""
    return {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


def scored(name: str, outcome: Outcome, arguments: Mapping[str, Any], *, where: str = "") -> Scored:
    """Return `outcome` if it is a score. Otherwise raise UserError, which names the row, or the batch.

    `name`: of the function. `arguments`: those of the call. `where`: text to show before the data source.
    """
    if isinstance(outcome, Scored):
        return outcome
    if outcome.responses > 1:
        raise UserError(
            f"the reward function {outcome.name or name} {outcome.what}",
            where=f"a batch of {outcome.responses} responses",
            why=outcome.why,
            fix=outcome.fix,
        )
    raise UserError(
        f"the reward function {outcome.name or name} {outcome.what}",
        where=f"{where}data_source {arguments['data_source']!r}",
        why=f"{outcome.why} (response: {shortened(arguments['solution_str'])})",
        fix=outcome.fix,
    )
