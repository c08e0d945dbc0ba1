"""Rewards in steps of `QaRLTrainer`: what a function may return, functions by name, and groups of equal rewards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from random_models import save_random_model
from trl_steps import DATA, build, length, nothing

from qarl.errors import UserError
from qarl.trl import trainer
from qarl.trl.advantages import equal_responses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def nan_once(completions: list[str], **_: Any) -> list[float | None]:
    return [None, float("nan"), *[1.0] * (len(completions) - 2)]


def no_list(completions: list[str], **_: Any) -> None:
    """It has forgotten to return."""


def one_number(completions: list[str], **_: Any) -> float:
    return 1.0


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def text(completions: list[str], **_: Any) -> list[str]:
    return ["1.0"] * len(completions)


def a_dict(completions: list[str], **_: Any) -> list[dict[str, float]]:
    return [{"score": 1.0}] * len(completions)


async def too_large(completions: list[str], **_: Any) -> list[float]:
    return [1e39] * len(completions)


def generated(completions: list[str], **_: Any) -> Any:
    return (float(len(completion)) for completion in completions)


async def infinite(completions: list[str], **_: Any) -> list[float]:
    return [float("inf")] * len(completions)


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (nothing, ["4 of 4 responses have no reward", "step 0, prompt 't", "nothing"]),
        ([nothing, nothing], ["4 of 4 responses have no reward", "nothing, nothing"]),
        ([length, nan_once], ["'nan_once' returned nan", "step 0, prompt 't"]),
        (infinite, ["'infinite' returned inf"]),
        (no_list, ["'no_list' returned None for 4 responses", "step 0", "a list"]),
        ([length, one_number], ["'one_number' returned 1.0 for 4 responses"]),
        (too_few, ["'too_few' returned 3 rewards for 4 responses"]),
        (text, ["'text' returned '1.0'", "step 0, prompt 't"]),
        (a_dict, ["'a_dict' returned {'score': 1.0}", "a finite number"]),
        (too_large, ["'too_large' returned 1e+39", "FP32"]),
    ],
    ids=[
        *("None", "two of None", "one NaN", "Inf", "no list", "one number", "too few", "text"),
        *("a dict", "too large"),
    ],
)
def test_a_response_without_a_reward_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        build(model, tmp_path, monkeypatch, rewards).train()
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_a_function_may_leave_responses_to_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = build(model, tmp_path, monkeypatch, [length, nothing, generated])
    assert trained.reward_func_names == ["length", "nothing", "generated"]
    trained.train()
    assert trained.state.global_step == 1


def test_functions_by_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in another process, with the columns of the data; a function beside them stays in this one."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os, torch\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    torch.set_grad_enabled(False)\n"
        "    assert (data_source, ground_truth, extra_info) == ('', '12', {})\n"
        f"    return float(os.getpid() != {os.getpid()})\n"
    )
    data = DATA.add_column("ground_truth", ["12"] * len(DATA))
    trained = build(
        model,
        tmp_path,
        monkeypatch,
        [f"{file}:score", "arithmetic", length],
        data=data,
        reward_workers=1,
    )
    assert trained.reward_func_names == ["score", "arithmetic", "length"]
    trained.train()
    assert torch.is_grad_enabled() and trained.state.log_history[0]["rewards/score/mean"] == 1
    with pytest.raises(UserError, match="no ground truths"):
        build(model, tmp_path, monkeypatch, "arithmetic")
    with pytest.raises(UserError, match="has no function 'scores'"):
        build(model, tmp_path, monkeypatch, f"{file}:scores", data=data)


def constant(completions: list[str], **_: Any) -> list[float]:
    return [0.7] * len(completions)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 2},
        {"loss_type": "dapo", "learning_rate": 1e-2},
        {"loss_type": "grpo", "scale_rewards": "batch", "master_dtype": "bf16"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_equal_rewards_leave_every_weight_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    size = {"per_device_train_batch_size": 8, "num_generations": 8, "learning_rate": 1e-3}
    trained = build(model, tmp_path, monkeypatch, constant, **size | settings)
    before = {name: value.clone() for name, value in trained.policy.model.state_dict().items()}
    trained.train()
    assert trained.state.global_step == settings.get("max_steps", 1)
    after = trained.policy.model.state_dict()
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []
    masters = [state["master"] for state in trained.optimizer.state.values() if "master" in state]
    assert all(torch.equal(master, master.bfloat16().float()) for master in masters)


def test_an_evaluation_has_its_own_groups(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 4}
    trained = build(model, tmp_path, monkeypatch, constant, **sizes)
    groups: list[int] = []
    monkeypatch.setattr(
        trainer, "equal_responses", lambda *rows: groups.append(rows[2]) or equal_responses(*rows)
    )
    trained.evaluate(DATA)
    assert set(groups) == {4}


def test_only_equal_groups_lose_their_advantages() -> None:
    nan = float("nan")
    rewards = torch.tensor([[0.7, nan], [0.7, nan], [0.7, 1.0], [0.1, 1.0], [0.3, 0.4], [0.4, 0.3]])
    ones = torch.ones(2)
    assert equal_responses(rewards, ones, 2, "sum_then_normalize").tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert equal_responses(rewards, ones, 2, "normalize_then_sum").tolist() == [
        True,
        True,
        *[False] * 4,
    ]


def test_weighted_sums_of_rewards_are_compared() -> None:
    """With the weights 1 and 0 only the first rewards count, and with 2 and 1 the sums are 1.0 and 1.1."""
    rewards = torch.tensor([[0.7, 0.1], [0.7, 0.4], [0.3, 0.4], [0.4, 0.3]])
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0])
    how = "sum_then_normalize"
    assert equal_responses(rewards, first, 2, how).tolist() == [True, True, False, False]
    assert equal_responses(rewards, second, 2, how).tolist() == [False] * 4


@pytest.mark.parametrize("process", [0, 1])
def test_each_process_looks_at_its_own_responses(
    monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    """TRL gathers the rewards of all processes, and returns the advantages of this one's responses."""
    rewards = torch.tensor([0.7, 0.7, 0.1, 0.2, 0.3, 0.4, 0.9, 0.9])[:, None]
    built: Any = object.__new__(trainer.QaRLTrainer)
    built.policy = SimpleNamespace(model=SimpleNamespace(training=True))
    built.accelerator = SimpleNamespace(num_processes=2, process_index=process)
    built.state = SimpleNamespace(global_step=3)
    built.num_generations, built.reward_weights = 2, torch.ones(1)
    built.multi_objective_aggregation, built._rewards = "sum_then_normalize", rewards
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])
    monkeypatch.setattr(
        trainer.GRPOTrainer,
        "_generate_and_score_completions",
        lambda *_: {"advantages": advantages},
    )
    output = built._generate_and_score_completions([])
    expected = [[0.0, 0.0, 2.0, -2.0], [1.0, -1.0, 0.0, 0.0]][process]
    assert output["advantages"].tolist() == expected
