"""A minimal config, and what the config reader says of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qarl.config import ConfigError, Problem, load_config

MINIMAL = """\
name: minimal
model:
  path: models/tiny
data:
  train_files: train.parquet
  val_files: [test.parquet]
  train_batch_size: 8
  max_prompt_length: 16
  max_response_length: 32
rollout:
  n: 4
actor:
  ppo_mini_batch_size: 4
  ppo_micro_batch_size_per_gpu: 16
  log_prob_micro_batch_size_per_gpu: 32
trainer:
  total_training_steps: 5
"""


def problems_of(*argv: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv))
    for problem in caught.value.problems:
        assert problem.reason
        assert problem.fix
    return caught.value.problems


def problem_of(*argv: str) -> Problem:
    problems = problems_of(*argv)
    assert len(problems) == 1, "\n\n".join(map(str, problems))
    return problems[0]


def override_problem(*overrides: str) -> Problem:
    return problem_of("config=minimal.yaml", *overrides)


def file_problem(text: str) -> Problem:
    Path("broken.yaml").write_text(text)
    return problem_of("config=broken.yaml")
