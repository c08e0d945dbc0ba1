"""Refusals of the config reader and their words: names, values, pairs of keys, YAML."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from config_problems import MINIMAL, file_problem, override_problem, problem_of, problems_of

from qarl.config import describe_keys, load_config
from qarl.config.source import available_configs
from qarl.errors import UserError


def test_unknown_config_name(folder: Path) -> None:
    problem = problem_of("config=quickstrat.yaml")
    assert (problem.key, problem.value) == ("config", "quickstrat.yaml")
    assert "configs/quickstrat.yaml" in problem.reason
    assert "did you mean config=quickstart.yaml?" in problem.fix
    assert "available: " in problem.fix


def test_config_is_required(folder: Path) -> None:
    problem = problem_of("seed=1")
    assert problem.key == "config"
    assert all(name in problem.fix for name in ["quickstart.yaml", *available_configs()])


def test_overrides_are_checked_although_the_file_is_missing(folder: Path) -> None:
    problems = problems_of("config=absent.yaml", "quant.shceme=bf16", "rollout.n=1")
    assert [problem.key for problem in problems] == ["config", "rollout.n", "quant.shceme"]


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("dry_run", "key=value"),
        ("--dry_run=true", "without leading dashes"),
        ("other.yaml", "config=other.yaml"),
        ("=3", "key=value"),
        ("quant.=3", "key=value"),
    ],
)
def test_malformed_override(folder: Path, argument: str, fix: str) -> None:
    problem = override_problem(argument)
    assert problem.key == argument
    assert fix in problem.fix
    assert problem.source == "command line"


def test_duplicate_override(folder: Path) -> None:
    problem = override_problem("seed=1", "seed=2")
    assert (problem.key, problem.value) == ("seed", "2")
    assert "1, then 2" in problem.reason


@pytest.mark.parametrize(("override", "scalar"), [("name.first=x", "name"), ("trainer.logger.0=x", "trainer.logger")])
def test_override_through_a_scalar(folder: Path, override: str, scalar: str) -> None:
    assert f"{scalar} is a single value" in override_problem(override).reason


def test_override_with_a_mapping(folder: Path) -> None:
    assert "optim.NAME=VALUE" in override_problem("optim={lr: 1}").fix


def test_yaml_syntax_error_names_the_line(folder: Path) -> None:
    problem = file_problem("name: x\nmodel: [a\ndata: 3\n")
    assert problem.key == "broken.yaml:3"
    assert "not valid YAML" in problem.reason


@pytest.mark.parametrize(
    ("text", "reason"), [("- a\n", "not a mapping"), ("just text\n", "not a mapping"), ("", "empty")]
)
def test_top_level_must_be_a_mapping(folder: Path, text: str, reason: str) -> None:
    problem = file_problem(text)
    assert "broken.yaml" in problem.key
    assert reason in problem.reason


def test_duplicate_keys_in_the_file(folder: Path) -> None:
    problem = file_problem(MINIMAL.replace("  n: 4\n", "  n: 4\n  n: 8\n"))
    assert (problem.key, problem.value, problem.source) == ("rollout.n", 8, "broken.yaml:12")
    assert "broken.yaml:11" in problem.reason
    assert file_problem(MINIMAL + "rollout:\n  n: 2\n").key == "rollout"


@pytest.mark.parametrize("line", ["seed: !!python/object/apply:os.getcwd []", "? [a]\n: 1", "seed: 1\n---\nseed: 2"])
def test_yaml_beyond_plain_data_is_refused(folder: Path, line: str) -> None:
    assert "broken.yaml:" in file_problem(MINIMAL + line).key


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("quant.shceme=bf16", "quant.scheme"),
        ("scheme=bf16", "quant.scheme"),
        ("traner.test_freq=1", "trainer"),
        ("trainer.max_num_seq=4", "rollout.max_num_seqs"),
        ("actor.lr=1", "optim.lr"),
    ],
)
def test_unknown_key_names_the_nearest(folder: Path, override: str, guess: str) -> None:
    problem = override_problem(override)
    assert problem.reason == "unknown key"
    assert f"did you mean {guess}?" in problem.fix


def test_missing_keys_are_named_one_by_one(folder: Path) -> None:
    Path("short.yaml").write_text("name: x\ndata:\n  train_files: []\n")
    keys = [problem.key for problem in problems_of("config=short.yaml")]
    assert {"model.path", "rollout.n", "data.train_files", "trainer.total_training_steps"} < set(keys)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("name=2024", "must be a valid string"),
        ("name=a/b", "pattern"),
        ("seed=-1", "greater than or equal to 0"),
        ("seed=1.0", "valid integer"),
        ("dry_run=yes", "valid boolean"),
        ("model=5", "section"),
        ("model.path=''", "at least 1 character"),
        ("data.train_files=[]", "at least 1 item"),
        ("reward.function=arithmetics", "neither a built-in reward"),
        ("rollout.n=1", "greater than or equal to 2"),
        ("rollout.top_p=.nan", "finite"),
        ("quant.scheme=nvfp4", "must be 'bf16', 'w4a16', 'w8a8', 'fp8' or 'w4a8'"),
        ("quant.ignore=[lm_head, 're:(']", "not a regular expression"),
        ("actor.neg_seq_clip_ratio_low=1.1", "less than or equal to 1"),
        ("optim.muon_momentum=1", "less than 1"),
        ("rollout_correction.rollout_rs=seq_max_k1", "token_k1"),
        ("actor.grad_clip='1.0'", "must be a valid number"),
        ("optim.betas=[0.9]", "too few"),
        ("optim.betas=[0.9, 0.9, 0.9]", "at most 2 items"),
        ("trainer.test_freq=0", "not a number of steps"),
        ("trainer.logger=[console, wanb]", "must be 'console', 'tensorboard' or 'wandb'"),
    ],
)
def test_bad_value(folder: Path, override: str, reason: str) -> None:
    problem = override_problem(override)
    assert problem.key.startswith(override.partition("=")[0])
    assert reason in problem.reason
    assert problem.source == "command line"
    assert problem.about == describe_keys()[override.partition("=")[0]]


TOKENS = "actor.ppo_max_token_len_per_gpu"
BY_TOKENS = [
    "actor.use_dynamic_bsz=true",
    "actor.ppo_micro_batch_size_per_gpu=null",
    "actor.log_prob_micro_batch_size_per_gpu=null",
    f"{TOKENS}=9999",
]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["data.train_batch_size=10"], "actor.ppo_mini_batch_size", ["10 prompts", "1, 2, 5, 10"]),
        (
            ["actor.ppo_micro_batch_size_per_gpu=5"],
            "actor.ppo_micro_batch_size_per_gpu",
            ["4 * 4 = 16", "1, 2, 4, 8, 16"],
        ),
        (
            ["actor.ppo_micro_batch_size_per_gpu=null"],
            "actor.ppo_micro_batch_size_per_gpu",
            ["use_dynamic_bsz=false requires", "or set actor.use_dynamic_bsz=true and actor.ppo_max_token_len_per_gpu"],
        ),
        (
            ["actor.log_prob_micro_batch_size_per_gpu=null"],
            "actor.log_prob_micro_batch_size_per_gpu",
            ["requires a size of micro-batches", "actor.log_prob_max_token_len_per_gpu"],
        ),
        (
            ["actor.ppo_max_token_len_per_gpu=9999"],
            "actor.ppo_max_token_len_per_gpu",
            ["no effect", "set actor.use_dynamic_bsz to true"],
        ),
        (
            ["actor.log_prob_max_token_len_per_gpu=9999"],
            "actor.log_prob_max_token_len_per_gpu",
            ["no effect", "actor.use_dynamic_bsz = false"],
        ),
        ([*BY_TOKENS[:3], TOKENS + "=null"], TOKENS, ["fills micro-batches", "or set actor.use_dynamic_bsz=false"]),
        ([*BY_TOKENS[:3], TOKENS + "=9"], TOKENS, ["data.max_prompt_length + data.max_response_length", "never split"]),
        (
            [*BY_TOKENS, "actor.log_prob_max_token_len_per_gpu=9"],
            "actor.log_prob_max_token_len_per_gpu",
            ["data.max_prompt_length + data.max_response_length", "or more"],
        ),
        (
            [BY_TOKENS[0], *BY_TOKENS[2:], "actor.ppo_micro_batch_size_per_gpu=16"],
            "actor.ppo_micro_batch_size_per_gpu",
            ["no effect", "actor.use_dynamic_bsz = true"],
        ),
        (
            [*BY_TOKENS[:2], BY_TOKENS[3], "actor.log_prob_micro_batch_size_per_gpu=16"],
            "actor.log_prob_micro_batch_size_per_gpu",
            ["no effect", "actor.use_dynamic_bsz = true"],
        ),
        (["quant.group_size=12"], "quant.group_size", ["w4a16 packs eight int4 values", "multiple of 8"]),
        (["quant.scheme=bf16", "quant.kernels=qarl"], "quant.kernels", ["no quantized layers", "set it to engine"]),
        (["quant.scheme=bf16", "quant.kernels=dequantized"], "quant.kernels", ["no quantized layers"]),
        (["quant.kernels=qarl", "backend=verl"], "quant.kernels", ["only to the engine of backend=local"]),
        (["quant.kernels=dequantized", "backend=verl"], "quant.kernels", ["backend=local", "set it to engine"]),
        *(
            ([f"quant.scheme={scheme}", "quant.kernels=dequantized"], "quant.kernels", ["8 bits", f"set it to {fix}"])
            for scheme, fix in (("w4a8", "qarl"), ("w8a8", "engine"), ("fp8", "engine"))
        ),
        (["quant.scheme=w4a8", "quant.group_size=12"], "quant.group_size", ["w4a8 packs eight int4", "multiple of 8"]),
        (["quant.ignore=[]"], "quant.ignore", ["wrong results", "add lm_head"]),
        (["quant.ignore=[re:head]"], "quant.ignore", ["wrong results"]),
        (["data.val_files=[]"], "data.val_files", ["an evaluation is due", "trainer.test_freq=-1"]),
        (
            ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=5"],
            "data.val_files",
            ["an evaluation is due"],
        ),
        (["trainer.resume_mode=resume_path"], "trainer.resume_mode", ["no checkpoint to resume", "resume_from_path="]),
        (
            ["trainer.resume_from_path=a"],
            "trainer.resume_from_path",
            ["no effect", "resume_mode to resume_path"],
        ),
        (["trainer.n_gpus_per_node=2"], "trainer.n_gpus_per_node", ["one process", "backend=verl"]),
        (["rollout.tensor_model_parallel_size=2"], "rollout.tensor_model_parallel_size", ["one process"]),
        (["rollout.max_num_batched_tokens=8"], "rollout.max_num_batched_tokens", ["max_num_seqs = 256"]),
        (["rollout.val_temperature=0.6"], "rollout.val_temperature", ["no effect with backend", "set backend to verl"]),
        (
            ["rollout.val_temperature=0.005", "backend=verl"],
            "rollout.val_temperature",
            ["vLLM samples at 0.01"],
        ),
        (["rollout.temperature=0.005"], "rollout.temperature", ["vLLM samples at 0.01", "0.01 or more"]),
        (["rollout.top_p=0.9", "backend=verl"], "rollout.top_p", ["whole vocabulary", "backend=local", "to 1"]),
        (["rollout.top_k=5", "backend=verl"], "rollout.top_k", ["whole vocabulary", "backend=local", "to -1"]),
        (["rollout.top_p=0.9", "actor.old_log_probs=auto"], "actor.old_log_probs", ["rollout.top_p", "to recompute"]),
        (["rollout.top_k=5", "actor.old_log_probs=auto"], "actor.old_log_probs", ["rollout.top_k", "to recompute"]),
        (["actor.old_log_probs=rollout"], "actor.old_log_probs", ["actor.loss=tbpo", "always be 1", "to auto"]),
        (["rollout.top_p=0.9", "quant.align=off"], "rollout.top_p", ["quant.align=off", "quant.align=model"]),
        (["rollout.top_k=5", "quant.align=linears"], "rollout.top_k", ["quant.align=linears", "quant.align=model"]),
        (["actor.loss=grpo", "actor.band_scaling=length"], "actor.band_scaling", ["no effect", 'actor.loss = "grpo"']),
        (["actor.kl_loss_coef=0.1"], "actor.kl_loss_coef", ["no effect", "set actor.use_kl_loss to true"]),
    ],
)
def test_keys_that_do_not_fit(folder: Path, overrides: list[str], key: str, words: list[str]) -> None:
    problem = override_problem(*overrides)
    assert problem.key == key
    assert all(word in f"{problem.reason} {problem.fix}" for word in words), str(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant.scheme=bf16", "quant.align=linears"],
        ["quant.scheme=bf16", "quant.group_size=12", "quant.ignore=[]"],
        ["quant.scheme=w8a8", "quant.group_size=12"],
        ["quant.scheme=fp8", "quant.align=exact"],
        ["quant.scheme=w4a8", "quant.align=off"],
        ["quant.scheme=w4a8", "quant.kernels=qarl"],
        ["quant.scheme=fp8", "quant.kernels=qarl", "quant.align=linears"],
        ["quant.kernels=dequantized"],
        ["quant.ignore=['re:.*lm_head']"],
        ["quant.ignore=lm_head"],
        ["data.val_files=[]", "trainer.val_before_train=false"],
        ["rollout.top_p=0.9"],
        ["rollout.top_p=0.9", "rollout.top_k=20", "quant.align=exact"],
        ["rollout.top_k=0", "rollout.top_p=1", "quant.align=off"],
        ["backend=verl"],
        ["trainer.logger=[wandb]"],
        ["optim.lr=0"],
    ],
)
def test_keys_that_fit(folder: Path, overrides: list[str]) -> None:
    load_config(["config=minimal.yaml", *overrides])


def test_everything_wrong_is_said_at_once(folder: Path) -> None:
    argv = ["config=minimal.yaml", "oops", "seed=x", "quant.shceme=1", "quant.ignore=other", "data.train_batch_size=7"]
    keys = [problem.key for problem in problems_of(*argv)]
    assert keys == ["oops", "seed", "quant.shceme", "actor.ppo_mini_batch_size", "quant.ignore"]


def test_error_text(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(["config=minimal.yaml", "rollout.n=1", "data.train_batch_size=7"])
    assert str(caught.value) == textwrap.dedent(f"""\
        2 problems in the configuration

        rollout.n = 1  (command line)
          reason: must be greater than or equal to 2
          about: {describe_keys()["rollout.n"]}
          fix: correct the value; `qarl train --help rollout.n` describes the key

        actor.ppo_mini_batch_size = 4  (minimal.yaml:13)
          reason: data.train_batch_size = 7 prompts per step do not split into whole mini-batches of 4 prompts
          fix: choose a divisor of 7 (1, 7), or make data.train_batch_size a multiple of 4""")
