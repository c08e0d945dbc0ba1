"""Rows of `qarl data reasoning_gym` have the same score in TRL, in verl and locally. A stand-in for the library."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from qarl.data.rows import read_rows
from qarl.data.scoring import find_reward, score_rows
from qarl.sources.__main__ import main
from qarl.trl.rewards import named_reward
from qarl.verl import reward as verl_reward

pytestmark = pytest.mark.usefixtures("fake_gym")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.chdir(tmp_path)
    assert main(["reasoning_gym", "task=sums", "size=4", "validation=0", "scale=0.5"]) == 0
    return list(read_rows("data/sums/train.parquet"))


def responses(rows: list[Any]) -> list[str]:
    """A right answer, one in tags, a wrong one, and none."""
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return [truths[0], f"It is <answer>{truths[1]}</answer>", f"{truths[2]}0", ""]


SCORES = [0.5, 0.5, 0.0, 0.0]


def arguments(rows: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "data_source": row["data_source"],
            "solution_str": response,
            "ground_truth": row["reward_model"]["ground_truth"],
            "extra_info": row["extra_info"],
        }
        for row, response in zip(rows, responses(rows), strict=True)
    ]


def test_in_the_local_backend(rows: list[Any]) -> None:
    reward = find_reward("reasoning_gym", 2)
    try:
        assert score_rows(reward, arguments(rows), [""] * 4, timeout_s=60) == SCORES
    finally:
        reward.stop()


def test_in_trl(rows: list[Any]) -> None:
    """TRL hands over the file's columns, and completions of chat data as messages."""
    reward = named_reward("reasoning_gym", workers=1, timeout_s=60)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    completions = [[{"role": "assistant", "content": text}] for text in responses(rows)]
    assert reward(prompts, completions, **columns) == SCORES


def test_in_verl(rows: list[Any], tmp_path: Path) -> None:
    """verl adds keys of its own to extra_info."""
    how = {"function": "reasoning_gym", "timeout_s": 60.0, "workers": 1, "folder": str(tmp_path)}

    async def scores() -> list[Any]:
        return [
            await verl_reward.score(
                **how, **call | {"extra_info": call["extra_info"] | {"num_turns": 2}}
            )
            for call in arguments(rows)
        ]

    try:
        assert asyncio.run(scores()) == SCORES
    finally:
        verl_reward.find("reasoning_gym", 1, str(tmp_path)).stop()
        verl_reward.find.cache_clear()
