"""The config reader: what it accepts, what it refuses and with which words, and that nothing heavy is imported."""

import dataclasses
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from checkout import ROOT, SHIPPED

from qarl.config import Config, ConfigError, Problem, build_config, describe_keys, load_config, write_resolved
from qarl.config import source as config_source
from qarl.config import strict_yaml as config_yaml
from qarl.config.ignore import is_ignored
from qarl.config.source import available_configs, find_config, shipped_configs
from qarl.errors import UserError

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory that holds minimal.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minimal.yaml").write_text(MINIMAL)
    return tmp_path


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


def test_defaults_file_and_overrides_in_that_order(folder: Path) -> None:
    Path("three.yaml").write_text(MINIMAL + "optim: {lr: 2e-4, weight_decay: 0.5}\n")
    config = load_config(["optim.lr=3e-4", "config=three.yaml"])
    assert (config.optim.eps, config.optim.weight_decay, config.optim.lr) == (1e-8, 0.5, 3e-4)


def test_defaults_are_the_papers_and_verls(folder: Path) -> None:
    config = load_config(["config=minimal.yaml"])
    actor = config.actor
    assert (actor.seq_clip_ratio_high, actor.seq_clip_ratio_low) == (4e-4, 3e-4)
    assert (actor.neg_seq_clip_ratio_low, actor.neg_seq_clip_ratio_high, actor.seq_tis_imp_ratio_cap) == (3e-4, 7e-4, 2)
    assert (config.backend, config.quant.scheme, config.quant.align) == ("local", "w4a16", "model")
    assert (config.quant.ignore, config.quant.group_size) == (["lm_head"], 128)
    assert (config.optim.betas, config.optim.lr, config.trainer.test_freq) == ((0.9, 0.999), 1e-6, -1)
    assert config.data.train_files == ["train.parquet"]
    assert config.run_dir == Path("runs/minimal")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E+3", 1500.0),
        ("-.5", -0.5),
        ("7", 7),
        ("0123", 123),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("'1e-4'", "1e-4"),
        (".inf", math.inf),
        ("[a, 1, 1e2]", ["a", 1, 100.0]),
        ("re:.*mlp.gate$", "re:.*mlp.gate$"),
    ],
)
def test_yaml_values_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = config_yaml.parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["off", "1e-4", "true", "~", "", "2024-01-01", "- a", "a: b", "'", "x # y", "é", "1."])
def test_text_survives_a_written_config(text: str) -> None:
    assert config_yaml.parse_value(config_yaml.dump({"key": text})) == {"key": text}


def test_floats_and_off_in_the_file_mean_what_they_say(folder: Path) -> None:
    Path("minimal.yaml").write_text(MINIMAL + "optim:\n  lr: 1e-4\nquant:\n  align: off\n")
    config = load_config(["config=minimal.yaml"])
    assert config.optim.lr == 0.0001
    assert config.quant.align == "off"


def test_override_kinds(folder: Path) -> None:
    config = load_config(
        [
            "config=minimal.yaml",
            "dry_run=true",
            "data.val_files=[a.parquet,b.parquet]",
            "trainer.logger=tensorboard",
            "optim.betas=[0.8, 0.95]",
            "rollout.max_num_batched_tokens=null",
            "optim.weight_decay=0",
            "reward.function=my/rewards.py:score",
            "model.path=a=b",
        ]
    )
    assert config.dry_run is True
    assert config.data.val_files == ["a.parquet", "b.parquet"]
    assert config.trainer.logger == ["tensorboard"]
    assert config.optim.betas == (0.8, 0.95)
    assert config.optim.weight_decay == 0
    assert config.reward.function == "my/rewards.py:score"
    assert config.model.path == "a=b"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_parse(path: Path) -> None:
    assert load_config([f"config={path}"]).name == path.stem


def test_quickstart_is_shipped() -> None:
    assert ROOT / "configs" / "quickstart.yaml" in SHIPPED


def test_resolved_config_reads_back_equal(folder: Path) -> None:
    config = load_config(["config=minimal.yaml", "optim.lr=1e-5", "name='1e5'", "quant.ignore=[lm_head, 're:.*gate$']"])
    write_resolved(config, folder / "new" / "config.yaml")
    assert load_config(["config=new/config.yaml"]) == config
    written = yaml.safe_load((folder / "new" / "config.yaml").read_text())
    leaves = {f"{section}.{key}" for section, keys in written.items() if isinstance(keys, dict) for key in keys}
    assert {*written, *leaves} == set(describe_keys())


def test_configs_are_frozen() -> None:
    config = build_config(yaml.safe_load(MINIMAL))
    with pytest.raises(pydantic.ValidationError):
        config.trainer.total_training_steps = 6


def test_every_key_is_described() -> None:
    assert [key for key, text in describe_keys().items() if not text] == []


def test_lookup_order(folder: Path) -> None:
    (folder / "configs").mkdir()
    assert find_config("quickstart.yaml")[0] == shipped_configs() / "quickstart.yaml"  # type: ignore[operator]
    (folder / "configs" / "quickstart.yaml").write_text(MINIMAL)
    assert find_config("quickstart.yaml")[0] == Path("configs/quickstart.yaml")
    (folder / "quickstart.yaml").write_text(MINIMAL)
    assert find_config("quickstart.yaml")[0] == Path("quickstart.yaml")
    absolute = folder / "minimal.yaml"
    assert find_config(str(absolute))[0] == absolute


def test_installed_package_finds_only_its_own_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    (site / "qarl").mkdir(parents=True)
    (site / "configs").mkdir()
    monkeypatch.setattr(config_source, "__file__", str(site / "qarl" / "config" / "source.py"))
    assert shipped_configs() is None
    (site / "qarl" / "configs").mkdir()
    assert shipped_configs() == site / "qarl" / "configs"


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
    assert f"{scalar} holds a value" in override_problem(override).reason


def test_override_through_a_scalar_in_the_file(folder: Path) -> None:
    Path("scalar.yaml").write_text(MINIMAL + "quant: 5\n")
    problems = problems_of("config=scalar.yaml", "quant.scheme=bf16")
    assert [problem.key for problem in problems] == ["quant.scheme", "quant"]


def test_override_that_is_not_yaml(folder: Path) -> None:
    problem = override_problem("model.path=[a")
    assert problem.key == "model.path"
    assert "not a YAML value" in problem.reason


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


@pytest.mark.parametrize("line", ["seed: !!int '5'", "seed: &a 1\nname2: *a", "? [a]\n: 1", "seed: 1\n---\nseed: 2"])
def test_yaml_beyond_plain_data_is_refused(folder: Path, line: str) -> None:
    assert "broken.yaml:" in file_problem(MINIMAL + line).key


def test_file_that_is_not_text(folder: Path) -> None:
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problem_of("config=binary.yaml").reason


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


def test_unknown_key_like_none_lists_the_section(folder: Path) -> None:
    problem = file_problem(MINIMAL + "quant:\n  zzz: 1\n")
    assert (problem.key, problem.value, problem.source) == ("quant.zzz", 1, "broken.yaml:19")
    assert "known here: scheme, group_size, ignore, align" in problem.fix


def test_missing_keys_are_named_one_by_one(folder: Path) -> None:
    Path("short.yaml").write_text("name: x\ndata:\n  train_files: []\n")
    keys = [problem.key for problem in problems_of("config=short.yaml")]
    assert {"model.path", "rollout.n", "data.train_files", "trainer.total_training_steps"} < set(keys)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("name=2024", "must be text"),
        ("name=a/b", "of the form"),
        ("seed=-1", "at least 0"),
        ("seed=true", "a whole number"),
        ("seed=1.0", "a whole number"),
        ("dry_run=yes", "true or false"),
        ("model=5", "section"),
        ("model.path=''", "not empty"),
        ("data.train_files=[]", "a list of at least 1"),
        ("data.train_batch_size=0", "at least 1"),
        ("reward.function=arithmetics", "neither a built-in reward"),
        ("reward.function=module:2x", "neither a built-in reward"),
        ("rollout.n=1", "at least 2"),
        ("rollout.temperature=0", "above 0"),
        ("rollout.top_p=0", "above 0"),
        ("rollout.top_p=1.01", "at most 1"),
        ("rollout.top_p=.nan", "finite"),
        ("quant.scheme=nvfp4", "one of bf16, w4a16, w8a8, fp8, w4a8"),
        ("quant.ignore=[lm_head, 're:(']", "not a regular expression"),
        ("quant.ignore=[lm_head, 're:(a+)+$']", "may not come to an end"),
        ("quant.align=full", "one of off, linears, model, exact"),
        ("actor.seq_tis_imp_ratio_cap=0.9", "at least 1"),
        ("actor.neg_seq_clip_ratio_low=1.1", "at most 1"),
        ("actor.seq_clip_ratio_high=0", "above 0"),
        ("optim.muon_momentum=1", "below 1"),
        ("actor.loss_agg_mode=token-mean", "must be seq-mean-token-mean"),
        ("actor.grad_clip='1.0'", "must be a number"),
        ("optim.betas=[0.9]", "too few"),
        ("optim.betas=[0.9, 0.9, 0.9]", "a list of at most 2"),
        ("trainer.test_freq=0", "not a number of steps"),
        ("trainer.save_freq=0", "not a number of steps"),
        ("trainer.max_ckpt_to_keep=0", "at least 1"),
        ("trainer.resume_mode=resume", "one of auto, disable, resume_path"),
        ("trainer.logger=[console, wanb]", "one of console, tensorboard, wandb"),
    ],
)
def test_bad_value(folder: Path, override: str, reason: str) -> None:
    problem = override_problem(override)
    assert problem.key.startswith(override.partition("=")[0])
    assert reason in problem.reason
    assert problem.source == "command line"
    assert problem.about == describe_keys()[override.partition("=")[0]]


def test_misspelled_option_names_the_right_one(folder: Path) -> None:
    assert override_problem("quant.align=linear").fix == "write linears"
    assert override_problem("trainer.logger=[wanb]").fix == "write wandb"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["data.train_batch_size=10"], "actor.ppo_mini_batch_size", ["10 prompts", "1, 2, 5, 10"]),
        (
            ["actor.ppo_micro_batch_size_per_gpu=5"],
            "actor.ppo_micro_batch_size_per_gpu",
            ["4 * 4 = 16", "1, 2, 4, 8, 16"],
        ),
        (["quant.group_size=12"], "quant.group_size", ["w4a16 packs eight int4 values", "multiple of 8"]),
        (["quant.scheme=w4a8", "quant.group_size=12"], "quant.group_size", ["w4a8 packs eight int4", "multiple of 8"]),
        (["quant.ignore=[]"], "quant.ignore", ["garbage", "add lm_head"]),
        (["quant.ignore=[re:head]"], "quant.ignore", ["garbage"]),
        (["data.val_files=[]"], "data.val_files", ["val_before_train", "trainer.test_freq=-1"]),
        (
            ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=5"],
            "data.val_files",
            ["every 5 steps"],
        ),
        (["trainer.resume_mode=resume_path"], "trainer.resume_mode", ["no checkpoint is named", "resume_from_path="]),
        (["trainer.resume_from_path=a"], "trainer.resume_from_path", ["auto does not look", "resume_mode=resume_path"]),
        (["trainer.n_gpus_per_node=2"], "trainer.n_gpus_per_node", ["one process", "backend=verl"]),
        (["rollout.tensor_model_parallel_size=2"], "rollout.tensor_model_parallel_size", ["one process"]),
        (["rollout.max_num_batched_tokens=8"], "rollout.max_num_batched_tokens", ["max_num_seqs = 256"]),
        (["rollout.val_temperature=0.6"], "rollout.val_temperature", ["greedy", "backend=verl"]),
        (
            ["rollout.val_temperature=0.005", "backend=verl"],
            "rollout.val_temperature",
            ["vLLM samples at 0.01", "greedy"],
        ),
        (["rollout.temperature=0.005"], "rollout.temperature", ["vLLM samples at 0.01", "0.01 or more"]),
        (["rollout.top_p=0.9", "backend=verl"], "rollout.top_p", ["whole vocabulary", "backend=local", "to 1"]),
        (["rollout.top_k=5", "backend=verl"], "rollout.top_k", ["whole vocabulary", "backend=local", "to -1"]),
        (["rollout.top_p=0.9", "quant.align=off"], "rollout.top_p", ["quant.align=off", "quant.align=model"]),
        (["rollout.top_k=5", "quant.align=linears"], "rollout.top_k", ["quant.align=linears", "quant.align=model"]),
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
          reason: must be at least 2
          about: {describe_keys()["rollout.n"]}
          fix: choose a value of 2 or more

        actor.ppo_mini_batch_size = 4  (minimal.yaml:13)
          reason: data.train_batch_size = 7 prompts a step do not split into whole mini-batches of 4 prompts
          fix: choose a divisor of 7 (1, 7), or make data.train_batch_size a multiple of 4""")


def test_built_in_python() -> None:
    values = yaml.safe_load(MINIMAL)
    assert build_config(values) == Config(**values)
    values["data"]["train_batch_size"] = 7
    with pytest.raises(ConfigError, match="whole mini-batches"):
        Config(**values)
    with pytest.raises(ConfigError, match=r"rollout\.n: \(not given\)"):
        build_config({**values, "rollout": {}})


def test_unwritable_output_is_a_user_error(folder: Path) -> None:
    config = load_config(["config=minimal.yaml", "output_dir=minimal.yaml"])
    with pytest.raises(UserError, match="cannot be written"):
        write_resolved(config, config.run_dir / "config.yaml")


def test_ignore_is_matched_as_compressed_tensors_does() -> None:
    compressed_tensors = pytest.importorskip("compressed_tensors.utils.match")
    for pattern in ["lm_head", "re:lm_head", "re:.*head", "re:head", "head", "re:lm", "model.lm_head", "re:^lm_head$"]:
        assert is_ignored("lm_head", [pattern]) == compressed_tensors.match_name("lm_head", pattern), pattern


def test_loss_settings_are_the_losss_own() -> None:
    tbpo = pytest.importorskip("qarl.tbpo")
    names = [field.name for field in dataclasses.fields(tbpo.TBPOConfig)]
    actor = build_config(yaml.safe_load(MINIMAL)).actor
    assert tbpo.TBPOConfig(**{name: getattr(actor, name) for name in names}) == tbpo.TBPOConfig()


def test_import_is_light() -> None:
    code = (
        "import sys, qarl.config; qarl.config.load_config(['config=quickstart.yaml']); "
        "print(sorted({'torch', 'vllm', 'transformers', 'verl'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
