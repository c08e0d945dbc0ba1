"""Keys of verl, TRL and OpenRLHF, answered with QaRL's key, or with nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_problems import MINIMAL, override_problem, problems_of

from qarl.config import describe_keys
from qarl.config.other_names import FLAT, VERL, counterpart
from qarl.config.schema import sections

ROWS = [line.split(" | ") for line in (VERL + FLAT).strip().splitlines() if line]


def test_each_row_names_a_key_that_exists_and_says_a_sentence() -> None:
    known = describe_keys()
    theirs = [key for key, _, _ in ROWS]
    assert len(theirs) == len(set(theirs)) >= 40
    for key, ours, sentence in ROWS:
        assert ours in known, key
        assert ours not in sections(), key
        assert key not in known, f"{key} is QaRL's own"
        assert sentence.endswith("."), key
        assert len(sentence.split()) >= 3, key


def test_their_keys_are_answered_with_ours(folder: Path) -> None:
    """All at once, as in a file that was written for another library."""
    told = {
        problem.key: problem.fix
        for problem in problems_of("config=minimal.yaml", *(f"{key}=1" for key, _, _ in ROWS))
    }
    assert told == {key: f"did you mean {ours}? {sentence}" for key, ours, sentence in ROWS}


@pytest.mark.parametrize("name", ["actor.optim.lr", "rollout.val_kwargs.n", "model.lora_rank"])
def test_verls_whole_name_is_found(folder: Path, name: str) -> None:
    problem = override_problem(f"actor_rollout_ref.{name}=1")
    ours = counterpart(name)
    assert ours is not None
    assert problem.key == f"actor_rollout_ref.{name}"
    assert problem.source == "command line"
    assert f"did you mean {ours.key}?" in problem.fix


def test_each_key_of_an_unknown_section_is_a_problem_with_its_line(folder: Path) -> None:
    Path("verls.yaml").write_text(
        MINIMAL + "actor_rollout_ref:\n  actor:\n    optim: {lr: 1}\n  model: {lora_rank: 8}\n"
    )
    problems = problems_of("config=verls.yaml")
    assert [problem.key for problem in problems] == [
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.model.lora_rank",
    ]
    assert [problem.source for problem in problems] == ["verls.yaml:20", "verls.yaml:21"]


@pytest.mark.parametrize(
    "key",
    [
        "data.image_key",
        "trainer.balance_batch",
        "actor.entropy_coeff",
        "critic.ppo_epoch_count",
        "zero_stage",
    ],
)
def test_a_key_like_no_other_has_no_guess(folder: Path, key: str) -> None:
    problem = override_problem(f"{key}=1")
    assert "did you mean" not in problem.fix
    assert problem.fix.startswith("remove it")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("data.truncation", "reward.function"),
        ("trainer.total_epochs", "actor.ppo_epochs"),
        ("rollout.val_kwargs.n", "quant.align"),
        ("actor_rollout_ref.actor.optim.lr", "rollout_correction.rollout_rs"),
    ],
)
def test_a_key_of_another_meaning_is_no_guess(folder: Path, key: str, wrong: str) -> None:
    assert wrong not in override_problem(f"{key}=1").fix
