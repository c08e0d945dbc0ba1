"""TRL's `rollout_func` with QaRL's engine, and what goes into it and comes out of it: prompts, responses, rewards.

`Rollouts` publishes changed weights, then samples one response to each prompt, or holds a conversation from it
(`qarl.trl.turns`). Each process runs its own engine and samples its own part of the batch. After an optimizer step all
processes have the same weights, so each publishes its weights to its own engine.

Rewards are refused that TRL would train on as if they were 0. A reward function may return None for a response that it
does not score. TRL stores None as NaN and leaves NaN out of every mean and sum, so it cannot tell a reward that became
NaN from one that was not meant. A response without any reward gets the advantage 0. If a reward function fails in this
way, TRL warns and trains to the end with a loss of 0. So a number that is not finite is an error here, and so is a
response that no reward function scored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from qarl.data.reward_outcomes import is_number
from qarl.errors import UserError, shortened
from qarl.rollout.engine import RolloutEngine, SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.trainer.local import request_seed
from qarl.trainer.policy import Policy
from qarl.trl.arguments import check_dataset, check_prompts
from qarl.trl.config import QaRLConfig, in_trls_words
from qarl.trl.rewards import is_name, named_reward
from qarl.trl.turns import Turns

EVALUATION = 2**40
"""Evaluations count their requests from this index in `request_seed`. No step has as many rollouts."""


class Rollouts:
    """`published`: step and version counters of the weights that were last published. `report`: until it is logged.

    `turns`: what holds conversations, or None."""

    def __init__(self, policy: Policy, engine: RolloutEngine, turns: Turns | None = None) -> None:
        self.policy = policy
        self.engine = engine
        self.turns = turns
        self.published: tuple[int, tuple[int, ...]] | None = None
        self.report: PublishReport | None = None
        self._calls: dict[bool, tuple[int, int]] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return `prompt_ids`, `completion_ids` and `logprobs` for TRL, and of conversations `env_mask` and what reward
        functions get. Prompts are already repeated."""
        token_ids, _, _ = trainer._tokenize_prompts(prompts)
        step = trainer.state.global_step
        self.publish(step)
        seeds = self._seeds(trainer, step, len(prompts))
        sampling = SamplingConfig(trainer.max_completion_length, temperature=trainer.temperature)
        more: dict[str, list[Any]] = {}
        if self.turns is None:
            responses = self.engine.generate(token_ids, sampling, seeds)
        else:
            responses, more = self.turns.hold(
                trainer, self.engine, prompts, token_ids, sampling, seeds
            )
        self.engine.sleep()
        return {
            "prompt_ids": responses.prompt_token_ids,
            "completion_ids": responses.response_token_ids,
            "logprobs": responses.rollout_log_probs,
            **more,
        }

    def publish(self, step: int) -> None:
        """Send the engine the weights of `step`, if it does not have them. With adapters, send their base only once.

        Weights can also change without a step, for example when transformers loads the best checkpoint. So the version
        counters of the parameters are compared too."""
        now = (step, tuple(parameter._version for parameter in self.policy.model.parameters()))
        if self.published == now and not self.engine.stale:
            return
        self.report = self.engine.publish_from(self.policy.publish, version=step)
        self.published = now

    def _seeds(self, trainer: Any, step: int, count: int) -> list[int]:
        """Return a seed for each request. It depends on the run's seed, the step, and the request's index in the batch
        of all processes. Evaluations use different seeds, so they do not change the rollouts of training."""
        training = trainer.training
        last, calls = self._calls.get(training, (step, -1))
        calls = calls + 1 if last == step else 0
        self._calls[training] = (step, calls)
        start = (
            calls * trainer.accelerator.num_processes + trainer.accelerator.process_index
        ) * count
        start += 0 if training else EVALUATION
        return [request_seed(trainer.args.seed, step, start + i) for i in range(count)]


def longest_prompt(
    args: QaRLConfig, tokenizer: Any, *datasets: Any, template: Mapping[str, Any] | None = None
) -> int:
    """Return the largest number of tokens that a prompt may have, which sets the engine's largest length.

    If `vllm_max_model_length` is set, this is the number that it leaves for a prompt. Otherwise it is the length of the
    longest prompt in the datasets. `template`: further arguments of the chat template.

    Raises:
        UserError: a prompt is longer than `vllm_max_model_length` allows, or a dataset is a stream and
            `vllm_max_model_length` is not set.
    """
    limit = args.vllm_max_model_length
    response = args.max_completion_length
    assert response is not None  # `run_config` refuses None
    parts: list[Any] = []
    for data in datasets:
        parts += data.values() if isinstance(data, dict) else [data]
    longest = max(
        (
            n
            for data in parts
            if data is not None
            for n in _lengths(args, tokenizer, data, template or {})
        ),
        default=1,
    )
    if limit is not None and limit - response < longest:
        what = f"vllm_max_model_length={limit} leaves {limit - response} tokens for a prompt, not {longest}"
        why = "the longest prompt has as many"
        fix = f"set it to {longest + response} or more, or remove it"
        raise UserError(what, where="vllm_max_model_length", why=why, fix=fix)
    return longest if limit is None else limit - response


def _lengths(
    args: QaRLConfig, tokenizer: Any, data: Any, arguments: Mapping[str, Any]
) -> Iterator[int]:
    check_dataset(data)
    if not hasattr(data, "__len__"):
        if args.vllm_max_model_length is None:
            what = "the prompts of a streamed dataset have unknown lengths"
            why = "the engine needs a limit"
            fix = "set vllm_max_model_length to the tokens of the longest prompt plus max_completion_length"
            raise UserError(what, where="vllm_max_model_length", why=why, fix=fix)
        return
    if not len(data) or "prompt" not in data.column_names:
        what = "a dataset is empty" if not len(data) else "a dataset has no column prompt"
        where = "train_dataset, eval_dataset"
        fix = "give each dataset rows with a prompt"
        raise UserError(
            what, where=where, why=f"its columns: {', '.join(data.column_names)}", fix=fix
        )
    prompts = list(data["prompt"])
    check_prompts(prompts)
    if isinstance(prompts[0], str):
        tokens = tokenizer(prompts)
    else:
        template: Any = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        template |= arguments
        tokens = tokenizer.apply_chat_template(
            prompts, **template, **(args.chat_template_kwargs or {})
        )
    yield from map(len, tokens["input_ids"])


def checked_functions(reward_funcs: Any, args: QaRLConfig, tokenizer: Any = None) -> Any:
    """Return the argument `reward_funcs` of `GRPOTrainer` with functions that raise UserError unless they
    return a finite number, or None, for each response.

    Names of functions become functions, which read conversations by `tokenizer`. Names and folders of reward models,
    and models, are returned as they are."""
    if isinstance(reward_funcs, list):
        return [checked_functions(function, args, tokenizer) for function in reward_funcs]
    if is_name(reward_funcs):
        how = {"workers": args.reward_workers, "timeout_s": args.reward_timeout_s}
        return in_trls_words(lambda: named_reward(reward_funcs, tokenizer=tokenizer, **how))
    if not callable(reward_funcs) or isinstance(reward_funcs, torch.nn.Module):
        return reward_funcs
    name = get_callable_name(reward_funcs)

    @functools.wraps(reward_funcs)
    def call(**arguments: Any) -> Any:
        return check_returned(name, reward_funcs(**arguments), arguments)

    @functools.wraps(reward_funcs)
    async def call_async(**arguments: Any) -> Any:
        return check_returned(name, await reward_funcs(**arguments), arguments)

    checked: Callable[..., Any] = call_async if is_async_callable(reward_funcs) else call
    checked.__name__ = name
    return checked


def check_returned(name: str, rewards: Any, arguments: dict[str, Any]) -> list[Any]:
    """Return what the reward function `name` returned, as a list. Raise UserError if it is none with a finite number or
    None for each response.

    `arguments`: the function's arguments, of which `prompts` and `trainer_state` are named in the error."""
    step = f"step {arguments['trainer_state'].global_step}"
    prompts = arguments["prompts"]
    values = _listed(rewards)
    if values is None or len(values) != len(prompts):
        got = shortened(rewards) if values is None else f"{len(values)} rewards"
        raise UserError(
            f"the reward function {name!r} returned {got} for {len(prompts)} responses",
            where=step,
            why="TRL takes a list with a number for each response, in their order",
            fix="return such a list; None in it says that this function does not apply to the response",
        )
    for prompt, reward in zip(prompts, values, strict=True):
        if reward is not None and not is_number(reward):
            # An array's item would be shown with its type.
            shown = float(reward) if isinstance(reward, float) else shortened(reward)
            raise UserError(
                f"the reward function {name!r} returned {shown}",
                where=f"{step}, prompt {shortened(prompt)}",
                why="a reward must be a finite number that FP32 can hold, because the mean and all advantages of its "
                "group depend on it",
                fix="return a finite number, or None if this function does not apply to the response",
            )
    return values


def _listed(rewards: Any) -> list[Any] | None:
    """Return the items of a list, an array or a generator, or None for anything else."""
    if isinstance(rewards, str | bytes | Mapping):
        return None
    try:
        return list(rewards)
    except TypeError:
        return None


def check_scored(
    rewards: torch.Tensor, names: Sequence[str], prompts: Sequence[Any], step: int
) -> None:
    """Raise UserError if no reward function scored a response, or if a reward is Inf.

    Args:
        rewards: FP32 [responses of all processes, functions]. NaN where a function did not score the response.
        names: the functions' names. `prompts`: those of this process, one for each of its responses.
    """
    unscored = rewards.isnan().all(1) | rewards.isinf().any(1)
    if not unscored.any():
        return
    first = (
        f", prompt {shortened(prompts[int(unscored.int().argmax())])}"
        if len(rewards) == len(prompts)
        else ""
    )
    raise UserError(
        f"{int(unscored.sum())} of {len(rewards)} responses have no reward",
        where=f"step {step}{first}",
        why=f"the reward functions ({', '.join(names)}) returned None, or a reward model returned NaN or Inf; TRL "
        "would give these responses the advantage 0",
        fix="return a number for every response from at least one reward function",
    )
