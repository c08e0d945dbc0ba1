"""Refusals of the config reader and their words: names, values, pairs of keys, YAML."""

from __future__ import annotations

import codecs
import textwrap
from pathlib import Path

import pytest
import yaml
from config_problems import MINIMAL, file_problem, override_problem, problem_of, problems_of

from qarl.config import describe_keys, load_config, write_resolved
from qarl.config.read_config import available_configs
from qarl.config.schema import sections
from qarl.errors import UserError


def test_a_config_is_required(folder: Path) -> None:
    problem = problem_of("config=quickstrat.yaml", "rollout.n=1")
    assert (problem.key, problem.value) == ("config", "quickstrat.yaml")
    assert "configs/quickstrat.yaml" in problem.reason
    for error in (problem, problem_of("seed=1")):
        assert error.key == "config" and all(name in error.fix for name in available_configs())


MALFORMED = {
    "dry_run": "write dry_run=VALUE",
    "rollout.n:4": "write rollout.n=4",
    "other.yaml": "write config=other.yaml",
    "runs/nowhere": "give the folder of a run",
    "--dry_run=true": "write key=value, for example config=quickstart.yaml",
    "=3": "write key=value, for example config=quickstart.yaml",
    "quant.=3": "write key=value, for example config=quickstart.yaml",
}


@pytest.mark.parametrize("argument", MALFORMED)
def test_malformed_override(folder: Path, argument: str) -> None:
    """Also without a config, and with a value that does not fit: what follows from it is not said."""
    for others in (["config=minimal.yaml", "rollout.n=1"], []):
        problem = problem_of(*others, argument)
        assert (problem.key, problem.source) == (argument, "command line")
        assert MALFORMED[argument] in problem.fix


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("", "the key has no value", "write config=NAME.yaml"),
        ("runs", "it is a folder", "give a YAML file"),
        ("run", "it is a folder", "write config=run/config.yaml"),
        ("quickstart", "no such file", "did you mean quickstart.yaml?"),
        ("quickstrat.yaml", "no such file", "did you mean quickstart.yaml?"),
    ],
)
def test_a_config_that_is_no_file(folder: Path, name: str, reason: str, fix: str) -> None:
    Path("runs").mkdir()
    write_resolved(load_config(["config=minimal.yaml"]), "run/config.yaml")
    problem = problem_of(f"config={name}")
    assert problem.reason.startswith(reason) and problem.fix.startswith(fix)


def test_a_folder_without_a_run_is_one_problem(folder: Path) -> None:
    Path("empty").mkdir()
    assert "it has no config.yaml" in problem_of("empty").reason


def test_the_folder_of_a_run_stands_for_its_config(folder: Path) -> None:
    config = load_config(["config=minimal.yaml", "seed=7"])
    write_resolved(config, "runs/minimal/config.yaml")
    assert load_config(["runs/minimal"]) == config
    assert load_config(["runs/minimal/", "seed=8"]).seed == 8
    assert override_problem("runs/minimal").reason.startswith("given twice")
    Path("runs/empty").mkdir()
    assert problem_of("runs/empty", "config=minimal.yaml").key == "runs/empty"


def test_a_problem_of_a_file_or_an_argument_has_no_value(folder: Path) -> None:
    """Only a key can be "not given"."""
    for text in ("data:\n\ttrain_files: a\n", "- a\n"):
        assert "not given" not in str(file_problem(text))
    assert "not given" not in str(problem_of("runs/nowhere"))
    assert "not given" in str(problem_of("dry_run"))


@pytest.mark.parametrize(
    ("word", "meant"), [("no", "false"), ("On", "true"), ("YES", "true"), ("off", "false")]
)
def test_words_that_an_older_yaml_takes_for_booleans(folder: Path, word: str, meant: str) -> None:
    problem = override_problem(f"data.shuffle={word}")
    assert problem.reason == f"must be true or false; {word} is a text in YAML 1.2"
    assert problem.fix == f"write {meant}"


def test_other_values_in_place_of_booleans(folder: Path) -> None:
    for value in ("1", "maybe", "[]"):
        problem = override_problem(f"data.shuffle={value}")
        assert problem.reason == "must be true or false"
        assert problem.fix.startswith("write true or false")


@pytest.mark.parametrize("value", ["['a' 'b']", "[a, b", "{a: 1"])
def test_a_list_with_a_slip_is_not_told_to_be_a_text(folder: Path, value: str) -> None:
    assert "a comma between two entries" in override_problem(f"data.train_files={value}").fix
    assert "inside the shell's quotes too" in override_problem("name=@a").fix


def test_duplicate_override(folder: Path) -> None:
    problem = override_problem("seed=1", "seed=2")
    assert (problem.key, problem.value) == ("seed", "2")
    assert "1, then 2" in problem.reason


def test_override_through_a_scalar_and_with_a_mapping(folder: Path) -> None:
    assert "valid string" in override_problem("name.first=x").reason
    assert "valid list" in override_problem("trainer.logger.0=x").reason
    assert load_config(["config=minimal.yaml", "optim={lr: 1}"]).optim.lr == 1


def test_yaml_syntax_error_names_the_line(folder: Path) -> None:
    problem = file_problem("name: x\nmodel: [a\ndata: 3\n")
    assert problem.key == "broken.yaml:3"
    assert "not valid YAML" in problem.reason


@pytest.mark.parametrize("text", ["- a\n", "just text\n", "", "{}"])
def test_top_level_must_be_a_mapping(folder: Path, text: str) -> None:
    problem = file_problem(text)
    assert "broken.yaml" in problem.key and "no keys and values" in problem.reason


def test_files_that_other_programs_save(folder: Path) -> None:
    config = load_config(["config=minimal.yaml"])
    Path("bom.yaml").write_bytes(codecs.BOM_UTF8 + MINIMAL.encode())
    Path("crlf.yaml").write_bytes(MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(["config=bom.yaml"]) == load_config(["config=crlf.yaml"]) == config
    Path("utf16.yaml").write_bytes(MINIMAL.encode("utf-16"))
    assert "not UTF-8" in problem_of("config=utf16.yaml").reason
    assert "indent it with spaces" in file_problem(MINIMAL.replace("  ", "\t")).fix


def test_duplicate_keys_in_the_file(folder: Path) -> None:
    problem = file_problem(MINIMAL.replace("  n: 4\n", "  n: 4\n  n: 8\n"))
    assert (problem.key, problem.value, problem.source) == ("rollout.n", 8, "broken.yaml:12")
    assert "broken.yaml:11" in problem.reason
    assert file_problem(MINIMAL + "rollout:\n  n: 2\n").key == "rollout"
    first_lacks_keys = MINIMAL + "trainer:\n  total_training_steps: 4\n"
    assert file_problem(first_lacks_keys.replace("trainer:\n", "trainer:\n  test_freq: 1\n", 1)).key


@pytest.mark.parametrize("section", sections())
def test_an_empty_section_is_one_problem(folder: Path, section: str) -> None:
    """As if all of its keys were commented out."""
    values = yaml.safe_load(MINIMAL)
    problem = file_problem(yaml.safe_dump(values | {section: None}))
    assert (problem.key, problem.reason) == (section, "the section has no keys")
    assert f"{section}.KEY=VALUE" in problem.fix


@pytest.mark.parametrize(
    "line", ["seed: !!python/object/apply:os.getcwd []", "? [a]\n: 1", "seed: 1\n---\nseed: 2"]
)
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
    assert {"model.path", "rollout.n", "data.train_files", "trainer.total_training_steps"} < set(
        keys
    )


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("name=2024", "must be a valid string"),
        ("name=a/b", "pattern"),
        ("seed=1.0", "valid integer"),
        ("model=5", "a section must be keys and values"),
        ("actor=", "the section has no keys"),
        ("data.train_files=[]", "at least 1 item"),
        ("reward.function=arithmetics", "neither a built-in reward"),
        ("rollout.n=1", "greater than or equal to 2"),
        ("rollout.top_p=.nan", "finite"),
        ("quant.scheme=nvfp4", "must be 'bf16', 'w4a16', 'w8a8', 'fp8' or 'w4a8'"),
        ("quant.group_size=12", "multiple of 8"),
        ("quant.ignore=[lm_head, 're:(']", "not a regular expression"),
        ("optim.betas=[0.9]", "required"),
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


BY_TOKENS = "actor.use_dynamic_bsz=true"
SIZES = ["actor.ppo_micro_batch_size_per_gpu=null", "actor.log_prob_micro_batch_size_per_gpu=null"]
MISFITS = """
data.train_batch_size=10 | actor.ppo_mini_batch_size | 10 prompts
actor.ppo_micro_batch_size_per_gpu=5 | actor.ppo_micro_batch_size_per_gpu | 4 * 4 = 16
actor.ppo_micro_batch_size_per_gpu=null | actor.ppo_micro_batch_size_per_gpu | use_dynamic_bsz=false requires
actor.log_prob_micro_batch_size_per_gpu=null | actor.log_prob_micro_batch_size_per_gpu | requires a size
actor.ppo_max_token_len_per_gpu=9999 | actor.ppo_max_token_len_per_gpu | set actor.use_dynamic_bsz to true
BY_TOKENS actor.ppo_max_token_len_per_gpu=null | actor.ppo_max_token_len_per_gpu | fills micro-batches
BY_TOKENS actor.ppo_max_token_len_per_gpu=9 | actor.ppo_max_token_len_per_gpu | never split
quant.scheme=bf16 quant.kernels=qarl | quant.kernels | no quantized layers
quant.scheme=w4a8 quant.kernels=dequantized | quant.kernels | set it to qarl
quant.scheme=fp8 quant.kernels=dequantized | quant.kernels | set it to engine
quant.ignore=[re:head] | quant.ignore | wrong results
data.val_files=[] | data.val_files | an evaluation is due
data.val_files=[] trainer.val_before_train=false trainer.test_freq=5 | data.val_files | an evaluation is due
trainer.resume_mode=resume_path | trainer.resume_mode | no checkpoint to resume
trainer.n_gpus_per_node=2 | trainer.n_gpus_per_node | one process
rollout.tensor_model_parallel_size=2 | rollout.tensor_model_parallel_size | one process
rollout.temperature=0.005 | rollout.temperature | greater than or equal to 0.01
rollout.top_p=0.9 backend=verl | rollout.top_p | whole vocabulary
rollout.top_k=5 actor.old_log_probs=rollout actor.loss=grpo | actor.old_log_probs | rollout.top_k
actor.old_log_probs=rollout | actor.old_log_probs | always be 1
rollout.top_k=5 quant.align=linears | rollout.top_k | set quant.align=model
actor.loss=grpo actor.band_scaling=length | actor.band_scaling | no effect
"""
"""Arguments, the key that the error is about, and words of its reason or fix."""


@pytest.mark.parametrize("row", MISFITS.strip().splitlines())
def test_keys_that_do_not_fit(folder: Path, row: str) -> None:
    overrides, key, words = row.replace("BY_TOKENS", " ".join([BY_TOKENS, *SIZES])).split(" | ")
    problem = override_problem(*overrides.split())
    assert problem.key == key and words in f"{problem.reason} {problem.fix}", str(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant.scheme=bf16", "quant.align=linears", "quant.ignore=[]"],
        ["quant.scheme=w4a8", "quant.kernels=qarl"],
        ["quant.scheme=w4a8", "quant.kernels=qarl", "backend=verl"],
        ["quant.scheme=fp8", "quant.kernels=qarl", "quant.align=linears"],
        ["quant.kernels=dequantized"],
        ["quant.ignore=lm_head", "optim.lr=0"],
        ["data.val_files=[]", "trainer.val_before_train=false"],
        ["rollout.top_p=0.9", "rollout.top_k=20", "quant.align=exact"],
        ["rollout.top_k=0", "rollout.top_p=1", "quant.align=off"],
    ],
)
def test_keys_that_fit(folder: Path, overrides: list[str]) -> None:
    load_config(["config=minimal.yaml", *overrides])


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
          fix: choose a divisor of 7, or make data.train_batch_size a multiple of 4""")
