"""The statistics of `qarl eval` against samples whose truth is known, and its arguments."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist

import pytest
from checkout import ROOT

from qarl.checkpoint.export import ExportRequest
from qarl.config import load_config, write_resolved
from qarl.data.prompts import load_prompts
from qarl.demo.tiny_model import make_tokenizer
from qarl.errors import UserError
from qarl.eval import evaluate
from qarl.eval.arguments import EvalRequest, settings_of
from qarl.eval.evaluate import folders, table, tabulated
from qarl.metrics.estimates import Z, average, differences, interval, normal, standard_error


@pytest.mark.parametrize(("mean", "responses"), [(0.5, 1), (0.9, 1), (0.98, 1), (0.4, 8)])
def test_the_interval_covers_the_truth_as_often_as_it_says(mean: float, responses: int) -> None:
    """With several responses, prompts differ in difficulty: 80 of them tell less than 640 answers."""
    rng, covered = random.Random(0), 0
    for _ in range(600):
        hard = [rng.random() < 0.5 for _ in range(80)] if responses > 1 else [False] * 80
        chances = (
            [mean / 2 if one else mean * 1.5 for one in hard] if responses > 1 else [mean] * 80
        )
        means = [
            sum(rng.random() < chance for _ in range(responses)) / responses for chance in chances
        ]
        found = interval(means)
        assert 0 <= found.low <= found.mean <= found.high <= 1
        covered += found.low <= mean <= found.high
    assert 0.92 <= covered / 600 <= 0.985


def test_equal_scores_still_have_an_interval() -> None:
    """Of Wilson's formula at 0 of N: Z^2 / (N + Z^2)."""
    none = interval([0.0] * 30)
    assert (none.mean, none.low) == (0, 0) and none.high == pytest.approx(Z**2 / (30 + Z**2))
    assert interval([1.0] * 30).low == pytest.approx(1 - none.high)
    assert interval([-1.0, 3.0]).low == pytest.approx(1 - Z * standard_error([-1.0, 3.0]))


def test_the_difference_is_taken_prompt_by_prompt() -> None:
    rng = random.Random(1)
    first = [float(rng.random() < 0.5) for _ in range(100)]
    second = [0.0 if place < 5 else score for place, score in enumerate(first)]
    gap = normal(differences(first, second))
    assert gap.mean == pytest.approx(sum(first[:5]) / 100)
    alone = (standard_error(first) ** 2 + standard_error(second) ** 2) ** 0.5
    assert (gap.high - gap.low) / (2 * Z) < alone / 3
    assert normal(differences(first, first)).high == 0


def test_the_error_of_an_average_is_that_of_independent_sets() -> None:
    """The means have the variances 1/4 and 1/12, and their average a quarter of the sum of these: 1/12."""
    found = average({"a": [1.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0]})
    half = NormalDist().inv_cdf(0.975) / 12**0.5
    assert (found.low, found.mean, found.high) == pytest.approx((0.5 - half, 0.5, 0.5 + half))


@pytest.mark.parametrize("sets", [2, 5])
def test_the_interval_of_an_average_covers_the_truth_as_often_as_it_says(sets: int) -> None:
    rng, covered = random.Random(0), 0
    chances = [0.3 + 0.1 * number for number in range(sets)]
    for _ in range(600):
        drawn = {
            str(chance): [float(rng.random() < chance) for _ in range(40)] for chance in chances
        }
        found = average(drawn)
        covered += found.low <= sum(chances) / sets <= found.high
    assert 0.92 <= covered / 600 <= 0.975


def test_sets_count_once_in_the_average_and_the_table_says_it_in_percent() -> None:
    scores = {
        "run": {"a": {0: 1.0, 1: 0.0}, "b": {2: 1.0}},
        "bf16": {"a": {0: 1.0, 1: 1.0}, "b": {2: 1.0}},
    }
    found = tabulated(scores)
    assert found["a"]["difference"]["mean"] == -0.5 and found["b"]["prompts"] == 1
    assert (
        found["average of the sets"]["run"]["mean"] == average({"a": [1, 0], "b": [1]}).mean == 0.75
    )
    assert found["average of the sets"]["difference"]["mean"] == -0.25
    lines = table(found, {"a": 4, "b": 1}).splitlines()
    assert lines[0] == "| set | prompts | mean@ | run | bf16 | difference |"
    assert lines[2].startswith("| a | 2 | 4 | 50.0% [") and "| -50.0% [" in lines[2]
    assert "difference" not in tabulated({"run": scores["run"]})["a"]


def test_a_run_lends_its_settings_and_arguments_win(tmp_path: Path) -> None:
    config = load_config(["config=quickstart.yaml", f"output_dir={tmp_path}"])
    write_resolved(config, config.run_dir / "config.yaml")
    own = settings_of(EvalRequest(config.run_dir))
    assert (
        own.files == tuple(config.data.val_files)
        and own.reward == config.reward
        and own.max_response_length == 80
    )
    given = settings_of(
        EvalRequest(config.run_dir, files="a.jsonl,b.jsonl", temperature=0.6, max_response_length=9)
    )
    assert (given.files, given.temperature, given.max_response_length) == (
        ("a.jsonl", "b.jsonl"),
        0.6,
        9,
    )
    silent = settings_of(
        EvalRequest(config.run_dir, apply_chat_template_kwargs={"enable_thinking": False})
    )
    assert own.config is not None and silent.config is not None
    # The frame between the turns of a conversation reads the config, as the prompts do.
    assert own.config.data.apply_chat_template_kwargs == {}
    assert silent.config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    adapted = load_config(["config=quickstart_lora.yaml", f"output_dir={tmp_path}"])
    write_resolved(adapted, adapted.run_dir / "config.yaml")
    with pytest.raises(UserError, match="not possible for a run with adapters"):
        settings_of(EvalRequest(adapted.run_dir, "bf16"))
    (adapted.run_dir / "export" / "adapter").mkdir(parents=True)
    settings_of(EvalRequest(adapted.run_dir))
    (adapted.run_dir / "export" / "adapter").rmdir()
    with pytest.raises(UserError, match="lost its adapter"):
        settings_of(EvalRequest(adapted.run_dir))
    export = tmp_path / "export"
    export.mkdir()
    with pytest.raises(UserError, match="cannot be scored"):
        settings_of(EvalRequest(export))
    (export / "config.json").write_text("{}")
    assert settings_of(EvalRequest(export, files="a.jsonl")).reward.function == "math_verify"
    for wrong, message in (
        (EvalRequest(export), "no file with prompts"),
        (EvalRequest(export, "bf16"), "need the folder"),
    ):
        with pytest.raises(UserError, match=message):
            settings_of(wrong)


def test_the_files_of_prepare_math_eval_say_how_many_responses(tmp_path: Path) -> None:
    """Their column is the one that load_prompts reads."""
    assert 'SAMPLES_COLUMN = "__rollout_n__"' in (ROOT / "scripts/math_data.py").read_text(
        encoding="utf-8"
    )
    row = {
        "data_source": "aime24",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2"},
    }
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(row | {"__rollout_n__": 32}) + "\n")
    (prompt,) = load_prompts(str(file), tokenizer=make_tokenizer(), max_prompt_length=16)
    assert prompt.samples == 32
    file.write_text(json.dumps(row) + "\n")
    assert (
        load_prompts(str(file), tokenizer=make_tokenizer(), max_prompt_length=16)[0].samples is None
    )
    file.write_text(json.dumps(row | {"__rollout_n__": 0}) + "\n")
    with pytest.raises(UserError, match="__rollout_n__"):
        load_prompts(str(file), tokenizer=make_tokenizer(), max_prompt_length=16)


def test_which_weights_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's export; beside BF16 both formats of one checkpoint, so that only quantization differs."""
    asked: list[ExportRequest] = []
    monkeypatch.setattr(evaluate, "export", lambda request: asked.append(request) or "exported")
    run, other = tmp_path / "run", str(tmp_path / "other")
    (run / "export").mkdir(parents=True)
    (run / "config.yaml").touch()

    def scored(**more: object) -> list[str]:
        asked.clear()
        with ExitStack() as stack:
            found = list(folders(EvalRequest(run, **more), stack))  # type: ignore[arg-type]  # keys of several types
            assert all(path.parent.is_dir() for _, path in found)
        return [label for label, path in found if path == run / "export" or path == Path(other)]

    assert scored() == [str(run)] and not asked
    assert scored(against=other) == [str(run), other] and not asked
    assert scored(against="bf16", step=7) == []
    assert [(request.run, request.step, request.format) for request in asked] == [
        (run, 7, "quantized"),
        (run, 7, "bf16"),
    ]
    assert not any(request.output.parent.exists() for request in asked)
    scored(step=7)
    (run / "export").rmdir()
    assert len(asked) == 1 and scored() == [] and asked[0].format == "quantized"


def model_with(folder: Path, positions: int | None) -> Path:
    folder.mkdir()
    keys = {} if positions is None else {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


LENGTHS = [
    (None, {}, (1024, 2048)),
    (3072, {}, (1024, 2048)),
    (2048, {}, (682, 1366)),
    (90, {}, (30, 60)),
    (2048, {"max_prompt_length": 100}, (100, 1948)),
    (2048, {"max_response_length": 500}, (1024, 500)),
    (2048, {"max_response_length": 1500}, (548, 1500)),
    (2048, {"max_prompt_length": 1000, "max_response_length": 1048}, (1000, 1048)),
]
"""Positions of a model, lengths that were given -> tokens of prompt and response."""


@pytest.mark.parametrize(("positions", "given", "lengths"), LENGTHS)
def test_default_lengths_fit_the_positions(
    tmp_path: Path, positions: int | None, given: dict[str, int], lengths: tuple[int, int]
) -> None:
    model = model_with(tmp_path / "model", positions)
    settings = settings_of(EvalRequest(model=model, files="x.parquet", **given))
    assert (settings.max_prompt_length, settings.max_response_length) == lengths


@pytest.mark.parametrize(
    "given", [{"max_prompt_length": 2048}, {"max_prompt_length": 1, "max_response_length": 2048}]
)
def test_lengths_beyond_the_positions_are_refused(tmp_path: Path, given: dict[str, int]) -> None:
    model = model_with(tmp_path / "model", 2048)
    with pytest.raises(UserError, match="the model has 2048 positions"):
        settings_of(EvalRequest(model=model, files="x.parquet", **given))


def test_the_other_model_counts_too(tmp_path: Path) -> None:
    small = model_with(tmp_path / "small", 300)
    model = model_with(tmp_path / "model", 4096)
    settings = settings_of(EvalRequest(model=model, files="x.parquet", against=str(small)))
    assert settings.max_prompt_length + settings.max_response_length == 300


SUMMARIES = {
    "failed": (
        '{"steps": 2, "finished": false, "failed": "no verdict"}',
        "failed after step 2: no",
    ),
    "interrupted": ('{"steps": 2, "finished": false, "failed": null}', "interrupted after step 2"),
    "killed": (None, "has no summary"),
    "finished": ('{"steps": 2, "finished": true, "failed": null}', ""),
}


@pytest.mark.parametrize("case", SUMMARIES)
def test_a_run_that_did_not_finish_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    summary, words = SUMMARIES[case]
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    (tmp_path / "config.yaml").write_text("unknown_key: 1")
    with pytest.raises(UserError, match="unknown_key"):
        settings_of(EvalRequest(tmp_path))
    printed = capsys.readouterr().err
    assert words in printed and printed.startswith(f"note: {tmp_path} " if words else "")
    assert bool(printed) is bool(words)
