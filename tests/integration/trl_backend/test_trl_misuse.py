"""Ways of misusing `QaRLTrainer`: each gives one clear error, and no engine is started."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset, IterableDataset
from peft import IA3Config, LoraConfig, get_peft_model
from random_models import save_random_model
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig

from qarl.errors import UserError
from qarl.trl import QaRLConfig, QaRLTrainer, checks, trainer
from qarl.trl.config import RUN_KEYS
from qarl.trl.rewards import ground_truths


class EngineStarted(Exception):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise EngineStarted

    monkeypatch.setattr(trainer, "RolloutEngine", start)


PROMPTS = ["t3 t4", "t5 t6 t7"]
DATA = Dataset.from_dict({"prompt": PROMPTS})
WITH_TRUTHS = Dataset.from_dict({"prompt": PROMPTS, "ground_truth": ["12", "13"]})


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def build(
    model: Any,
    folder: Path,
    data: Any = DATA,
    arguments: dict[str, Any] | None = None,
    rewards: Any = reward,
    **settings: Any,
) -> Any:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 16}
    kv_cache = {"quant_group_size": 32, "vllm_cpu_kvcache_space_gib": 0.25}
    base = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "max_steps": 1,
        **sizes,
        **kv_cache,
    }
    return QaRLTrainer(
        model=model if isinstance(model, torch.nn.Module) else str(model),
        reward_funcs=rewards,
        args=QaRLConfig(**base | settings),
        train_dataset=data,
        **(arguments or {}),
    )


def test_a_run_that_saves_needs_room_for_a_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=f"there is no room for {tmp_path}") as caught:
        build(model, tmp_path, save_strategy="steps", save_steps=1)
    assert "one checkpoint" in str(caught.value) and "1,000 are free" in str(caught.value)
    with pytest.raises(EngineStarted):
        build(model, tmp_path, save_strategy="no")


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"bf16": True}, "bf16=True"),
    ({"use_vllm": True}, "use_vllm=True"),
    ({"top_p": 0.9}, "top_p=0.9"),
    ({"generation_kwargs": {"stop": ["x"]}}, "generation_kwargs"),
    ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
    ({"loss_type": "ppo"}, "loss_type='ppo'"),
    ({"optim": "adafactor"}, "optim='adafactor'"),
    ({"max_completion_length": None}, "max_completion_length"),
    ({"steps_per_generation": 4, "save_strategy": "steps", "save_steps": 3}, "multiple of 4"),
    ({"beta": 0.04}, "beta=0.04"),
    ({"quant_scheme": "int3"}, "quant_scheme"),
    ({"quant_scheme": "w4a8"}, "w4a8"),
    ({"quant_align": "bits"}, "quant_align"),
    ({"quant_ignore": ["re:.*"]}, "no layer is left to quantize"),
    ({"seq_clip_ratio_high": -1.0}, "seq_clip_ratio_high"),
    ({"loss_type": "dapo", "seq_clip_ratio_high": 0.01}, "it has no effect with loss_type"),
    ({"seq_clip_ratio_low": 0.01}, "set positive_band to two_sided"),
    ({"max_completion_length": 4096}, "positions"),
    ({"temperature": 0.01}, "all responses to a prompt would be the same"),
    ({"warmup_steps": 1000, "max_steps": 120}, "warmup_steps=1000"),
    ({"vllm_max_model_length": 18}, "vllm_max_model_length=18"),
    ({"vllm_cpu_kvcache_space_gib": 1e-5}, "vllm_cpu_kvcache_space_gib"),
]


FIELDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_generations": 1}, ["num_generations=1", "2 or more"]),
    ({"num_generations": 0}, ["num_generations=0", "2 or more"]),
    ({"num_generations": 3}, ["num_generations=3", "generation_batch_size=4"]),
    ({"num_generations": "2"}, ["num_generations='2'", "a whole number"]),
    ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size=0"]),
    ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0"]),
    ({"max_completion_length": "long"}, ["max_completion_length='long'", "a whole number"]),
    ({"learning_rate": "1e-6"}, ["learning_rate='1e-6'", "a number", "1.0e-6"]),
    ({"temperature": "hot"}, ["temperature='hot'", "a number"]),
    ({"max_steps": 1e3}, ["max_steps=1000.0", "a whole number"]),
    ({"gradient_checkpointing": "yes"}, ["gradient_checkpointing='yes'", "True or False"]),
    ({"save_strategy": "sometimes"}, ["save_strategy='sometimes'", "'steps'"]),
    ({"quant_group_size": "32"}, ["quant_group_size='32'", "a whole number"]),
    ({"quant_group_size": 32.5}, ["quant_group_size=32.5", "a whole number"]),
    ({"quant_mismatch_limit": "small"}, ["quant_mismatch_limit='small'", "a number"]),
    ({"seq_clip_ratio_high": "wide"}, ["seq_clip_ratio_high='wide'", "a number"]),
    ({"quant_shceme": "w4a16"}, ["quant_shceme", "did you mean quant_scheme?"]),
    ({"quant_groupsize": 32}, ["quant_groupsize", "did you mean quant_group_size?"]),
    ({"vllm_max_num_seq": 4}, ["did you mean vllm_max_num_seqs?"]),
    ({"reward_timeout": 4}, ["did you mean reward_timeout_s?"]),
    ({"scheme": "w4a16"}, ["did you mean quant_scheme?"]),
    ({"rollout_n": 8}, ["did you mean num_generations?"]),
    ({"lr": 1e-6}, ["did you mean learning_rate?"]),
    ({"lora_rank": 8}, ["did you mean peft_config.r?"]),
    ({"max_prompt_length": 16}, ["max_prompt_length", "the dataset"]),
    ({"use_vlm": True, "quant_algin": "off"}, ["use_vllm?", "quant_align?"]),
    ({"turbo": True}, ["turbo: leave it out"]),
]
"""Fields that are unknown, or whose values TRL would compare or divide."""


@pytest.mark.parametrize(("given", "words"), FIELDS, ids=[str(given) for given, _ in FIELDS])
def test_a_field_is_refused_where_it_is_written(
    model: Path, tmp_path: Path, given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        build(model, tmp_path, **given)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert caught.value.where and [name for name in given if name not in caught.value.where] == []
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_settings_are_copied_and_extended(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Extended(QaRLConfig):
        budget: int = 3

    settings = Extended(output_dir=str(tmp_path), use_cpu=True, budget=4, learning_rate=1)
    assert copy.deepcopy(settings) == settings and settings.budget == 4
    plain = QaRLConfig(output_dir=str(tmp_path), use_cpu=True)
    assert pickle.loads(pickle.dumps(plain)) == plain
    with pytest.raises(UserError, match="did you mean budget"):
        Extended(output_dir=str(tmp_path), bugdet=4)


def test_settings_of_a_command_line(tmp_path: Path) -> None:
    """HfArgumentParser, which TRL's scripts use, changes the types of the dataclass's fields."""
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--quant_scheme", "w8a8"]
    (settings,) = HfArgumentParser(QaRLConfig).parse_args_into_dataclasses(words)
    assert settings.quant_scheme == "w8a8"
    assert settings.neftune_noise_alpha is None


def test_narrow_bands_are_said_in_trls_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineStarted):
        build(model, tmp_path)
    told = capsys.readouterr().err
    assert (
        "bands of 3.0e-04 are narrow for responses of at most 16 tokens; set seq_clip_ratio_high="
        in told
    )


@pytest.mark.parametrize(
    ("settings", "words"), SETTINGS, ids=[str(settings) for settings, _ in SETTINGS]
)
def test_a_setting_is_refused(
    model: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(model, tmp_path, **settings)
    text = str(caught.value)
    assert words in text
    assert (
        caught.value.__cause__ is None
    )  # Python would print the same error twice, once with QaRL's keys
    # The error speaks of the fields of QaRLConfig, not of the config of `qarl train`.
    assert not [key for key in RUN_KEYS if "." in key and key in text]


LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
PEFT: list[tuple[Any, str]] = [
    (LoraConfig(**LORA, lora_dropout=0.1), "lora_dropout=0.1"),
    (LoraConfig(**LORA, bias="all"), "bias='all'"),
    (LoraConfig(**LORA, use_dora=True), "use_dora=True"),
    (LoraConfig(**LORA, use_rslora=True), "use_rslora=True"),
    (LoraConfig(**LORA, modules_to_save=["lm_head"]), "modules_to_save"),
    (LoraConfig(**LORA | {"r": 0}), "r=0 gives the model no adapters"),
    (LoraConfig(r=8), "target_modules=None"),
    (LoraConfig(r=8, target_modules=".*_norm"), "peft_config.target_modules"),
    (LoraConfig(r=8, target_modules=["c_attn"]), "peft_config.target_modules"),
    (LoraConfig(r=8, target_modules=["q_proj", "lm_head"]), "peft_config.target_modules"),
    (LoraConfig(r=600, target_modules="all-linear"), "peft_config.r"),
    (LoraConfig(r=8, lora_alpha=12, target_modules="all-linear"), "peft_config.lora_alpha"),
    (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3Config"),
    ({"r": 8}, "peft_config=dict"),
]


@pytest.mark.parametrize(("peft_config", "words"), PEFT, ids=[words for _, words in PEFT])
def test_a_peft_config_is_refused(
    model: Path, tmp_path: Path, peft_config: Any, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(model, tmp_path, arguments={"peft_config": peft_config})
    assert words in str(caught.value) and "lora." not in str(caught.value)


def test_a_model_with_an_adapter_of_peft_and_a_second_is_refused(
    model: Path, tmp_path: Path
) -> None:
    def wrapped(**fields: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
        return get_peft_model(base, LoraConfig(**LORA | fields))

    with pytest.raises(UserError, match="has adapters of peft"):
        build(wrapped(), tmp_path, arguments={"peft_config": LoraConfig(**LORA)})
    two = wrapped()
    two.add_adapter("second", LoraConfig(**LORA))
    with pytest.raises(UserError, match="default, second"):
        build(two, tmp_path)
    with pytest.raises(UserError, match="rank_pattern"):
        build(wrapped(rank_pattern={"q_proj": 4}), tmp_path)


BEST = {
    "load_best_model_at_end": True,
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_strategy": "steps",
}
BEST |= {"eval_steps": 4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_align": "off"}, "quant_align"),
        ({"master_dtype": "bf16"}, "master_dtype"),
        (BEST, "load_best_model_at_end"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        (
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "use_reentrant",
        ),
    ],
)
def test_what_adapters_do_not_go_with(
    model: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(model, tmp_path, arguments={"peft_config": LoraConfig(**LORA)}, **settings)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision='bf16'"),
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
    ],
)
def test_a_setting_of_accelerate_is_refused(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=words):
        build(model, tmp_path)


@pytest.mark.parametrize("name", [*checks.ARGUMENTS, "optimizers"])
def test_an_argument_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=name):
        build(model, tmp_path, arguments={name: [object()]})


def test_another_config_or_version_of_trl_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8
    )
    with pytest.raises(UserError, match="needs a QaRLConfig, got GRPOConfig"):
        QaRLTrainer(str(model), reward, args, DATA)
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda _: "1.17.0")
    with pytest.raises(UserError, match=r"needs trl==1\.16\.0, but 1\.17\.0"):
        build(model, tmp_path)


def test_data_of_unknown_lengths_are_refused(model: Path, tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": text} for text in PROMPTS]))
    with pytest.raises(UserError, match="streamed"):
        build(model, tmp_path, data=stream)
    with pytest.raises(EngineStarted):
        build(model, tmp_path, data=stream, vllm_max_model_length=64)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": []}, "a dataset is empty"),
        ({"question": PROMPTS}, "no column prompt[\\s\\S]*its columns: question"),
        ({"prompt": [3, 4]}, "the prompt of row 0 is 3"),
        ({"prompt": ["t3", ""]}, "the prompt of row 1 is ''"),
        ({"prompt": ["t3", None]}, "the prompt of row 1 is None"),
        ({"prompt": [[]]}, "the prompt of row 0"),
        ({"prompt": [[{"from": "human", "value": "t3"}]]}, "messages with role and content"),
    ],
)
def test_data_without_prompts_are_refused(
    model: Path, tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(model, tmp_path, data=Dataset.from_dict(columns))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("fp32", "torch.float32"),
        ("quantized", "is quantized already"),
        ("from a config", "not loaded from a checkpoint"),
        ("missing", "nowhere"),
    ],
)
def test_a_model_is_refused(model: Path, tmp_path: Path, broken: str, words: str) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32 if broken == "fp32" else "bfloat16"
    )
    loaded.is_quantized = broken == "quantized"
    if broken == "from a config":
        loaded.config._name_or_path = ""
    source = tmp_path / "nowhere" if broken == "missing" else loaded
    with pytest.raises(UserError, match=words):
        build(source, tmp_path)


@pytest.mark.parametrize("data", [[{"prompt": "t3"}], "data/train.parquet"], ids=str)
def test_data_that_are_no_dataset_are_refused(model: Path, tmp_path: Path, data: Any) -> None:
    with pytest.raises(UserError, match="a dataset is of the type"):
        build(model, tmp_path, data=data)


def test_a_tokenizer_by_name_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="processing_class is text"):
        build(model, tmp_path, arguments={"processing_class": str(model)})


class Callable:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]


def without_others(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def with_a_column(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


REWARDS: list[tuple[Any, str]] = [
    ("arithmetics", "did you mean arithmetic\\?"),
    ("rewards.py", "write rewards.py:FUNCTION"),
    ("nowhere.py:score", "cannot load nowhere.py[\\s\\S]*where: reward_funcs"),
    (Callable, "write Callable\\(\\)"),
    (5, "cannot be called"),
    ([reward, object()], "cannot be called"),
    ([], "no reward function was given"),
    (None, "no reward function was given"),
    (without_others, "add \\*\\*kwargs"),
    (with_a_column, "missing a required argument: 'answer'"),
]


@pytest.mark.parametrize(("rewards", "words"), REWARDS, ids=[words for _, words in REWARDS])
def test_a_reward_is_refused_before_the_model_is_loaded(
    model: Path, tmp_path: Path, rewards: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_policy", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=words):
        build(model, tmp_path, data=WITH_TRUTHS, rewards=rewards)


@pytest.mark.parametrize(
    "rewards", [Callable(), [Callable(), reward], "arithmetic"], ids=["one", "two", "name"]
)
def test_rewards_that_can_be_called(model: Path, tmp_path: Path, rewards: Any) -> None:
    with pytest.raises(EngineStarted):
        build(model, tmp_path, data=WITH_TRUTHS, rewards=rewards)


@pytest.mark.parametrize(
    ("columns", "fix"),
    [({}, "add the column ground_truth"), ({"answer": ["1", "2"]}, 'rename_column\\("answer", ')],
)
def test_a_reward_by_name_needs_ground_truths_before_the_first_rollout(
    model: Path, tmp_path: Path, columns: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_policy", lambda *_: pytest.fail("the model was loaded"))
    data = Dataset.from_dict({"prompt": PROMPTS, **columns})
    with pytest.raises(UserError, match=f"the dataset has no ground truths[\\s\\S]*{fix}"):
        build(model, tmp_path, data=data, rewards=[reward, "arithmetic"])


@pytest.mark.parametrize("row", [None, {}, {"style": "rule"}, "12"])
def test_a_row_of_verl_without_a_ground_truth_is_no_traceback(row: Any) -> None:
    with pytest.raises(UserError, match="the dataset has no ground truths"):
        ground_truths({"reward_model": [{"ground_truth": "3"}, row]})
    assert ground_truths({"reward_model": [{"ground_truth": "3"}]}) == ["3"]
