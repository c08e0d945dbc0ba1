"""docs/understand/objectives.md: every value of every key has its row."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import yaml
from checkout import ROOT
from objective_cases import run_config

from qarl.config import ConfigError
from qarl.config.actor import (
    REJECTIONS,
    AdvEstimator,
    LossAggMode,
    RolloutCorrectionConfig,
    WeightLevel,
    WeightMode,
)
from qarl.config.objectives import objective_names

PAGE = (ROOT / "docs/understand/objectives.md").read_text(encoding="utf-8")


def named(heading: str) -> set[str]:
    """What the first two cells of the rows under a heading name."""
    section = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    assert section, heading
    cells = [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("|")]
    return {name for row in cells for name in re.findall(r"`(\w[\w-]*)`", " ".join(row))}


@pytest.mark.parametrize(
    ("heading", "values"),
    [
        ("Objectives", objective_names()),
        ("Averages", get_args(LossAggMode)),
        ("Advantages", get_args(AdvEstimator)),
        ("Weights", (*get_args(WeightLevel), *get_args(WeightMode))),
        ("Rejection", (*REJECTIONS, "corr", "ppo")),
    ],
)
def test_every_value_has_its_row(heading: str, values: tuple[str, ...]) -> None:
    assert set(values) <= named(heading)


def test_every_key_of_the_section_is_on_the_page() -> None:
    names = named("Weights") | named("Rejection") | set(re.findall(r"`(bypass_mode)=true`", PAGE))
    assert set(RolloutCorrectionConfig.model_fields) <= names


def test_the_variants_of_the_paper_are_configs_that_run() -> None:
    """The keys of the table, as they stand there."""
    section = PAGE.partition("| variant |")[2].partition("\n## ")[0]
    rows = [
        re.findall(r"`(\w+): ([^`]+)`", line)
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    assert [len(row) for row in rows] == [3, 1, 4, 1]
    whole: dict[str, object] = {}
    for row in rows:
        keys = {key: yaml.safe_load(value) for key, value in row}
        whole = whole | keys if len(row) == 1 else keys
        assert run_config("grpo", whole).rollout_correction.rollout_rs


@pytest.mark.parametrize(
    ("loss", "correction", "estimator"),
    [
        *((loss, {"rollout_is": "token"}, "grpo") for loss in ("tbpo", "mis_gspo")),
        *((loss, {"bypass_mode": True}, "grpo") for loss in ("tbpo", "mis_gspo", "reinforce")),
        *(
            (loss, {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1}, "grpo")
            for loss in ("tbpo", "gspo", "mis_gspo")
        ),
        ("grpo", {"rollout_is": "token", "bypass_mode": True}, "grpo"),
        *(("reinforce", {}, estimator) for estimator in ("rloo", "dr_grpo")),
        *((loss, {}, "dr_grpo") for loss in ("tbpo", "gspo", "mis_gspo", "sapo")),
        ("grpo", {"rollout_rs": "seq_sum_k3"}, "grpo"),
        ("grpo", {"rollout_rs_threshold": 0.1}, "grpo"),
        (
            "grpo",
            {"rollout_rs": ["seq_sum_k3", "token_k2"], "rollout_rs_threshold": [1.0, 1.0, 1.0]},
            "grpo",
        ),
        (
            "grpo",
            {
                "rollout_rs": "seq_sum_k3",
                "rollout_rs_threshold": 1,
                "rollout_rs_threshold_lower": -1.0,
            },
            "grpo",
        ),
        (
            "grpo",
            {
                "rollout_rs": "seq_sum_k1",
                "rollout_rs_threshold": 1,
                "rollout_rs_threshold_lower": 1.0,
            },
            "grpo",
        ),
        ("grpo", {"rollout_is": "token", "rollout_is_threshold_lower": 0.5}, "grpo"),
        ("grpo", {"rollout_is_mode": "mask"}, "grpo"),
        ("grpo", {"rollout_is_batch_normalize": True}, "grpo"),
        ("grpo", {"rollout_is_threshold": 3.0}, "grpo"),
        ("grpo", {"rollout_rs_ratio": "ppo"}, "grpo"),
    ],
)
def test_what_contradicts_itself_is_refused(
    loss: str, correction: dict[str, object], estimator: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(loss, correction, algorithm={"adv_estimator": estimator})
    assert all(problem.reason and problem.fix for problem in caught.value.problems)


VETO, BYPASS, WEIGHT = {"veto_threshold": 1e-4}, {"bypass_mode": True}, {"rollout_is": "token"}
REJECTION = {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 1.0}


OTHERS = "because the old log-probs are the rollout's"


@pytest.mark.parametrize(
    ("correction", "words"),
    [(VETO, "veto_threshold"), (BYPASS, "bypass_mode"), (WEIGHT, OTHERS), (REJECTION, OTHERS)],
)
def test_what_needs_the_trainers_old_log_probs_is_refused_with_the_rollouts(
    correction: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_config("grpo", correction, old_log_probs="rollout")
    assert run_config("grpo", correction, old_log_probs="auto")
    assert run_config("grpo", REJECTION | {"rollout_rs_ratio": "ppo"}, old_log_probs="rollout")
