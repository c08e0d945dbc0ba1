"""Configs from which nothing can be learned: one token to sample from, and a warm-up that never ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_problems import MINIMAL, override_problem

from qarl.config import load_config
from qarl.config.hints import unread_paper_keys


@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize(
    "override",
    [
        "rollout.top_k=1",
        "rollout.top_p=1e-4",
        "rollout.temperature=0.01",
        "rollout.temperature=0.04",
    ],
)
def test_sampling_that_leaves_one_token(folder: Path, override: str, backend: str) -> None:
    problem = override_problem(override, f"backend={backend}")
    assert problem.key == override.partition("=")[0]
    assert "all responses to a prompt would be the same" in problem.reason


@pytest.mark.parametrize(
    "override", ["rollout.top_k=2", "rollout.top_p=0.01", "rollout.temperature=0.05"]
)
def test_sampling_that_leaves_a_choice(folder: Path, override: str) -> None:
    assert load_config(["config=minimal.yaml", override])


@pytest.mark.parametrize(("warmup", "steps"), [(1000, 120), (5, 5), (1, 1)])
def test_a_warmup_that_never_ends(folder: Path, warmup: int, steps: int) -> None:
    key = "optim.lr_warmup_steps"
    problem = override_problem(f"{key}={warmup}", f"trainer.total_training_steps={steps}")
    assert problem.key == key
    assert f"the run has {steps} steps" in problem.reason


def test_a_warmup_that_ends_in_the_last_step(folder: Path) -> None:
    assert (
        load_config(["config=minimal.yaml", "optim.lr_warmup_steps=4"]).optim.lr_warmup_steps == 4
    )


def test_a_files_warmup_is_dropped_if_the_command_line_shortens_the_run(folder: Path) -> None:
    Path("long.yaml").write_text(MINIMAL + "optim: {lr_warmup_steps: 4}\n")
    short = load_config(["config=long.yaml", "trainer.total_training_steps=2"])
    assert short.optim.lr_warmup_steps == 0
    assert (
        load_config(["config=long.yaml", "trainer.total_training_steps=9"]).optim.lr_warmup_steps
        == 4
    )


def test_a_key_of_the_paper_that_has_no_effect_gets_a_note(folder: Path) -> None:
    key = "actor.seq_clip_ratio_low=3e-4"  # its default
    (sentence,) = unread_paper_keys(load_config(["config=minimal.yaml", key]))
    assert "actor.seq_clip_ratio_low has no effect with actor.positive_band=upper" in sentence
    assert (
        unread_paper_keys(
            load_config(["config=minimal.yaml", key, "actor.positive_band=two_sided"])
        )
        == []
    )
    assert unread_paper_keys(load_config(["config=minimal.yaml"])) == []
