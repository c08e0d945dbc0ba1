"""What a run reads may change between its start and a resume: each thing is refused, noted, or the same, by a table.

The table runs in both backends, up to where an engine or verl would start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_runs import CONFIG, edit_model_config, row, write_rows
from checkpoint_state import interrupted_run, reseal
from random_models import save_tokenizer
from safetensors.torch import load_file, save_file

from qarl.checkpoint.storage import write_json
from qarl.checks.check import RunInputs
from qarl.checks.inputs_record import RECORD_FILE, Record, config_keys, reference_digest
from qarl.checks.registry import CHECKS
from qarl.config import Config, load_config, write_resolved
from qarl.errors import UserError
from qarl.metrics.tracker import write_versions
from qarl.train import _errors
from qarl.trainer.input_changes import _PARTS, NOT_RECORDED, changes_of
from qarl.trainer.resume import find_start
from qarl.verl.checkpoint import find_verl_start

BACKENDS = ("local", "verl")
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""
DATED = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ strftime_now('t%d') }}"
KL = {
    "local": ["actor.loss=grpo", "actor.use_kl_loss=true"],
    "verl": ["verl.actor_rollout_ref.actor.use_kl_loss=true"],
}


def rows(**first: Any) -> list[dict[str, Any]]:
    """The rows of the training file. `first`: changes of the first."""
    usual = [row(f"t3 t{i}") | {"extra_info": {"index": i, "level": "easy"}} for i in range(8)]
    return [usual[0] | first, *usual[1:]]


def renamed(extra_info: dict[str, Any]) -> dict[str, Any]:
    """The same values under other names, whose order is the same."""
    return {"index": extra_info["index"], "limit": extra_info["level"]}


def run_config(backend: str, *overrides: str) -> Config:
    return load_config(["config=run.yaml", f"backend={backend}", *overrides])


def record(config: Config) -> Record:
    return RunInputs(config).record


def interrupted(config: Config, saved: Record | None) -> None:
    """Write an interrupted run of `config` whose checkpoint has the record `saved`."""
    if config.backend == "local":
        run = interrupted_run(config, 2)
        reseal(run / "checkpoints" / "step_2", inputs=... if saved is None else saved)
        return
    folder = config.run_dir / "checkpoints" / "global_step_2"
    (folder / "actor").mkdir(parents=True)
    for name in ("data.pt", "actor/model_world_size_1_rank_0.pt"):
        torch.save({}, folder / name)
    write_resolved(config, config.run_dir / "config.yaml")
    if saved is not None:
        write_json(config.run_dir / RECORD_FILE, saved)


def resumed(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    """The notes of a resume."""
    now = record(config)
    if config.backend == "local":
        return "\n".join(find_start(config, now).notes)
    capsys.readouterr()
    find_verl_start(config, now)
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path, pristine_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pristine_model, "model")
    text = CONFIG.replace("total_training_steps: 1", "total_training_steps: 9")
    Path("run.yaml").write_text(f"{text}reward: {{function: 'reward.py:score'}}\n")
    Path("reward.py").write_text(REWARD)
    write_rows("train.jsonl", rows())
    write_rows("val.jsonl", [row("t9 t10")])
    return tmp_path


def edit_json(name: str, change: Callable[[Any], Any]) -> None:
    path = Path("model") / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def backwards(value: Any) -> Any:
    """The same JSON with every object's keys in another order."""
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(entry) for entry in value] if isinstance(value, list) else value


def swap_words(tokenizer: dict[str, Any]) -> dict[str, Any]:
    words = tokenizer["model"]["vocab"]
    words |= {"t40": words["t41"], "t41": words["t40"]}
    return tokenizer


def other_weights() -> None:
    path = Path("model/model.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, path, metadata={"format": "pt"})


def other_files() -> None:
    """The same weights, spread over two files."""
    path = Path("model/model.safetensors")
    weights = load_file(path)
    names = sorted(weights)
    path.unlink()
    for part in (0, 1):
        save_file(
            {name: weights[name] for name in names[part::2]}, f"model/model-{part}.safetensors"
        )


def move(name: str, target: str) -> None:
    shutil.move(name, target)


def template(text: str) -> None:
    Path("model/chat_template.jinja").write_text(text)


def add_to_template(text: str) -> None:
    path = Path("model/chat_template.jinja")
    path.write_text(path.read_text() + text)


def as_parquet() -> None:
    import datasets

    datasets.Dataset.from_list(rows()).to_parquet("train.parquet")


@dataclass(frozen=True)
class Case:
    """`change`: what happens between the start and the resume. `words`: what the refusal or the note says. `run`: the
    overrides of both, by backend. `now`: those of the resume only."""

    verdict: str
    change: Callable[[], object]
    words: tuple[str, ...] = ()
    run: dict[str, list[str]] | None = None
    now: tuple[str, ...] = ()


CASES = {
    "rms_norm_eps": Case(
        "refused", lambda: edit_model_config(rms_norm_eps=1e-2), ("rms_norm_eps", "1e-06, now 0.01")
    ),
    "rope_theta": Case(
        "refused",
        lambda: edit_model_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        ("rope_parameters.rope_theta", "500000"),
    ),
    "a key that transformers does not know": Case(
        "refused",
        lambda: edit_model_config(use_gated_attention=True),
        ("use_gated_attention", "was null, now true"),
    ),
    "positions": Case(
        "refused",
        lambda: edit_model_config(max_position_embeddings=256),
        ("max_position_embeddings",),
    ),
    "config.json in another order": Case("same", lambda: edit_json("config.json", backwards)),
    "a key of the training of the model": Case(
        "same",
        lambda: edit_model_config(
            initializer_range=0.5, use_cache=False, transformers_version="4.51.0"
        ),
    ),
    "ends of generation_config.json": Case(
        "refused",
        lambda: edit_json("generation_config.json", lambda keys: keys | {"eos_token_id": [1, 5]}),
        ("ended at the token ids [1], now at [1, 5]", "generation_config.json"),
    ),
    "temperature of generation_config.json": Case(
        "same",
        lambda: edit_json(
            "generation_config.json", lambda keys: keys | {"temperature": 0.3, "do_sample": True}
        ),
    ),
    "the tokenizer's eos": Case(
        "refused",
        lambda: edit_json("tokenizer_config.json", lambda keys: keys | {"eos_token": "t9"}),
        ("now at [1, 9]", "tokenizer_config.json"),
    ),
    "a special token that the reward does not see": Case(
        "refused",
        lambda: edit_json("tokenizer_config.json", lambda keys: keys | {"pad_token": "t9"}),
        ("the text that the tokenizer makes of tokens", "the reward would read another text"),
    ),
    "the vocabulary": Case(
        "refused",
        lambda: edit_json("tokenizer.json", swap_words),
        ("the tokenizer's vocabulary", "SHA-256"),
    ),
    "tokenizer.json in another order": Case("same", lambda: edit_json("tokenizer.json", backwards)),
    "the tokenizer written again": Case("same", lambda: save_tokenizer(Path("model"), 64)),
    "the template": Case(
        "refused",
        lambda: template("t7 {% for m in messages %}{{ m['content'] }} {% endfor %}"),
        ("the tokens of the prompts in data.train_files", "restore the chat template of the model"),
    ),
    "a comment in the template": Case(
        "noted",
        lambda: add_to_template("{# a comment #}"),
        ("chat template has changed", "prompts are the same"),
    ),
    "weights": Case("same", other_weights),
    "weights of a KL term's reference": Case(
        "refused", other_weights, ("the weights in model.path changed", "KL term"), run=KL
    ),
    "weights of a KL term's reference in other files": Case("same", other_files, run=KL),
    "the reward": Case(
        "noted",
        lambda: Path("reward.py").write_text(REWARD.replace("1.0", "0.5")),
        ("the source of the reward function changed", "may not be comparable"),
    ),
    "another reward": Case(
        "refused",
        lambda: Path("reward.py").write_text(REWARD + "def other(**values): return 1.0\n"),
        ("reward.function was",),
        now=("reward.function=reward.py:other",),
    ),
    "a prompt": Case(
        "refused",
        lambda: write_rows("train.jsonl", rows(prompt=[{"role": "user", "content": "t50"}])),
        ("the tokens of the prompts in data.train_files", "restore the files of data.train_files"),
    ),
    "a ground truth": Case(
        "refused",
        lambda: write_rows(
            "train.jsonl", rows(reward_model={"style": "rule", "ground_truth": "8"})
        ),
        ("reward_model.ground_truth in data.train_files",),
    ),
    "data_source": Case(
        "refused",
        lambda: write_rows("train.jsonl", rows(data_source="other")),
        ("data_source in data.train_files",),
    ),
    "extra_info": Case(
        "refused",
        lambda: write_rows("train.jsonl", rows(extra_info={"index": 0, "level": "hard"})),
        ("extra_info in data.train_files changed",),
    ),
    "extra_info with another key": Case(
        "refused",
        lambda: write_rows(
            "train.jsonl", [one | {"extra_info": renamed(one["extra_info"])} for one in rows()]
        ),
        ("extra_info in data.train_files changed",),
    ),
    "extra_info in another order": Case(
        "same", lambda: write_rows("train.jsonl", rows(extra_info={"level": "easy", "index": 0}))
    ),
    "the order of the rows": Case(
        "refused", lambda: write_rows("train.jsonl", rows()[::-1]), ("tokens of the",)
    ),
    "rows appended": Case(
        "refused", lambda: write_rows("train.jsonl", [*rows(), row()]), ("had 8 prompts, now 9",)
    ),
    "rows removed": Case(
        "refused", lambda: write_rows("train.jsonl", rows()[:7]), ("had 8 prompts, now 7",)
    ),
    "validation prompts": Case(
        "noted",
        lambda: write_rows("val.jsonl", [row("t9 t7")]),
        ("validation prompts", "cannot be compared"),
    ),
    "the model's folder moved": Case(
        "noted",
        lambda: move("model", "moved"),
        ("model.path was", "the same content"),
        now=("model.path=moved",),
    ),
    "the model's folder behind a link": Case(
        "same", lambda: (move("model", "moved"), Path("model").symlink_to("moved"))
    ),
    "the model's folder moved and changed": Case(
        "refused",
        lambda: (edit_model_config(rms_norm_eps=1e-2), move("model", "moved")),
        ("rms_norm_eps",),
        now=("model.path=moved",),
    ),
    "another model without a reference": Case(
        "noted",
        lambda: (other_weights(), move("model", "moved")),
        ("model.path was",),
        now=("model.path=moved",),
    ),
    "data in another format": Case(
        "noted", as_parquet, ("data.train_files was",), now=("data.train_files=train.parquet",)
    ),
    "another data file": Case(
        "refused",
        lambda: write_rows("other.jsonl", rows(data_source="other")),
        ("data_source in",),
        now=("data.train_files=other.jsonl",),
    ),
    "the reward's file moved": Case(
        "noted",
        lambda: move("reward.py", "moved.py"),
        ("reward.function was",),
        now=("reward.function=moved.py:score",),
    ),
    "threads": Case(
        "noted", lambda: None, ("changed trainer.num_threads",), now=("trainer.num_threads=2",)
    ),
    "nothing": Case("same", lambda: None),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_what_may_change_between_a_start_and_a_resume(
    folder: Path, backend: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    run = (case.run or {}).get(backend, [])
    config = run_config(backend, *run)
    interrupted(config, record(config))
    case.change()
    config = run_config(backend, *run, *case.now)
    if case.verdict == "refused":
        with pytest.raises(UserError, match="cannot resume from") as caught:
            resumed(config, capsys)
        said = str(caught.value)
        assert "why: " in said and "fix: " in said and "trainer.resume_mode=disable" in said
    else:
        said = resumed(config, capsys)
        assert bool(said) == (case.verdict == "noted"), said
    assert [word for word in case.words if word not in said] == [], said


def test_every_part_of_a_record_is_compared(folder: Path) -> None:
    """And every key of the model's config that is left out decides nothing."""
    inputs = RunInputs(run_config("local"))
    assert set(inputs.record) == {*_PARTS, "transformers"}
    left_out = inputs.hf_config.to_dict().keys() - {
        key.partition(".")[0] for key in config_keys(inputs.hf_config)
    }
    assert left_out == {
        *(
            "_name_or_path",
            "attention_dropout",
            "bos_token_id",
            "chunk_size_feed_forward",
            "dtype",
            "eos_token_id",
        ),
        *(
            "id2label",
            "initializer_range",
            "is_encoder_decoder",
            "label2id",
            "output_attentions",
            "pad_token_id",
        ),
        *(
            "output_hidden_states",
            "problem_type",
            "return_dict",
            "transformers_version",
            "use_cache",
        ),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_record_the_same(folder: Path, backend: str) -> None:
    assert record(run_config(backend)) == record(run_config("local"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_without_a_record_resumes_with_a_note(
    folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(backend)
    interrupted(config, None)
    assert NOT_RECORDED in resumed(config, capsys)
    moved = run_config(backend, "data.train_files=val.jsonl")
    with pytest.raises(UserError, match="the config changes what is trained") as caught:
        resumed(moved, capsys)
    assert "data.train_files" in str(caught.value)


@pytest.mark.parametrize("key", ["trainer.n_gpus_per_node", "trainer.nnodes"])
def test_another_number_of_ranks_is_refused_with_its_reason(
    folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config("verl")
    interrupted(config, record(config))
    with pytest.raises(UserError, match="another number of ranks") as caught:
        resumed(run_config("verl", f"{key}=2"), capsys)
    assert f"{key} was 1, now 2" in str(caught.value) and "each rank has its own part" in str(
        caught.value
    )


class On:
    """A `datetime` whose now is a day."""

    def __init__(self, day: int) -> None:
        self.day = day

    def now(self) -> datetime:
        return datetime(2026, 11, self.day)


@pytest.fixture
def set_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the day of November 2026 that QaRL and transformers take for today."""
    from transformers.utils import chat_template_utils

    from qarl.data import dated_template

    def on(day: int) -> None:
        monkeypatch.setattr(chat_template_utils, "datetime", On(day))
        monkeypatch.setattr(dated_template, "datetime", On(day))

    return on


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_template_with_todays_date_is_named_and_can_be_mended(
    folder: Path, backend: str, set_day: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    template(DATED)
    set_day(28)
    config = run_config(backend)
    interrupted(config, record(config))
    assert resumed(config, capsys) == "", "on the same day"
    set_day(29)
    with pytest.raises(UserError, match="what it reads has changed") as caught:
        resumed(config, capsys)
    said = str(caught.value)
    for words in (
        "differ because the chat template writes the date, which was t28, now t29",
        "resume_mode=disable",
    ):
        assert words in said
    assert (
        'replace strftime_now("t%d") by "t28" in the chat template of the model\'s folder' in said
    )
    template(DATED.replace("strftime_now('t%d')", "'t28'"))
    assert "chat template has changed" in resumed(config, capsys)


def test_a_template_with_todays_date_is_named_at_the_start(
    folder: Path, set_day: Callable[[int], None]
) -> None:
    """And one that only mentions the date, in a branch for tools, is not."""
    check = next(check for check in CHECKS if check.name == "the prompts are the same every day")
    template(DATED)
    set_day(28)
    (finding,) = check.findings(RunInputs(run_config("local")))
    assert finding.status == "warning" and "today's date into the prompts (t28)" in finding.what
    assert 'replace strftime_now("t%d") by "t28"' in (finding.fix or "")
    template(
        "{% if tools %}{{ strftime_now('%d') }}{% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    assert list(check.findings(RunInputs(run_config("local")))) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    folder: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(backend)
    interrupted(config, record(config))
    edit_model_config(rms_norm_eps=1e-2)
    (error,) = [error for error in _errors(run_config(backend)) if "cannot resume" in error.what]
    assert "rms_norm_eps" in (error.where or "")


def test_other_threads_of_the_environment_are_noted_in_verl(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The local backend says so in its log."""
    config = run_config("verl")
    interrupted(config, record(config))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_versions(config.run_dir)
    assert resumed(config, capsys) == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "bits may differ: threads" in resumed(config, capsys)


def test_another_transformers_is_named_beside_what_it_changes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is no change. A key that only one of two versions knows is a note, and another value is refused."""
    config = run_config("local")
    saved = record(config) | {"transformers": "5.0.0"}
    saved["model"] = {
        key: value for key, value in saved["model"].items() if key != "attention_bias"
    }
    interrupted(config, saved)
    note = resumed(config, capsys)
    assert f"only one of transformers 5.0.0 and {version('transformers')} has this key" in note
    edit_model_config(rms_norm_eps=1e-2)
    with pytest.raises(UserError, match=f"transformers was 5.0.0, now {version('transformers')}"):
        resumed(run_config("local"), capsys)


@pytest.mark.parametrize(
    ("before", "now", "refused"), [("a", "b", True), ("a", "a", None), (None, "b", False)]
)
def test_a_reference_from_the_hub_is_compared_by_its_commit(
    folder: Path, before: str | None, now: str, refused: bool | None
) -> None:
    """None: the Hub's cache did not know the commit."""
    saved = record(run_config("local"))
    reads = [
        saved | {"reference": reference_digest([], SimpleNamespace(_commit_hash=commit))}
        for commit in (before, now)
    ]
    assert [change.refused for change in changes_of(*reads)] == (
        [] if refused is None else [refused]
    )
