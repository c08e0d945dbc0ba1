"""What a run reads may change between its start and a resume: each thing is refused, noted, or the same, by a table.

The table runs in both backends, up to where an engine or verl would start."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_runs import edit_model_config, row, write_rows
from interrupted_runs import (
    BACKENDS,
    REWARD,
    interrupted,
    record,
    resumed,
    rows,
    run_config,
    template,
)
from random_models import save_tokenizer
from safetensors.torch import load_file, save_file

from qarl.errors import UserError

KL = {
    "local": ["actor.loss=grpo", "actor.use_kl_loss=true"],
    "verl": ["verl.actor_rollout_ref.actor.use_kl_loss=true"],
}


def renamed(extra_info: dict[str, Any]) -> dict[str, Any]:
    """The same values under other names, whose order is the same."""
    return {"index": extra_info["index"], "limit": extra_info["level"]}


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
    run_folder: Path, backend: str, name: str, capsys: pytest.CaptureFixture[str]
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


@pytest.fixture
def forget_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plugins of this test are unknown to the next one."""
    monkeypatch.setenv("QARL_PLUGINS", "")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("qarl_plugin_"):
            del sys.modules[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("text", "now", "said"),
    [
        ("FACTOR = 2\n", "[own.py]", "the source of the plugin own.py changed (SHA-256 "),
        ("FACTOR = 1\n", "[]", "the plugin own.py is no longer loaded"),
        ("FACTOR = 1\n", "[own.py, more.py]", "the plugin more.py was not loaded before"),
        ("FACTOR = 1\n", "[./own.py]", ""),
    ],
)
def test_a_change_of_the_plugins_is_noted(
    run_folder: Path,
    forget_plugins: None,
    backend: str,
    text: str,
    now: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("own.py", "more.py"):
        Path(name).write_text("FACTOR = 1\n")
    config = run_config(backend, "plugins=[own.py]")
    interrupted(config, record(config))
    Path("own.py").write_text(text)
    notes = resumed(run_config(backend, f"plugins={now}"), capsys)
    assert bool(notes) == bool(said), notes
    assert said in notes
    assert "trained in different ways" in notes or not said
