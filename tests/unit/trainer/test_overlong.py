"""DAPO's remedies for long responses, by hand and beside verl's reward manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.config import ConfigError, load_config
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import make_batch
from qarl.trainer.group_filter import Scored
from qarl.trainer.local import LocalTrainer
from qarl.trainer.overlong import mask_truncated, overlong_penalties, penalty_metrics
from qarl.turns.conversation import Conversation, Span


def test_the_punishment_falls_over_the_buffer() -> None:
    penalties = overlong_penalties([0, 15, 16, 17, 20], limit=20, buffer=4, factor=0.5)
    assert penalties.tolist() == [0.0, 0.0, 0.0, -0.125, -0.5]
    assert penalty_metrics(penalties) == {
        "overlong/penalty_mean": pytest.approx(-0.125),
        "overlong/penalty_frac": pytest.approx(0.4),
    }


@pytest.mark.verl
def test_the_punishment_is_that_of_verls_manager() -> None:
    """verl's legacy manager computes it in its loop: here with its own words, one response at a time."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.workers.reward_manager.dapo import DAPORewardManager

    limit = 20
    buffer = {"enable": True, "len": 6, "penalty_factor": 0.7, "log": False}
    lengths = [1, 14, 15, 19, 20]
    responses = torch.arange(limit).expand(len(lengths), limit)
    mask = torch.cat(
        [
            torch.ones(len(lengths), 1, dtype=torch.int64),
            (responses < torch.tensor(lengths)[:, None]).long(),
        ],
        1,
    )

    class Tokenizer:
        eos_token = "<eos>"

        def decode(self, ids: torch.Tensor, **_: object) -> str:
            return str(len(ids))

    import numpy as np

    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(len(lengths), 1, dtype=torch.int64),
            "responses": responses.clone(),
            "attention_mask": mask,
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": "x"}] * len(lengths), dtype=object),
            "data_source": np.array(["x"] * len(lengths), dtype=object),
        },
    )
    manager = DAPORewardManager(
        Tokenizer(),
        num_examine=0,
        compute_score=lambda **_: 1.0,
        max_resp_len=limit,
        overlong_buffer_cfg=OmegaConf.create(buffer),
    )
    theirs = manager(data).sum(1)
    ours = 1.0 + overlong_penalties(lengths, limit=limit, buffer=6, factor=0.7)
    assert theirs.tolist() == pytest.approx(ours.tolist(), abs=1e-6)


def test_the_tokens_of_an_environment_count_for_the_punishment() -> None:
    """The limit is one of the whole conversation. Two of 18 tokens are two beyond the start of the buffer, however many
    of these the model sampled; 12 are not."""
    keys = ("data.max_response_length=20", "reward.overlong_buffer_len=4")
    settings = load_config(["config=quickstart.yaml", *keys, "reward.overlong_penalty_factor=0.5"])
    shapes = ([Span(0, 2), Span(16, 18)], [Span(0, 18)], [Span(0, 1), Span(11, 12)])
    conversations = [
        Conversation([5], response_token_ids=[7] * turns[-1].end, turns=turns) for turns in shapes
    ]
    tokens = [conversation.response_token_ids for conversation in conversations]
    rollout = RolloutBatch(
        [[5]] * 3, tokens, [[-1.0] * len(row) for row in tokens], ["stop"] * 3, 0,
        conversations=conversations,
    )  # fmt: skip
    trainer: Any = SimpleNamespace(config=settings)
    rewards, metrics = LocalTrainer.shaped(trainer, Scored([], rollout, torch.ones(3)))
    assert rewards.tolist() == [0.75, 0.75, 1.0]
    assert metrics["overlong/penalty_frac"] == pytest.approx(2 / 3)


def test_truncated_responses_leave_the_loss_and_stay_in_their_group() -> None:
    reasons = ["stop", "length", "length", "stop"]
    rollout = RolloutBatch(
        [[5]] * 4, [[7, 8], [7, 8, 9], [6], [9]], [[-1.0] * n for n in (2, 3, 1, 1)], reasons, 0
    )
    batch = make_batch(rollout, torch.zeros(4), torch.ones(4), pad_token_id=0)
    assert mask_truncated(batch, rollout) == {"overlong/masked_frac": 0.5}
    assert batch.response_mask.sum(1).tolist() == [2, 0, 0, 1]
    assert batch.host_lengths.sampled == (2, 0, 0, 1)
    assert batch.advantages.tolist() == [1.0] * 4


def test_a_buffer_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most data\.max_response_length = 80"):
        load_config(["config=quickstart.yaml", "reward.overlong_buffer_len=81"])
