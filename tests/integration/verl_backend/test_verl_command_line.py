"""verl's own command line with +qarl=SCHEME: keys without effect, other engines, and all conflicts in one message."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from checkout import ROOT

pytest.importorskip("verl")

from verl_command_lines import ROLLOUT, composed, keys_of, told

from qarl.config.read_config import available_configs
from qarl.errors import UserError
from qarl.verl.added_keys import unread_keys
from qarl.verl.check_before_ray import CheckBeforeRay
from qarl.verl.checks import composed_errors
from qarl.verl.named_files import missing_files, refuse_unread_groups

pytestmark = pytest.mark.usefixtures("own_environment")

QUANT = "actor_rollout_ref.actor.fsdp_config.quant"


@pytest.mark.parametrize(
    "groups", [(), ("+qarl_machine=cpu",), ("+qarl_loss=sapo",), ("+qarl_loss=reinforce",)]
)
def test_verls_defaults_and_the_groups_have_no_key_without_effect(groups: tuple[str, ...]) -> None:
    assert list(unread_keys(composed("+qarl=w4a16", *groups))) == []
    assert told(*groups) == []


ADDED = [
    ("lora.r=32", "lora.r", f"{QUANT}.lora={{r: 32}}"),
    ("quant.scheme=fp8", "quant.scheme", f"{QUANT}.scheme"),
    ("rollout.n=4", "rollout.n", f"{ROLLOUT}.n"),
    ("optim.lr=1", "optim.lr", "actor_rollout_ref.actor.optim.lr"),
    ("trainer.balancebatch=true", "trainer.balancebatch", "did you mean trainer.balance_batch?"),
    ("data.truncaton=left", "data.truncaton", "did you mean data.truncation?"),
    (f"{ROLLOUT}.no_such_key=1", f"{ROLLOUT}.no_such_key", "remove it"),
    ("actor_rollout_ref.actor.no_such_key=1", "actor_rollout_ref.actor.no_such_key", "remove it"),
    ("data.no_such_key_anywhere=1", "data.no_such_key_anywhere", "remove it"),
]


@pytest.mark.parametrize(("added", "key", "advice"), ADDED)
def test_an_added_key_that_nothing_reads(added: str, key: str, advice: str) -> None:
    (error,) = told(f"+{added}")
    assert error.what == f"{key} has no effect"
    assert advice in (error.fix or "")


@pytest.mark.parametrize(
    "added",
    [
        "trainer.save_minutes=3",
        "data.apply_chat_template_kwargs.enable_thinking=false",
        f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs=3",
        "actor_rollout_ref.model.override_config.attention_dropout=0.0",
        "ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO",
        "data.cache_dir=x",
    ],
)
def test_an_added_key_that_is_read(added: str) -> None:
    assert told(f"+{added}") == []


CONFLICTS = [
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name"),
    (f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization"),
    (
        f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8",
        f"{ROLLOUT}.engine_kwargs.vllm.quantization",
    ),
    (f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.enable"),
    ("trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode"),
    ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode"),
    ("trainer.use_v1=false", "trainer.use_v1"),
    (f"{ROLLOUT}.top_k=1", f"{ROLLOUT}.top_k"),
    (f"{ROLLOUT}.top_p=0.5", f"{ROLLOUT}.top_p"),
    (f"{ROLLOUT}.temperature=0.02", f"{ROLLOUT}.temperature"),
]


@pytest.mark.parametrize(("override", "key"), CONFLICTS)
def test_what_qarl_does_not_run_in_is_refused_by_name(override: str, key: str) -> None:
    assert keys_of(told(override)) == [key]


def test_a_warmup_that_never_ends() -> None:
    warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    assert keys_of(told(f"{warmup}=1000", "trainer.total_training_steps=120")) == [warmup]
    assert told(f"{warmup}=1000") == []


def test_all_conflicts_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["+lora.r=32", *(override for override, _ in CONFLICTS[:4])]
    with pytest.raises(SystemExit):
        CheckBeforeRay().on_job_start(composed("+qarl=w4a16", *wrong), task_function=None)
    text = capsys.readouterr().err
    assert text.startswith("error: 5 settings cannot be used")
    assert [
        key for key in ("lora.r has", *(key for _, key in CONFLICTS[:4])) if key not in text
    ] == []
    assert text.count("fix: ") == 5


def test_adapters_are_four_conflicts_at_once_and_the_command_of_the_docs_has_none() -> None:
    keys = keys_of(told(f"{QUANT}.lora={{r: 32}}"))
    assert len(keys) == 4
    (command,) = (
        block
        for block in re.findall(r"```\n(.*?)```", (ROOT / "docs/do/verl.md").read_text(), re.DOTALL)
        if "quant.lora=" in block
    )
    words = shlex.split(command.replace("\\\n", " "))
    overrides = [
        word for word in words if "=" in word and "..." not in word and "searchpath" not in word
    ]
    config = composed(*overrides)
    assert composed_errors(config) == []
    assert config.actor_rollout_ref.actor.fsdp_config.quant.lora.r == 32


def test_w4a8_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CheckBeforeRay().on_job_start(
            composed("+qarl=w4a16", f"{QUANT}.scheme=w4a8"), task_function=None
        )
    text = capsys.readouterr().err
    assert text.startswith("error: w4a8 rollouts are refused")
    assert "Instantiation" not in text


def test_shipped_configs_add_only_keys_that_are_read() -> None:
    from qarl.config import load_config
    from qarl.verl.run import verl_config

    names = [name for name in available_configs() if "verl" in name or "qwen" in name]
    assert len(names) > 5
    for name in names:
        config = load_config([f"config={name}"])
        if config.backend == "verl":
            verl_config(config, on_cpu=False)


def test_missing_files_are_refused_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """With what else is wrong, in one message. A name of the Hub, a URL and a list are no missing files."""
    missing = (
        "data.train_files=[nowhere.parquet]",
        "actor_rollout_ref.model.path=/nowhere",
        "reward.custom_reward_function.path=nowhere.py",
        f"{ROLLOUT}.name=sglang",
    )
    with pytest.raises(SystemExit) as end:
        CheckBeforeRay().on_job_start(composed("+qarl=w4a16", *missing), task_function=None)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: 4 settings cannot be used")
    for word in missing[:3]:
        key, _, path = word.partition("=")
        assert f"{key}={path.strip('[]')} does not exist" in said
    there = (
        "data.train_files=hdfs://a/b.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "reward.custom_reward_function.path=pkg://qarl.data.rewards",
    )
    assert list(missing_files(composed("+qarl=w4a16", *there))) == []


MAIN = ("python", "-m", "verl.trainer.main_ppo")
SEARCH = "hydra.searchpath=[pkg://qarl.verl]"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((*MAIN, "+qarl=w4a16", "trainer.n_gpus_per_node=1"), True),
        ((*MAIN, "++qarl_machine=cpu", "hydra.searchpath=[pkg://mine]"), True),
        ((*MAIN, SEARCH, "+qarl=w4a16"), False),
        ((*MAIN, "--config-path=/mine", "+qarl=w4a16"), False),
        ((*MAIN, "trainer.project_name=+qarl=w4a16"), False),
        (("python", "mine.py", "+qarl=w4a16"), False),
        (("python", "-m", "pytest", "+qarl=w4a16"), False),
    ],
)
def test_a_group_without_the_search_path(words: tuple[str, ...], refused: bool) -> None:
    if not refused:
        refuse_unread_groups(words)
        return
    with pytest.raises(UserError, match=f"fix: add '{re.escape(SEARCH)}' before it"):
        refuse_unread_groups(words)


def test_verls_own_command_is_ended_before_it_reads_its_config() -> None:
    command = [sys.executable, *MAIN[1:], "+qarl=w4a16", "no_such_key=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 2
    assert run.stderr.count("error: +qarl=w4a16 would have no effect") == 1
    assert "Traceback" not in run.stderr
