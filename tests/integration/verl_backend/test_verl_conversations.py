"""Ten recorded conversations: verl's own loop of tools and QaRL's loops give the same ids, masks, rewards and returns.

A scripted server stands where the engine would be, and everything else is verl's: `ToolAgentLoop`, its parser and its
builder of tokens, its manager of rewards and its advantages. QaRL's side is `qarl_tool_agent`, and `qarl_environment`
with the same tools as an environment, in its worker process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import called_tools
import numpy as np
import pytest
import torch
import transformers
from chat_tokenizers import TOOL_TEMPLATE, save_chat_tokenizer
from checkout import ROOT

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as loops
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto
from verl.tools.function_tool import FunctionTool, _build_schema_from_fn
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from qarl.trainer.advantages import grpo_advantages
from qarl.verl.agent_loop import PlainToolAgentLoop
from qarl.verl.environment_loop import EnvironmentAgentLoop, environment_of

PROMPT = 64
RESPONSE = 400
ASKED = [{"role": "user", "content": "17 * 3?"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SUM = call("product", left=17, right=3)


class Shape(NamedTuple):
    """turns: texts that the server samples, each with the end of a turn. limit: most turns. response: most tokens.
    of_model: turns in the response. cut: whether the last one was cut, or a context left out."""

    turns: list[str]
    of_model: int
    limit: int = 9
    response: int = RESPONSE


SHAPES = {
    "a call cut in the middle": Shape([SUM, SUM], 2, response=180),
    "a call that ends in the middle": Shape([SUM, SUM[:20], "51"], 2),
    "several calls in one turn": Shape([SUM + call("silent") + call("letters"), "51"], 2),
    "a tool that raises": Shape([call("broken"), SUM, "51"], 3),
    "an empty answer": Shape([call("silent"), "51"], 2),
    "an answer of a megabyte": Shape([call("megabyte"), "51"], 2, response=1000),
    "the turn limit": Shape([SUM, SUM, "51"], 2, limit=2),
    "the token limit in an answer": Shape([SUM, call("megabyte"), "51"], 2),
    "no call": Shape(["51"], 1),
    "Unicode": Shape([call("letters"), "\u4f60\u597d \U0001f600 51"], 2),
    "a first turn of one token": Shape([""], 1),
}


class Server:
    """A client of a server that samples scripted turns, as verl's server limits them."""

    def __init__(self, tokenizer: Any, shape: Shape) -> None:
        self.shape = shape
        self.turns = [
            [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for text in shape.turns
        ]
        self.asked: list[list[int]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        ids = self.turns[len(self.asked)]
        self.asked.append(list(prompt_ids))
        whole = PROMPT + self.shape.response
        default = min(self.shape.response, whole - len(prompt_ids))
        ids = ids[: max(1, sampling_params.get("max_tokens", default))]
        log_probs = [-0.5 - 0.25 * place for place in range(len(ids))]
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason="completed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    loaded: Any = transformers.AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = TOOL_TEMPLATE
    return loaded


@pytest.fixture(autouse=True)
def stopped() -> Any:
    yield
    environment_of.cache_clear()


def settings(shape: Shape, stops: Mapping[str, Any]) -> Any:
    path = Path(called_tools.__file__).relative_to(ROOT)
    turns = {
        "max_user_turns": None,
        "max_assistant_turns": shape.limit,
        "max_parallel_calls": called_tools.PARALLEL,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
        "environment": f"{ROOT / path}:answer",
        "max_turn_length": None,
        "timeout_s": 60.0,
        "workers": 1,
        "folder": None,
    }
    rollout = {
        "multi_turn": turns,
        "prompt_length": PROMPT,
        "response_length": shape.response,
        "full_determinism": False,
        "custom": dict(stops),
    }
    model = {"path": "none"}
    reward = {
        "custom_reward_function": {"path": "own.py", "name": "reward"},
        "reward_manager": {"name": "naive"},
    }
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout, "model": model},
            "data": {},
            "reward": reward,
        }
    )


def held(
    kind: type,
    tokenizer: Any,
    shape: Shape,
    *,
    stops: Mapping[str, Any] | None = None,
) -> tuple[Any, Server]:
    """The output of a loop, and the server that it asked. `stops`: what else ends a response (`rollout.stop`)."""
    server = Server(tokenizer, shape)
    config = settings(shape, stops or {})
    tools = [
        FunctionTool(name, function, _build_schema_from_fn(function, name))
        for name, function in called_tools.TOOLS.items()
    ]

    async def run() -> Any:
        loop = kind(
            trainer_config=loops.DictConfigWrap(config=config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=loops.DictConfigWrap(config.data),
            hf_model_type="qwen3",
            tools=loops.ToolListWrap(tools),
        )
        row = {"data_source": "sums", "reward_model": {"ground_truth": "51"}, "extra_info": {}}
        return await loop.run({"logprobs": True}, raw_prompt=ASKED, **row)

    return asyncio.run(run()), server


def rewarded(tokenizer: Any, output: Any) -> float:
    """What verl's manager of rewards gives a conversation."""
    batch = {
        "responses": torch.tensor([output.response_ids]),
        "attention_mask": torch.ones(
            1, len(output.prompt_ids) + len(output.response_ids), dtype=torch.int64
        ),
    }
    named = {
        "data_source": np.array(["sums"], dtype=object),
        "reward_model": np.array([{"ground_truth": "51"}], dtype=object),
        "extra_info": np.array([{}], dtype=object),
        "tool_extra_fields": np.array([output.extra_fields], dtype=object),
        "__num_turns__": np.array([output.num_turns]),
    }

    async def run() -> Any:
        manager = NaiveRewardManager(OmegaConf.create({}), tokenizer, called_tools.length_reward)
        return await manager.run_single(DataProto.from_dict(batch, named))

    return float(asyncio.run(run())["reward_score"])


def returns(outputs: list[Any], rewards: list[float]) -> torch.Tensor:
    """What verl's GRPO gives each token of a group."""
    width = max(len(output.response_ids) for output in outputs)
    mask = torch.zeros(len(outputs), width)
    scores = torch.zeros(len(outputs), width)
    for row, (output, reward) in enumerate(zip(outputs, rewards, strict=True)):
        mask[row, : len(output.response_mask)] = torch.tensor(output.response_mask).float()
        scores[row, len(output.response_mask) - 1] = reward
    group = np.array(["prompt"] * len(outputs), dtype=object)
    return compute_grpo_outcome_advantage(scores, mask, group)[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", [PlainToolAgentLoop, EnvironmentAgentLoop])
def test_the_same_conversation(tokenizer: Any, name: str, kind: type) -> None:
    shape = SHAPES[name]
    theirs, their_server = held(ToolAgentLoop, tokenizer, shape)
    ours, server = held(kind, tokenizer, shape)
    assert ours.prompt_ids == theirs.prompt_ids
    assert ours.response_ids == theirs.response_ids
    assert ours.response_mask == theirs.response_mask
    assert ours.response_logprobs == theirs.response_logprobs
    assert server.asked == their_server.asked
    assert len(server.asked) == shape.of_model
    assert rewarded(tokenizer, ours) == pytest.approx(rewarded(tokenizer, theirs), abs=0)
    sampled = [token for turn in server.turns[: shape.of_model] for token in turn]
    marked = zip(ours.response_ids, ours.response_mask, strict=True)
    trained = [token for token, mask in marked if mask]
    assert trained == sampled[: len(trained)]
    assert ours.response_mask[-1] == 1 and len(ours.response_ids) <= shape.response
    assert name != "a call cut in the middle" or len(trained) < len(sampled)


@pytest.mark.parametrize(("missing", "reason"), [(0, "stop"), (1, "length")])
def test_a_turn_that_ends_at_the_limit_was_not_cut(
    tokenizer: Any, missing: int, reason: str
) -> None:
    """The answer with the end of its turn has the limit's tokens, or one more."""
    whole = [*tokenizer("51", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    shape = Shape(["51"], 1, response=len(whole) - missing)
    output, _ = held(EnvironmentAgentLoop, tokenizer, shape)
    assert output.response_ids == whole[: shape.response]
    assert output.extra_fields["finish_reason"] == reason


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids", None])
def test_a_turn_that_the_runs_own_stop_ends_at_the_limit_was_not_cut(
    tokenizer: Any, kind: str | None
) -> None:
    """Its last token is no end of the model's, and there is no room for another. vLLM says "stop" if it is an end."""
    *_, last = ids = tokenizer("51", add_special_tokens=False)["input_ids"]
    stops = {"stop": [tokenizer.decode([last])], "stop_token_ids": [last]}
    given = {} if kind is None else {kind: stops[kind]}
    shape = Shape(["51"], 1, response=len(ids))
    output, _ = held(EnvironmentAgentLoop, tokenizer, shape, stops=given)
    assert output.response_ids == ids
    assert output.extra_fields["finish_reason"] == ("length" if kind is None else "stop")


def test_the_same_rewards_and_returns_of_a_group(tokenizer: Any) -> None:
    """All shapes as the responses to one prompt. Every token of the model has its response's advantage, no other."""
    groups = []
    for kind in (ToolAgentLoop, EnvironmentAgentLoop):
        outputs = [held(kind, tokenizer, shape)[0] for shape in SHAPES.values()]
        rewards = [rewarded(tokenizer, output) for output in outputs]
        groups.append((rewards, returns(outputs, rewards), outputs))
    (rewards, theirs, _), (own, ours, outputs) = groups
    assert own == rewards and len(set(rewards)) > 5
    assert torch.equal(ours, theirs)
    local = grpo_advantages(torch.tensor(rewards), ["prompt"] * len(rewards))
    for row, output in enumerate(outputs):
        mask = torch.tensor(output.response_mask).bool()
        got = ours[row, : len(mask)]
        assert torch.allclose(got[mask], local[row].expand(int(mask.sum())), atol=1e-5)
        assert not got[~mask].any()
